// Tests tile/product.cuh: products of matrices of small integers by a warp, from shared memory with and without transposing,
// against host loops; and accumulators as A operand.
#include "check.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/shared_tile.cuh"

using namespace libflash::cuda;

namespace {

template <class T, int kKAhead, int kMSlabs, int kNBlocks, int kKSteps, bool kTurned>
struct Case {
    using Type = T;
    static constexpr int kAhead = kKAhead, kSlabs = kMSlabs, kBlocks = kNBlocks, kSteps = kKSteps;
    static constexpr int kM = kSlabs * 16, kN = kBlocks * 8, kK = kSteps * 16;
    static constexpr bool kByK = kTurned;  // operands are stored as rows of k, else as columns of k
    static constexpr int up(int n) { return (n + 31) / 32 * 32; }
    using ATile = SharedTile<kByK ? kK : kM, up(kByK ? kM : kK)>;
    using BTile = SharedTile<kByK ? kK : up(kN), up(kByK ? kN : kK)>;
};

template <class Tile, class T>
__device__ void put(char* tile, int row, int col, float x) {
    *reinterpret_cast<T*>(tile + Tile::offset(row, col / 8) + col % 8 * 2) = from_float(x, T());
}

// a: kM x kK, b: kK x kN, c: kM x kN, row-major. rounded: c as fragments of 16 columns, [slab][pair][register][lane].
template <class C>
__global__ void multiply(const float* a, const float* b, float* c, uint32_t* rounded, int* steps) {
    using T = typename C::Type;
    using ATile = typename C::ATile;
    using BTile = typename C::BTile;
    __shared__ __align__(128) char a_memory[ATile::kBytes], b_memory[BTile::kBytes];
    const int lane = threadIdx.x;
    for (int i = lane; i < C::kM * C::kK; i += 32) {
        const int row = i / C::kK, k = i % C::kK;
        put<ATile, T>(a_memory, C::kByK ? k : row, C::kByK ? row : k, a[i]);
    }
    for (int i = lane; i < C::kK * C::kN; i += 32) {
        const int k = i / C::kN, col = i % C::kN;
        put<BTile, T>(b_memory, C::kByK ? k : col, C::kByK ? col : k, b[i]);
    }
    __syncthreads();
    const uint32_t a_smem = shared_address(a_memory), b_smem = shared_address(b_memory);
    const auto a_address = C::kByK ? ATile::a_trans_address(a_smem, lane) : ATile::a_address(a_smem, 0, lane);
    const auto b_address = C::kByK ? BTile::b_trans_address(b_smem, lane) : BTile::b_address(b_smem, lane);
    auto product = make_product<T, C::kSteps, C::kAhead, C::kSlabs, C::kBlocks>(
        [=](int step, uint32_t (&f)[C::kSlabs][4]) {
            for (int slab = 0; slab < C::kSlabs; ++slab) {
                if constexpr (C::kByK) {
                    ldmatrix_x4_trans(f[slab], a_address.at(step * 16, slab));
                } else {
                    ldmatrix_x4(f[slab], a_address.at(slab * 16, step));
                }
            }
        },
        [=](int step, int pair, uint32_t (&f)[4]) {
            if constexpr (C::kByK) {
                ldmatrix_x4_trans(f, b_address.at(step * 16, pair));
            } else {
                ldmatrix_x4(f, b_address.at(pair * 16, step));
            }
        });
    float sums[C::kSlabs][C::kBlocks][4];
    for (auto& slab : sums)
        for (auto& block : slab)
            for (float& x : block) x = NAN;
    clear(sums);
    int called = 0;
    product.start();
    product.add_to(sums, [&](int step) { called = called * 10 + step + 1; });
    if (lane == 0) *steps = called;
    for (int slab = 0; slab < C::kSlabs; ++slab)
        for (int block = 0; block < C::kBlocks; ++block)
            for (int e = 0; e < 4; ++e)
                c[(slab * 16 + lane / 4 + e / 2 * 8) * C::kN + block * 8 + lane % 4 * 2 + e % 2] = sums[slab][block][e];
    for (int slab = 0; slab < C::kSlabs; ++slab)
        for (int pair = 0; pair < C::kBlocks / 2; ++pair) {
            uint32_t f[4];
            to_fragment<T>(f, sums[slab][2 * pair], sums[slab][2 * pair + 1]);
            for (int i = 0; i < 4; ++i) rounded[((slab * (C::kBlocks / 2) + pair) * 4 + i) * 32 + lane] = f[i];
        }
}

// Bits of a small integer.
uint32_t bits_of(float x, __half) { return __half_as_ushort(__float2half(x)); }
uint32_t bits_of(float x, __nv_bfloat16) { return __bfloat16_as_ushort(__float2bfloat16(x)); }

template <class C>
void check_fragments(const std::string& name, const std::vector<float>& c, const std::vector<uint32_t>& rounded) {
    blocks::Check check("to_fragment" + name);
    for (int i = 0; i < C::kM * C::kN; ++i) {
        const int row = i / C::kN,
                  col = i % C::kN;  // odd registers: 8 rows further down; the last two: 8 columns further on
        const int at = ((row / 16 * (C::kBlocks / 2) + col / 16) * 4 + row / 8 % 2 + col / 8 % 2 * 2) * 32;
        const uint32_t pair = rounded[at + row % 8 * 4 + col % 8 / 2];
        check.equal(pair >> col % 2 * 16 & 0xffff, bits_of(c[i], typename C::Type()), "row %d col %d", row, col);
    }
}

template <class C>
void check_product(const char* kind) {
    char name[100];
    std::snprintf(name, sizeof name, ", %s, %dx%dx%d, %d ahead%s", kind, C::kM, C::kN, C::kK, C::kAhead, C::kByK ? ", by k" : "");
    blocks::Random random(C::kM * C::kN + C::kK);
    std::vector<float> a(C::kM * C::kK), b(C::kK * C::kN), expected(C::kM * C::kN, 0.0f);
    for (auto* matrix : {&a, &b})
        for (float& x : *matrix) x = static_cast<float>(random.between(-1, 1) * random.between(0, 3));
    for (int i = 0; i < C::kM; ++i)
        for (int k = 0; k < C::kK; ++k)
            for (int j = 0; j < C::kN; ++j) expected[i * C::kN + j] += a[i * C::kK + k] * b[k * C::kN + j];
    const blocks::Device<float> there_a(a), there_b(b), there_c(expected.size(), 0.0f);
    const blocks::Device<uint32_t> rounded(expected.size() / 2, 0);
    const blocks::Device<int> steps(1, 0);
    multiply<C><<<1, 32>>>(there_a.get(), there_b.get(), there_c.get(), rounded.get(), steps.get());
    blocks::finish(name);
    const std::vector<float> got = there_c.read();
    blocks::Check check(std::string("Product") + name);
    for (int i = 0; i < C::kM * C::kN; ++i) check.equal(got[i], expected[i], "row %d col %d", i / C::kN, i % C::kN);
    int order = 0;
    for (int step = 0; step < C::kSteps; ++step) order = order * 10 + step + 1;
    check.equal(steps.read()[0], order, "the steps that between() was called with");
    check_fragments<C>(name, got, rounded.read());
}

template <class T>
void check_type(const char* name) {
    check_product<Case<T, 1, 1, 2, 1, false>>(name);  // one pair in all
    check_product<Case<T, 3, 1, 2, 1, true>>(name);   // prefetch distance above the number of pairs
    check_product<Case<T, 1, 2, 8, 4, false>>(name);
    check_product<Case<T, 2, 3, 6, 2, false>>(name);
    check_product<Case<T, 1, 2, 4, 6, true>>(name);
    check_product<Case<T, 4, 2, 6, 3, true>>(name);
}

}  // namespace

int main() {
    check_type<__half>("f16");
    check_type<__nv_bfloat16>("bf16");
    return blocks::failed_checks() > 0;
}
