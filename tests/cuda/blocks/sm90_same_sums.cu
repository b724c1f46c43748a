// Compares bits of sums of wgmma with those of mma.sync m16n8k16, on which invariant rows depend
// (attention/invariant_softmax.cuh): one accumulator over many steps of 16 terms. Operands are normal, or spread over many
// exponents; as scores are computed (both operands in shared memory, from zeros) and as P V is (the left operand in registers, in
// addition to what is there).
#include <cmath>

#include "check.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/swizzled_tile.cuh"

using namespace libflash::cuda;

namespace {

constexpr int kThreads = 128, kM = 64, kPartK = 64;

// The position of register i, by the head comment of wgmma.cuh.
__device__ int row_of(int i) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
__device__ int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

template <class T>
__device__ uint32_t pair_of(T low, T high) {
    return pack_pair(to_float(low), to_float(high), T());
}

template <class T, int kN>
__device__ void store(const float (&d)[kN / 2], float* out) {
    for (int i = 0; i < kN / 2; ++i) out[row_of(i) * kN + column_of(i)] = d[i];
}

// The steps of mma.sync for terms k to k + 15 of a (kM x terms) and b, which has an element for each term and column.
template <class T, int kN, class Right>
__device__ void add_step(float (&d)[kN / 2], const T* a, int terms, int k, const Right& right) {
    uint32_t left[4];
    for (int i = 0; i < 4; ++i) {
        const T* const at = a + row_of(i * 2) * terms + k + i / 2 * 8 + threadIdx.x % 4 * 2;
        left[i] = pair_of(at[0], at[1]);
    }
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
        const int column = n * 8 + threadIdx.x % 32 / 4, first = k + threadIdx.x % 4 * 2;
        float part[4];
        for (int e = 0; e < 4; ++e) part[e] = d[4 * n + e];
        mma_m16n8k16(part, left, pair_of(right(first, column), right(first + 1, column)),
                     pair_of(right(first + 8, column), right(first + 9, column)), T());
        for (int e = 0; e < 4; ++e) d[4 * n + e] = part[e];
    }
}

// a: kM x terms; b: kN x terms. The first product does not accumulate.
template <class T, int kN>
__global__ void scores(const T* a, const T* b, int terms, float* by_wgmma, float* by_mma) {
    using A = SwizzledTile<kM, kPartK>;
    using B = SwizzledTile<kN, kPartK>;
    extern __shared__ char shared[];
    char* const tiles = A::align(shared);
    float d[kN / 2], e[kN / 2];
    for (int i = 0; i < kN / 2; ++i) d[i] = e[i] = 0.0f;
    for (int first = 0; first < terms; first += kPartK) {
        __syncthreads();
        for (int i = threadIdx.x; i < (kM + kN) * kPartK; i += kThreads) {
            const int row = i / kPartK, k = i % kPartK, row_of_b = row - kM;
            char* const to = row < kM ? tiles + A::offset(row, k / 8) : tiles + A::kBytes + B::offset(row_of_b, k / 8);
            *reinterpret_cast<T*>(to + k % 8 * 2) = (row < kM ? a + row * terms : b + row_of_b * terms)[first + k];
        }
        fence_shared_for_async();
        __syncthreads();
        wgmma_fence_operand(d);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kPartK / 16; ++step)
            Wgmma<T, kN>::template multiply_shared<false>(d, A::k_major_operand(shared_address(tiles), step),
                                                          B::k_major_operand(shared_address(tiles) + A::kBytes, step),
                                                          first > 0 || step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence_operand(d);
        for (int k = first; k < first + kPartK; k += 16)
            add_step<T, kN>(e, a, terms, k, [&](int term, int column) { return b[column * terms + term]; });
    }
    store<T, kN>(d, by_wgmma);
    store<T, kN>(e, by_mma);
}

