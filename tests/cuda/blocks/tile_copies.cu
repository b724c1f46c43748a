// Tests tile/shared_tile.cuh: the layout of a tile, and the copies into it and out of it, with row and column limits.
#include <array>

#include "check.cuh"
#include "cuda/tile/shared_tile.cuh"

using namespace libflash::cuda;

namespace {

constexpr int kRows = 64, kThreads = 128;
constexpr int kMatrixRows = 150;
constexpr uint16_t kJunk = 0xabcd;

// The parameters of the two copies. Both count rows of the matrix.
struct Limits {
    bool slow;                            // load_slow, else load_async
    int first_row, load_rows, load_cols;  // the limits of the load
    int store_rows, store_cols;           // the limits of the store
    bool vectors;
};

template <int kCols>
__global__ void offsets(int* out) {
    for (int i = threadIdx.x; i < kRows * kCols / 8; i += blockDim.x)
        out[i] = SharedTile<kRows, kCols>::offset(i / (kCols / 8), i % (kCols / 8));
}

template <int kCols>
__global__ void copy(const uint16_t* matrix, int64_t stride, Limits limits, uint16_t* tile_out, uint16_t* target,
                     int64_t target_stride) {
    using Tile = SharedTile<kRows, kCols>;
    __shared__ __align__(128) char tile[Tile::kBytes];
    const int thread = threadIdx.x;
    for (int i = thread; i < kRows * kCols; i += kThreads) reinterpret_cast<uint16_t*>(tile)[i] = kJunk;
    __syncthreads();
    if (limits.slow) {
        Tile::template load_slow<kThreads>(tile, matrix, stride, limits.first_row, limits.load_rows, limits.load_cols, thread);
    } else {
        Tile::template load_async<kThreads>(shared_address(tile), matrix, stride, limits.first_row, limits.load_rows,
                                            limits.load_cols, thread);
        cp_async_commit();
        cp_async_wait<0>();
    }
    __syncthreads();
    for (int i = thread; i < kRows * kCols; i += kThreads) tile_out[i] = reinterpret_cast<const uint16_t*>(tile)[i];
    Tile::template store<kThreads>(tile, target, target_stride, limits.first_row, limits.store_rows, limits.store_cols,
                                   limits.vectors, thread);
}

// Byte offset of a chunk, as the head comment of the header describes.
template <int kCols>
int described_offset(int row, int chunk) {
    const int group = kCols % 64 == 0 ? 8 : 4, twist = group == 8 ? row % 8 : row / 2 % 4;
    return row * kCols * 2 + (chunk / group * group + (chunk % group ^ twist)) * 16;
}

template <int kCols>
void check_offsets() {
    constexpr int kChunks = kCols / 8;
    const blocks::Device<int> there(kRows * kChunks, -1);
    offsets<kCols><<<1, 128>>>(there.get());
    blocks::finish("offset");
    const std::vector<int> got = there.read();
    const std::string name = "offset, " + std::to_string(kCols) + " columns";
    blocks::Check described(name), each_once(name + ", each place once"), banks(name + ", bank conflicts");
    std::vector<int> used(kRows * kChunks, 0);
    for (int i = 0; i < kRows * kChunks; ++i) {
        described.equal(got[i], described_offset<kCols>(i / kChunks, i % kChunks), "row %d chunk %d", i / kChunks, i % kChunks);
        if (got[i] >= 0 && got[i] < kRows * kCols * 2 && got[i] % 16 == 0) ++used[got[i] / 16];
    }
    for (int i = 0; i < kRows * kChunks; ++i) each_once.equal(used[i], 1, "16 bytes number %d", i);
    for (int first = 0; first < kRows; first += 8)
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            std::array<int, 8> reads{};  // for each group of four banks
            for (int row = first; row < first + 8; ++row) ++reads[got[row * kChunks + chunk] / 16 % 8];
            for (int b = 0; b < 8; ++b) banks.equal(reads[b], 1, "rows from %d chunk %d banks %d", first, chunk, 4 * b);
        }
}

uint16_t value_of(int row, int col) { return static_cast<uint16_t>(row * 256 + col + 1); }

// The matrix is stored with `stride`, from element `shift` of its memory on, and so is the target.
template <int kCols>
void check_copy(blocks::Check& loaded, blocks::Check& stored, const Limits& limits, int stride, int shift) {
    std::vector<uint16_t> memory(shift + (kMatrixRows + kRows) * stride, kJunk);
    for (int row = 0; row < kMatrixRows; ++row)
        for (int col = 0; col < kCols && col < stride; ++col) memory[shift + row * stride + col] = value_of(row, col);
    const blocks::Device<uint16_t> there(memory), tile(kRows * kCols, 0), target(memory.size(), kJunk);
    copy<kCols><<<1, kThreads>>>(there.get() + shift, stride, limits, tile.get(), target.get() + shift, stride);
    blocks::finish("copies of a tile");

    const std::vector<uint16_t> in_tile = tile.read(), got = target.read();
    const auto expected_in_tile = [&](int row, int col) {  // of the tile
        const bool inside = limits.first_row + row < limits.load_rows && col < limits.load_cols;
        return inside ? value_of(limits.first_row + row, col) : 0;
    };
    for (int row = 0; row < kRows; ++row)
        for (int col = 0; col < kCols; ++col)
            loaded.equal(in_tile[described_offset<kCols>(row, col / 8) / 2 + col % 8], expected_in_tile(row, col),
                         "%s first row %d limits %d, %d: row %d col %d", limits.slow ? "slow" : "async", limits.first_row,
                         limits.load_rows, limits.load_cols, row, col);
    for (size_t i = 0; i < got.size(); ++i) {
        const int at = static_cast<int>(i) - shift, row = at < 0 ? -1 : at / stride - limits.first_row, col = at % stride;
        const bool inside = row >= 0 && row < kRows && limits.first_row + row < limits.store_rows && col < limits.store_cols;
        stored.equal(got[i], inside ? expected_in_tile(row, col) : kJunk, "%s first row %d limits %d, %d: row %d col %d",
                     limits.vectors ? "vectors" : "single", limits.first_row, limits.store_rows, limits.store_cols, row, col);
    }
}

template <int kCols>
void check_copies() {
    check_offsets<kCols>();
    const std::string name = ", " + std::to_string(kCols) + " columns";
    blocks::Check loaded("load" + name), stored("store" + name);
    for (const int first_row : {0, 64, 128})  // the last tile ends after the matrix
        for (const int rows : {kMatrixRows, 70, 0}) {
            for (const int cols : {kCols, kCols - 8, 8})
                check_copy<kCols>(loaded, stored, {false, first_row, rows, cols, kMatrixRows - 3, kCols, true}, kCols + 8, 0);
            for (const int cols : {kCols, kCols - 3, 5})
                check_copy<kCols>(loaded, stored, {true, first_row, rows, cols, kMatrixRows - 3, kCols - 5, false}, kCols + 3, 1);
        }
    for (const int cols : {kCols, kCols - 8, 8})
        check_copy<kCols>(loaded, stored, {false, 64, kMatrixRows, kCols, 101, cols, true}, kCols, 0);
    for (const int cols : {kCols, kCols - 1, 9, 1})
        check_copy<kCols>(loaded, stored, {true, 64, kMatrixRows, kCols, 101, cols, false}, kCols + 1, 3);
}

}  // namespace

int main() {
    check_copies<32>();
    check_copies<64>();
    check_copies<96>();
    check_copies<128>();
    check_copies<192>();
    check_copies<256>();
    return blocks::failed_checks() > 0;
}
