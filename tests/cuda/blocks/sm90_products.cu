// Tests ptx/wgmma.cuh with the descriptors of tile/swizzled_tile.cuh: both forms, every width, all steps of a tile. Operands
// are small integers, so every sum is exact.
#include "check.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/swizzled_tile.cuh"

using namespace libflash::cuda;

namespace {

constexpr int kThreads = 128, kM = 64;
constexpr float kBefore = 5.0f;  // initial value of the accumulators

template <class Tile, class T, int kRows, int kCols>
__device__ void fill(char* tile, const T* matrix) {
    for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) {
        const int row = i / kCols, col = i % kCols;
        *reinterpret_cast<T*>(tile + Tile::offset(row, col / 8) + col % 8 * 2) = matrix[i];
    }
}

// The position of register i, by the head comment of wgmma.cuh.
__device__ int place_of(int i, int columns) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return (warp * 16 + lane / 4 + i / 2 % 2 * 8) * columns + i / 4 * 8 + lane % 4 * 2 + i % 2;
}

// out = a b^T, with a (kM x kK) and b (kN x kK) in shared memory, after kSkip rows of other data.
template <class T, int kN, int kK>
__global__ void rows_by_rows(const T* a, const T* b, bool accumulate, float* out) {
    using A = SwizzledTile<kM + 8, kK>;
    using B = SwizzledTile<kN, kK>;
    extern __shared__ char shared[];
    char* tiles = A::align(shared);
    fill<A, T, kM + 8, kK>(tiles, a);
    fill<B, T, kN, kK>(tiles + A::kBytes, b);
    fence_shared_for_async();
    __syncthreads();
    float d[kN / 2];
    for (int i = 0; i < kN / 2; ++i) d[i] = kBefore;
    const uint32_t first = shared_address(tiles);
    wgmma_fence_operand(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kK / 16; ++step)
        Wgmma<T, kN>::template multiply_shared<false>(d, A::k_major_operand(first, step, 8),
                                                      B::k_major_operand(first + A::kBytes, step), accumulate || step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(d);
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) out[place_of(i, kN)] = d[i];
}

// out = a b, with a (kM x kK) from registers and b (kK x kN) in shared memory.
template <class T, int kN, int kK>
__global__ void rows_by_columns(const T* a, const T* b, bool accumulate, float* out) {
    using B = SwizzledTile<kK, kN>;
    extern __shared__ char shared[];
    char* tile = B::align(shared);
    fill<B, T, kK, kN>(tile, b);
    fence_shared_for_async();
    __syncthreads();
    float d[kN / 2];
    for (int i = 0; i < kN / 2; ++i) d[i] = kBefore;
    uint32_t f[kK / 16][4];
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
    for (int step = 0; step < kK / 16; ++step)
        for (int i = 0; i < 4; ++i)
            f[step][i] = *reinterpret_cast<const uint32_t*>(a + (row + i % 2 * 8) * kK + step * 16 + i / 2 * 8 + col);
    wgmma_fence_operand(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kK / 16; ++step)
        Wgmma<T, kN>::template multiply<true>(d, f[step], B::mn_major_operand(shared_address(tile), step),
                                              accumulate || step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(d);
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) out[place_of(i, kN)] = d[i];
}

template <class T>
std::vector<T> numbers(blocks::Random& random, size_t count) {
    std::vector<T> values(count);
    for (T& x : values) x = T(static_cast<float>(random.between(-4, 4)));
    return values;
}

template <class Kernel, class T, class Expected>
void check_product(const std::string& name, Kernel kernel, int shared, const std::vector<T>& a, const std::vector<T>& b,
                   int columns, const Expected& expected) {
    const blocks::Device<T> a_there(a), b_there(b);
    blocks::cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "attribute");
    blocks::Check check(name);
    for (const bool accumulate : {false, true}) {
        const blocks::Device<float> out(kM * columns, -1.0f);
        kernel<<<1, kThreads, shared>>>(a_there.get(), b_there.get(), accumulate, out.get());
        blocks::finish(name.c_str());
        const std::vector<float> got = out.read();
        for (int row = 0; row < kM; ++row)
            for (int col = 0; col < columns; ++col)
                check.equal(got[row * columns + col], expected(row, col) + (accumulate ? kBefore : 0), "row %d col %d", row, col);
    }
}

template <class T, int kN, int kK>
void check_rows_by_rows(const char* type) {
    blocks::Random random(kN * 1000 + kK);
    const std::vector<T> a = numbers<T>(random, (kM + 8) * kK), b = numbers<T>(random, kN * kK);
    const auto expected = [&](int row, int col) {
        double sum = 0;
        for (int k = 0; k < kK; ++k) sum += static_cast<double>(float(a[(row + 8) * kK + k])) * float(b[col * kK + k]);
        return sum;
    };
    const std::string name = std::string("along columns, ") + type + ", 64 x " + std::to_string(kN) + " x " + std::to_string(kK);
    check_product(name, rows_by_rows<T, kN, kK>, (kM + 8 + kN) * kK * 2 + 1024, a, b, kN, expected);
}

template <class T, int kN, int kK>
void check_rows_by_columns(const char* type) {
    blocks::Random random(kN * 1000 + kK + 1);
    const std::vector<T> a = numbers<T>(random, kM * kK), b = numbers<T>(random, kK * kN);
    const auto expected = [&](int row, int col) {
        double sum = 0;
        for (int k = 0; k < kK; ++k) sum += static_cast<double>(float(a[row * kK + k])) * float(b[k * kN + col]);
        return sum;
    };
    const std::string name = std::string("down rows, ") + type + ", 64 x " + std::to_string(kN) + " x " + std::to_string(kK);
    check_product(name, rows_by_columns<T, kN, kK>, kK * kN * 2 + 1024, a, b, kN, expected);
}

template <class T>
void check_type(const char* type) {
    check_rows_by_rows<T, 64, 64>(type);
    check_rows_by_rows<T, 80, 256>(type);
    check_rows_by_rows<T, 96, 128>(type);
    check_rows_by_rows<T, 112, 192>(type);
    check_rows_by_rows<T, 128, 64>(type);
    check_rows_by_rows<T, 128, 128>(type);
    check_rows_by_rows<T, 176, 128>(type);
    check_rows_by_rows<T, 192, 64>(type);
    check_rows_by_rows<T, 256, 64>(type);
    check_rows_by_columns<T, 64, 128>(type);
    check_rows_by_columns<T, 64, 192>(type);
    check_rows_by_columns<T, 128, 128>(type);
    check_rows_by_columns<T, 128, 176>(type);
    check_rows_by_columns<T, 192, 112>(type);
    check_rows_by_columns<T, 256, 80>(type);
}

}  // namespace

int main() {
    check_type<__half>("f16");
    check_type<__nv_bfloat16>("bf16");
    return blocks::failed_checks() > 0;
}