// a: kM x terms, in registers; b: terms x kN. In addition to `before`.
template <class T, int kN>
__global__ void values(const T* a, const T* b, int terms, float before, float* by_wgmma, float* by_mma) {
    using B = SwizzledTile<kPartK, kN>;
    extern __shared__ char shared[];
    char* const tile = B::align(shared);
    float d[kN / 2], e[kN / 2];
    for (int i = 0; i < kN / 2; ++i) d[i] = e[i] = before;
    for (int first = 0; first < terms; first += kPartK) {
        __syncthreads();
        for (int i = threadIdx.x; i < kPartK * kN; i += kThreads) {
            const int k = i / kN, col = i % kN;
            *reinterpret_cast<T*>(tile + B::offset(k, col / 8) + col % 8 * 2) = b[(first + k) * kN + col];
        }
        fence_shared_for_async();
        __syncthreads();
        uint32_t left[kPartK / 16][4];
        for (int step = 0; step < kPartK / 16; ++step)
            for (int i = 0; i < 4; ++i) {
                const T* const at = a + row_of(i * 2) * terms + first + step * 16 + i / 2 * 8 + threadIdx.x % 4 * 2;
                left[step][i] = pair_of(at[0], at[1]);
            }
        wgmma_fence_operand(d);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kPartK / 16; ++step)
            Wgmma<T, kN>::template multiply<true>(d, left[step], B::mn_major_operand(shared_address(tile), step), true);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence_operand(d);
        for (int k = first; k < first + kPartK; k += 16)
            add_step<T, kN>(e, a, terms, k, [&](int term, int column) { return b[term * kN + column]; });
    }
    store<T, kN>(d, by_wgmma);
    store<T, kN>(e, by_mma);
}

// Numbers of both signs with exponents from -spread to spread; every 16th is zero, some of them -0.
template <class T>
std::vector<T> numbers(blocks::Random& random, size_t count, int spread) {
    std::vector<T> made(count);
    for (T& x : made) {
        const float fraction = 1.0f + static_cast<float>(random.between(0, (1 << 20) - 1)) / (1 << 20),
                    sign = random.between(0, 1) ? -1.0f : 1.0f;
        x = T(random.between(0, 15) ? std::ldexp(sign * fraction, random.between(-spread, spread)) : 0.0f * sign);
    }
    return made;
}

template <class Launch>
void compare(const std::string& name, int columns, const Launch& launch) {
    blocks::Check check(name);
    const blocks::Device<float> by_wgmma(kM * columns, NAN), by_mma(kM * columns, NAN);
    launch(by_wgmma.get(), by_mma.get());
    blocks::finish(name.c_str());
    const std::vector<float> got = by_wgmma.read(), wanted = by_mma.read();
    for (int i = 0; i < kM * columns; ++i)  // a sum of zeros may have either sign
        check.equal(got[i], wanted[i], "row %d col %d", i / columns, i % columns);
}

template <class T, int kN>
void check_width(const char* type, int terms, int spread) {
    blocks::Random random(kN + terms + spread);
    const std::string name = std::string(type) + ", " + std::to_string(terms) + " terms, " + std::to_string(kN) +
                             " columns, exponents to " + std::to_string(spread);
    const std::vector<T> a = numbers<T>(random, size_t(kM) * terms, spread), b = numbers<T>(random, size_t(kN) * terms, spread);
    const blocks::Device<T> a_there(a), b_there(b);
    const int bytes = (kM + kN) * kPartK * 2 + 1024;
    compare("scores, " + name, kN, [&](float* by_wgmma, float* by_mma) {
        scores<T, kN><<<1, kThreads, bytes>>>(a_there.get(), b_there.get(), terms, by_wgmma, by_mma);
    });
    compare("values, " + name, kN, [&](float* by_wgmma, float* by_mma) {
        values<T, kN><<<1, kThreads, bytes>>>(a_there.get(), b_there.get(), terms, 0.0f, by_wgmma, by_mma);
    });
    compare("more values, " + name, kN, [&](float* by_wgmma, float* by_mma) {
        values<T, kN><<<1, kThreads, bytes>>>(a_there.get(), b_there.get(), terms, 1.2345678f, by_wgmma, by_mma);
    });
}

template <class T>
void check_type(const char* type, std::initializer_list<int> spreads) {
    for (const int spread : spreads) {
        check_width<T, 64>(type, 64, spread);
        check_width<T, 64>(type, 192, spread);
        check_width<T, 64>(type, 16384, spread);
        check_width<T, 96>(type, 512, spread);
        check_width<T, 128>(type, 64, spread);
        check_width<T, 128>(type, 192, spread);
        check_width<T, 128>(type, 512, spread);
        check_width<T, 128>(type, 16384, spread);
    }
}

}  // namespace

int main() {
    check_type<__half>("f16", {0, 3, 7, 12});
    check_type<__nv_bfloat16>("bf16", {0, 3, 12, 40});
    return blocks::failed_checks() > 0;
}
