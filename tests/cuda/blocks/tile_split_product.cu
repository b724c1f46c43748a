// Tests tile/split_product.cuh: float products of a warp against sums in double, with a limit far below the error of a single
// tf32 product. Operands come from shared memory by ldmatrix and by pairs of rows, from accumulators, and from accumulators
// stored to shared memory.
#include "check.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "cuda/tile/split_product.cuh"

#include <cmath>

using namespace libflash::cuda;

namespace {

constexpr int kM = 32, kN = 32, kK = 64, kSlabs = kM / 16, kBlocks = kN / 8;
constexpr double kLimit = 0x1p-20;  // of the sum of the products' magnitudes

template <class Tile>
__device__ void put(char* tile, int row, int col, float x) {
    *reinterpret_cast<float*>(tile + Tile::offset(row, col / 4) + col % 4 * 4) = x;
}
// The index of element e of block n of slab a of this lane in a row-major matrix.
__device__ int place(int a, int n, int e, int cols, int lane) {
    return (a * 16 + lane / 4 + e / 2 * 8) * cols + n * 8 + lane % 4 * 2 + e % 2;
}
__device__ void write(float* c, const float (&sums)[kSlabs][kBlocks][4], int lane) {
    for (int a = 0; a < kSlabs; ++a)
        for (int n = 0; n < kBlocks; ++n)
            for (int e = 0; e < 4; ++e) c[place(a, n, e, kN, lane)] = sums[a][n][e];
}

// c = a b over the first `terms` terms; both operands are in shared memory with contiguous terms.
template <bool kAhead>
__global__ void by_rows(const float* a, const float* b, float* c, int terms) {
    using ATile = SharedTile<kM, kK, 4>;
    using BTile = SharedTile<kN, kK, 4>;
    __shared__ __align__(128) char a_memory[ATile::kBytes], b_memory[BTile::kBytes];
    const int lane = threadIdx.x;
    for (int i = lane; i < kM * kK; i += 32) put<ATile>(a_memory, i / kK, i % kK, a[i]);
    for (int i = lane; i < kK * kN; i += 32) put<BTile>(b_memory, i % kN, i / kN, b[i]);
    __syncthreads();
    const auto a_address = ATile::a_address(shared_address(a_memory), 0, lane);
    const auto b_address = BTile::b_address(shared_address(b_memory), lane);
    float sums[kSlabs][kBlocks][4];
    split_product<kAhead, kK / 8>(
        sums, terms,
        [&](int step, uint32_t (&f)[kSlabs][4]) {
            for (int s = 0; s < kSlabs; ++s) ldmatrix_x4(f[s], a_address.at(s * 16, step));
        },
        [&](int step, int pair, uint32_t (&f)[4]) { ldmatrix_x4(f, b_address.at(pair * 16, step)); });
    write(c, sums, lane);
}

// c = 1 + a b over the first 16 terms, with a from accumulators; columns from `cols` on stay 1.
template <bool kAhead>
__global__ void from_accumulators(const float* a, const float* b, float* c, int cols) {
    using BTile = SharedTile<kK, kN, 4>;
    __shared__ __align__(128) char b_memory[BTile::kBytes];
    const int lane = threadIdx.x;
    for (int i = lane; i < kK * kN; i += 32) put<BTile>(b_memory, i / kN, i % kN, b[i]);
    __syncthreads();
    SplitRows<kSlabs> rows[2];
    for (int n = 0; n < 2; ++n)
        for (int s = 0; s < kSlabs; ++s) {
            float block[4];
            for (int e = 0; e < 4; ++e) block[e] = a[place(s, n, e, kK, lane)];
            rows[n].split_columns(s, block);
        }
    const auto pair = BTile::row_pair(shared_address(b_memory), lane);
    float sums[kSlabs][kBlocks][4];
    for (auto& slab : sums)
        for (auto& block : slab)
            for (float& x : block) x = 1.0f;
    add_split_product<kAhead>(sums, rows, cols,
                              [&](int step, int block, uint32_t (&f)[2]) { pair.load(step * 8, block, f[0], f[1]); });
    write(c, sums, lane);
}

// c = (the first 32 columns of a)^T (the first 32 rows of b), with accumulators stored as rows of terms.
__global__ void turned(const float* a, const float* b, float* c) {
    using ATile = SharedTile<kM, 32, 4>;
    using BTile = SharedTile<kK, kN, 4>;
    __shared__ __align__(128) char a_memory[ATile::kBytes], b_memory[BTile::kBytes];
    const int lane = threadIdx.x;
    for (int i = lane; i < kK * kN; i += 32) put<BTile>(b_memory, i / kN, i % kN, b[i]);
    for (int s = 0; s < kSlabs; ++s)
        for (int n = 0; n < 4; ++n) {
            float block[4];
            for (int e = 0; e < 4; ++e) block[e] = a[place(s, n, e, kK, lane)];
            ATile::store_columns(shared_address(a_memory), s * 16, n, lane, block);
        }
    __syncthreads();
    const auto a_pair = ATile::row_pair_of_columns(shared_address(a_memory), lane);
    const auto b_pair = BTile::row_pair(shared_address(b_memory), lane);
    float sums[2][kBlocks][4];
    split_product<false, kM / 8>(
        sums, kM,
        [&](int step, uint32_t (&f)[2][4]) {
            for (int s = 0; s < 2; ++s) {
                a_pair.load(step * 8, 2 * s, f[s][0], f[s][2]);
                a_pair.load(step * 8, 2 * s + 1, f[s][1], f[s][3]);
            }
        },
        [&](int step, int pair, uint32_t (&f)[4]) {
            b_pair.load(step * 8, 2 * pair, f[0], f[1]);
            b_pair.load(step * 8, 2 * pair + 1, f[2], f[3]);
        });
    write(c, sums, lane);
}

struct Matrices {
    std::vector<float> a = std::vector<float>(kM * kK), b = std::vector<float>(kK * kN);

