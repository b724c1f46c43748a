// Tests tile/shared_tile.cuh: the fragments at the addresses of a tile, for every row, step and lane, and stored fragments.
#include "check.cuh"
#include "cuda/tile/shared_tile.cuh"

using namespace libflash::cuda;

namespace {

constexpr int kRows = 48, kSlabs = kRows / 16;

__host__ __device__ uint16_t value_of(int row, int col) { return static_cast<uint16_t>(row * 256 + col + 1); }

enum Kind { kA, kALower, kB, kATrans, kBTrans, kKinds };
constexpr const char* kNames[kKinds] = {"a_address", "a_address of a later row", "b_address", "a_trans_address",
                                        "b_trans_address"};

template <int kCols>
__device__ void fill(char* tile) {
    for (int i = threadIdx.x; i < kRows * kCols; i += 32)
        *reinterpret_cast<uint16_t*>(tile + SharedTile<kRows, kCols>::offset(i / kCols, i % kCols / 8) + i % 8 * 2) =
            value_of(i / kCols, i % kCols);
    __syncthreads();
}

// out[kind][slab][step][register][lane].
template <int kCols>
__global__ void load_fragments(uint32_t* out) {
    using Tile = SharedTile<kRows, kCols>;
    __shared__ __align__(128) char memory[Tile::kBytes];
    const uint32_t tile = shared_address(memory);
    const int lane = threadIdx.x;
    fill<kCols>(memory);
    for (int kind = 0; kind < kKinds; ++kind)
        for (int slab = 0; slab < kSlabs; ++slab)
            for (int step = 0; step < kCols / 16; ++step) {
                uint32_t f[4];
                if (kind == kA) ldmatrix_x4(f, Tile::a_address(tile, 0, lane).at(slab * 16, step));
                if (kind == kALower) ldmatrix_x4(f, Tile::a_address(tile, slab * 16, lane).at(0, step));
                if (kind == kB) ldmatrix_x4(f, Tile::b_address(tile, lane).at(slab * 16, step));
                if (kind == kATrans) ldmatrix_x4_trans(f, Tile::a_trans_address(tile, lane).at(slab * 16, step));
                if (kind == kBTrans) ldmatrix_x4_trans(f, Tile::b_trans_address(tile, lane).at(slab * 16, step));
                for (int i = 0; i < 4; ++i) out[(((kind * kSlabs + slab) * (kCols / 16) + step) * 4 + i) * 32 + lane] = f[i];
            }
}

// Row and column, within 16 x 16 values, of half `e` of register i of a lane, by the fragment layouts of ptx/mma_sync.cuh.
void place_in_fragment(int kind, int i, int lane, int e, int* row, int* col) {
    const int outer = lane / 4, k = lane % 4 * 2 + e;
    const bool left_operand = kind == kA || kind == kALower || kind == kATrans;
    const int of_operand = outer + (left_operand ? i % 2 : i / 2) * 8;  // row of A or column of B
    const int along = k + (left_operand ? i / 2 : i % 2) * 8;
    const bool stored_by_k = kind == kATrans || kind == kBTrans;
    *row = stored_by_k ? along : of_operand;
    *col = stored_by_k ? of_operand : along;
}

template <int kCols>
void check_loads() {
    constexpr int kSteps = kCols / 16;
    const blocks::Device<uint32_t> there(kKinds * kSlabs * kSteps * 128, 0);
    load_fragments<kCols><<<1, 32>>>(there.get());
    blocks::finish("fragments");
    const std::vector<uint32_t> got = there.read();
    for (int kind = 0; kind < kKinds; ++kind) {
        blocks::Check check(std::string(kNames[kind]) + ", " + std::to_string(kCols) + " columns");
        for (int n = 0; n < kSlabs * kSteps * 256; ++n) {
            const int e = n % 2, lane = n / 2 % 32, i = n / 64 % 4, step = n / 256 % kSteps, slab = n / 256 / kSteps;
            int row, col;
            place_in_fragment(kind, i, lane, e, &row, &col);
            const uint32_t pair = got[(((kind * kSlabs + slab) * kSteps + step) * 4 + i) * 32 + lane];
            check.equal(pair >> 16 * e & 0xffff, value_of(slab * 16 + row, step * 16 + col),
                        "row %d step %d register %d lane %d half %d", slab * 16, step, i, lane, e);
        }
    }
}

// Compares addresses of step `step` after skip_columns<kCount>(first) with those of step first + step without it.
template <int kCols, int kCount>
__global__ void skip(int first, uint32_t* skipped, uint32_t* plain) {
    using Tile = SharedTile<kRows, kCols>;
    __shared__ __align__(128) char memory[Tile::kBytes];
    const int lane = threadIdx.x;
    memory[lane] = 0;
    const uint32_t tile = shared_address(memory);
    const typename Tile::LaneAddress addresses[] = {Tile::a_address(tile, 16, lane), Tile::b_address(tile, lane),
                                                    Tile::b_trans_address(tile, lane), Tile::a_trans_address(tile, lane)};
    for (int kind = 0; kind < 4; ++kind)
        for (int step = 0; step < kCount; ++step) {
            const int i = (kind * kCount + step) * 32 + lane;
            skipped[i] = Tile::template skip_columns<kCount>(addresses[kind], first).at(16, step) - tile;
            plain[i] = addresses[kind].at(16, first + step) - tile;
        }
}

template <int kCols, int kCount>
void check_skip(blocks::Check& check) {
    for (int first = 0; first + kCount <= kCols / 16; first += kCount) {
        const blocks::Device<uint32_t> skipped(4 * kCount * 32, 0), plain(4 * kCount * 32, 1);
        skip<kCols, kCount><<<1, 32>>>(first, skipped.get(), plain.get());
        blocks::finish("skip_columns");
        const std::vector<uint32_t> got = skipped.read(), expected = plain.read();
        for (int i = 0; i < 4 * kCount * 32; ++i)
            check.equal(got[i], expected[i], "first %d of %d steps: address %d step %d lane %d", first, kCount, i / 32 / kCount,
                        i / 32 % kCount, i % 32);
    }
}

// Stores the fragments of the whole tile and copies the tile out as it is in memory.
template <int kCols>
__global__ void store_fragments(uint16_t* out) {
    using Tile = SharedTile<kRows, kCols>;
    __shared__ __align__(128) char memory[Tile::kBytes];
    const int lane = threadIdx.x;
    for (int i = lane; i < Tile::kBytes; i += 32) memory[i] = 0;
    __syncthreads();
    for (int slab = 0; slab < kSlabs; ++slab)
        for (int step = 0; step < kCols / 16; ++step) {
            uint32_t f[4];
            for (int i = 0; i < 4; ++i) {
                const int row = slab * 16 + i % 2 * 8 + lane / 4, col = step * 16 + i / 2 * 8 + lane % 4 * 2;
                f[i] = value_of(row, col) | static_cast<uint32_t>(value_of(row, col + 1)) << 16;
            }
            Tile::store_fragment(shared_address(memory), slab * 16, step * 2, lane, f);
        }
    __syncthreads();
    for (int i = lane; i < kRows * kCols; i += 32)
        out[i] = *reinterpret_cast<const uint16_t*>(memory + Tile::offset(i / kCols, i % kCols / 8) + i % 8 * 2);
}

template <int kCols>
void check_stores() {
    const blocks::Device<uint16_t> there(kRows * kCols, 0);
    store_fragments<kCols><<<1, 32>>>(there.get());
    blocks::finish("store_fragment");
    const std::vector<uint16_t> got = there.read();
    blocks::Check check("store_fragment, " + std::to_string(kCols) + " columns");
    for (int i = 0; i < kRows * kCols; ++i)
        check.equal(got[i], value_of(i / kCols, i % kCols), "row %d col %d", i / kCols, i % kCols);
}

template <int kCols>
void check_columns() {
    check_loads<kCols>();
    check_stores<kCols>();
    blocks::Check check("skip_columns, " + std::to_string(kCols) + " columns");
    check_skip<kCols, 1>(check);
    check_skip<kCols, 2>(check);
    check_skip<kCols, 4>(check);
    check_skip<kCols, 8>(check);
}

}  // namespace

int main() {
    check_columns<32>();
    check_columns<64>();
    check_columns<96>();
    check_columns<128>();
    check_columns<192>();
    check_columns<256>();
    return blocks::failed_checks() > 0;
}
