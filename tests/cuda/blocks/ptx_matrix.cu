// Tests ptx/mma_sync.cuh against host loops: products of small integers, with a different value in every fragment element, and
// the matrices that ldmatrix and stmatrix move.
#include "check.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma_sync.cuh"

using namespace libflash::cuda;

namespace {

constexpr int kM = 16, kN = 8, kK = 16;

template <class T>
__device__ uint32_t pair_of(float low, float high) {
    const T x[2] = {from_float(low, T()), from_float(high, T())};
    uint32_t bits;
    memcpy(&bits, x, 4);
    return bits;
}

// c (kM x kN) += a (kM x kK) b (kK x kN), all row-major, fragments as the header describes them.
template <class T>
__global__ void multiply(const float* a, const float* b, float* c) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    uint32_t af[4], bf[2];
    float cf[4];
    for (int i = 0; i < 4; ++i) {
        const int row = g + i % 2 * 8, k = 2 * t + i / 2 * 8;
        af[i] = pair_of<T>(a[row * kK + k], a[row * kK + k + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        const int k = 2 * t + i * 8;
        bf[i] = pair_of<T>(b[k * kN + g], b[(k + 1) * kN + g]);
    }
    for (int i = 0; i < 4; ++i) cf[i] = c[(g + i / 2 * 8) * kN + 2 * t + i % 2];
    mma_m16n8k16(cf, af, bf[0], bf[1], T());
    for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * kN + 2 * t + i % 2] = cf[i];
}

template <class T>
void check_mma(const char* name) {
    blocks::Check check(name);
    blocks::Random random(7);
    for (int round = 0; round < 20; ++round) {
        std::vector<float> a(kM * kK), b(kK * kN), c(kM * kN);
        for (auto* matrix : {&a, &b, &c})
            for (float& x : *matrix) x = static_cast<float>(random.between(-9, 9));
        const blocks::Device<float> there_a(a), there_b(b), there_c(c);
        multiply<T><<<1, 32>>>(there_a.get(), there_b.get(), there_c.get());
        blocks::finish(name);
        const std::vector<float> got = there_c.read();
        for (int i = 0; i < kM; ++i)
            for (int j = 0; j < kN; ++j) {
                float sum = c[i * kN + j];
                for (int k = 0; k < kK; ++k) sum += a[i * kK + k] * b[k * kN + j];
                check.equal(got[i * kN + j], sum, "round %d row %d col %d", round, i, j);
            }
    }
}

// The rows of the four matrices are stored out of order: row r of matrix m at place(m, r), 16 bytes each.
__host__ __device__ int place(int m, int r) { return (m * 8 + r) * 13 % 32; }
// Row r, column c of matrix m; all values differ.
__host__ __device__ uint16_t value_of(int m, int r, int c) { return static_cast<uint16_t>(1000 * m + 100 * r + c + 1); }

__global__ void load_matrices(uint32_t* plain, uint32_t* transposed) {
    __shared__ __align__(128) uint16_t rows[32][8];
    const int lane = threadIdx.x, m = lane / 8, r = lane % 8;
    for (int c = 0; c < 8; ++c) rows[place(m, r)][c] = value_of(m, r, c);
    __syncthreads();
    uint32_t f[4];
    ldmatrix_x4(f, shared_address(rows[place(m, r)]));
    for (int i = 0; i < 4; ++i) plain[i * 32 + lane] = f[i];
    ldmatrix_x4_trans(f, shared_address(rows[place(m, r)]));
    for (int i = 0; i < 4; ++i) transposed[i * 32 + lane] = f[i];
}

__global__ void store_matrices(uint16_t* all) {
    __shared__ __align__(128) uint16_t rows[32][8];
    const int lane = threadIdx.x;
    for (int c = 0; c < 8; ++c) rows[lane][c] = 0;
    __syncthreads();
    uint32_t f[4];
    for (int m = 0; m < 4; ++m) {
        const int r = lane / 4, c = lane % 4 * 2;
        f[m] = value_of(m, r, c) | static_cast<uint32_t>(value_of(m, r, c + 1)) << 16;
    }
    stmatrix_x4(shared_address(rows[place(lane / 8, lane % 8)]), f);
    __syncthreads();
    for (int c = 0; c < 8; ++c) all[lane * 8 + c] = rows[lane][c];
}

void check_ldmatrix() {
    const blocks::Device<uint32_t> plain(128, 0), transposed(128, 0);
    load_matrices<<<1, 32>>>(plain.get(), transposed.get());
    blocks::finish("ldmatrix");
    const std::vector<uint32_t> got = plain.read(), got_trans = transposed.read();
    blocks::Check check("ldmatrix_x4"), check_trans("ldmatrix_x4_trans");
    for (int m = 0; m < 4; ++m)
        for (int lane = 0; lane < 32; ++lane)
            for (int e = 0; e < 2; ++e) {
                const int outer = lane / 4, inner = lane % 4 * 2 + e, i = m * 32 + lane;
                check.equal(got[i] >> 16 * e & 0xffff, value_of(m, outer, inner), "matrix %d lane %d half %d", m, lane, e);
                check_trans.equal(got_trans[i] >> 16 * e & 0xffff, value_of(m, inner, outer), "matrix %d lane %d half %d", m,
                                  lane, e);
            }
}

void check_stmatrix() {
    if (!blocks::has_stmatrix()) {
        std::printf("absent stmatrix_x4: this GPU has no such instruction\n");
        return;
    }
    const blocks::Device<uint16_t> rows(256, 0);
    store_matrices<<<1, 32>>>(rows.get());
    blocks::finish("stmatrix");
    const std::vector<uint16_t> got = rows.read();
    blocks::Check check("stmatrix_x4");
    for (int m = 0; m < 4; ++m)
        for (int r = 0; r < 8; ++r)
            for (int c = 0; c < 8; ++c)
                check.equal(got[place(m, r) * 8 + c], value_of(m, r, c), "matrix %d row %d col %d", m, r, c);
}

}  // namespace

int main() {
    check_mma<__half>("mma_m16n8k16 f16");
    check_mma<__nv_bfloat16>("mma_m16n8k16 bf16");
    check_ldmatrix();
    check_stmatrix();
    return blocks::failed_checks() > 0;
}