    Matrices() {
        blocks::Random random(11);
        for (auto* matrix : {&a, &b})
            for (float& x : *matrix) x = static_cast<float>(random.between(-(1 << 24), 1 << 24)) * 0x1p-22f;
    }
};

// at(i, k): an element of the A operand.
template <class Left, class Launch>
void check(const std::string& name, int terms, int cols, float before, const Left& at, const Launch& launch) {
    const Matrices m;
    const blocks::Device<float> there_a(m.a), there_b(m.b), there_c(kM * kN, NAN);
    launch(there_a.get(), there_b.get(), there_c.get());
    blocks::finish(name.c_str());
    const std::vector<float> got = there_c.read();
    blocks::Check check(name);
    for (int i = 0; i < kM; ++i)
        for (int j = 0; j < kN; ++j) {
            double sum = before, size = before;
            for (int k = 0; k < terms && j < cols; ++k) {
                sum += double{at(m, i, k)} * m.b[k * kN + j];
                size += std::fabs(double{at(m, i, k)} * m.b[k * kN + j]);
            }
            check.at_most(std::fabs(got[i * kN + j] - sum), kLimit * size, "row %d col %d", i, j);
        }
}

}  // namespace

int main() {
    const auto plain = [](const Matrices& m, int i, int k) { return m.a[i * kK + k]; };
    const auto turn = [](const Matrices& m, int i, int k) { return m.a[k * kK + i]; };
    for (const int terms : {kK, 32}) {
        const std::string name = ", " + std::to_string(terms) + " terms";
        check("split_product" + name, terms, kN, 0, plain,
              [=](float* a, float* b, float* c) { by_rows<false><<<1, 32>>>(a, b, c, terms); });
        check("split_product, ahead" + name, terms, kN, 0, plain,
              [=](float* a, float* b, float* c) { by_rows<true><<<1, 32>>>(a, b, c, terms); });
    }
    for (const int cols : {kN, 16}) {
        const std::string name = ", " + std::to_string(cols) + " columns";
        check("add_split_product" + name, 16, cols, 1, plain,
              [=](float* a, float* b, float* c) { from_accumulators<false><<<1, 32>>>(a, b, c, cols); });
        check("add_split_product, ahead" + name, 16, cols, 1, plain,
              [=](float* a, float* b, float* c) { from_accumulators<true><<<1, 32>>>(a, b, c, cols); });
    }
    check("split_product, turned", kM, kN, 0, turn, [](float* a, float* b, float* c) { turned<<<1, 32>>>(a, b, c); });
    return blocks::failed_checks() > 0;
}
