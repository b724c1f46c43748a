// Tests ptx/tma.cuh, tile/tensor_map.cuh and tile/swizzled_tile.cuh: the layout of a loaded tile for tensors of any strides,
// elements outside the tensor, and stores.
#include "check.cuh"
#include "cuda/tile/swizzled_tile.cuh"
#include "cuda/tile/tensor_map.cuh"

using namespace libflash::cuda;

namespace {

constexpr int kThreads = 128;
constexpr uint16_t kJunk = 0xabcd;

// Loads a tile, copies the shared memory out as it is, and stores the tile again, one chunk after the other, to `target`.
template <int kRows, int kCols>
__global__ void copy(const __grid_constant__ CUtensorMap source, const __grid_constant__ CUtensorMap target, int row, int head,
                     int batch, uint16_t* in_tile) {
    using Tile = SwizzledTile<kRows, kCols>;
    extern __shared__ char shared[];
    __shared__ uint64_t word;
    char* tile = Tile::align(shared);
    const MBarrier barrier{shared_address(&word)};
    for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) reinterpret_cast<uint16_t*>(tile)[i] = kJunk;
    fence_shared_for_async();
    if (threadIdx.x == 0) {
        tma_prefetch_map(source);
        barrier.init(1);
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_prefetch(source, 0, row, head, batch);
        barrier.arrive_and_expect(Tile::kBytes);
        Tile::load(shared_address(tile), source, barrier, row, head, batch);
    }
    barrier.wait(0);
    for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) in_tile[i] = reinterpret_cast<const uint16_t*>(tile)[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk)
            tma_store(shared_address(tile) + chunk * Tile::kChunkBytes, target, chunk * 64, row, head, batch);
        tma_store_commit();
        tma_store_wait_read<0>();
        tma_store_wait<0>();
    }
}

// As the head comment of the header describes, in values.
int place(int kRows, int row, int col) { return col / 64 * kRows * 64 + row * 64 + ((col / 8 % 8) ^ (row % 8)) * 8 + col % 8; }

// Sizes and strides of a tensor; the heads are inside rows, as usual, or outside.
struct Layout {
    int columns, rows, heads, batch;
    int64_t row, head, per_batch;
    int64_t count() const { return per_batch * batch; }
    TensorExtent extent(void* data) const { return {data, columns, rows, heads, batch, row, head, per_batch}; }
    int64_t at(int b, int h, int r, int c) const { return b * per_batch + h * head + r * row + c; }
};

uint16_t value_of(int64_t place) { return static_cast<uint16_t>(place * 40503u >> 3 | 1); }

template <int kRows, int kCols>
void check_tile(blocks::Check& loaded, blocks::Check& stored, const Layout& layout, int row, int head, int batch) {
    std::vector<uint16_t> memory(layout.count());
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = value_of(i);
    const blocks::Device<uint16_t> source(memory), target(memory.size(), kJunk), in_tile(kRows * kCols, 0);
    CUtensorMap from, to;
    blocks::cuda_check(encode_map<__half>(&from, layout.extent(source.get()), kRows), "encode_map");
    blocks::cuda_check(encode_map<__half>(&to, layout.extent(target.get()), kRows), "encode_map");
    constexpr int kShared = SwizzledTile<kRows, kCols>::kBytes + 1024;
    blocks::cuda_check(cudaFuncSetAttribute(copy<kRows, kCols>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
                       "attribute");
    copy<kRows, kCols><<<1, kThreads, kShared>>>(from, to, row, head, batch, in_tile.get());
    blocks::finish("copy of a tile");

    const std::vector<uint16_t> got = in_tile.read(), out = target.read();
    std::vector<uint16_t> expected(memory.size(), kJunk);
    for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kCols; ++c) {
            const bool inside = row + r < layout.rows && c < layout.columns;
            const uint16_t value = inside ? memory[layout.at(batch, head, row + r, c)] : 0;
            // Stores write whole 16-byte units, with zeros after the last column.
            if (row + r < layout.rows && c < (layout.columns + 7) / 8 * 8) expected[layout.at(batch, head, row + r, c)] = value;
            loaded.equal(got[place(kRows, r, c)], value, "%d x %d from row %d head %d batch %d: row %d col %d", kRows, kCols, row,
                         head, batch, r, c);
        }
    for (size_t i = 0; i < out.size(); ++i)
        stored.equal(out[i], expected[i], "%d x %d from row %d head %d batch %d: element %d", kRows, kCols, row, head, batch,
                     static_cast<int>(i));
}

template <int kRows, int kCols>
void check_size() {
    const std::string name = ", " + std::to_string(kRows) + " x " + std::to_string(kCols);
    blocks::Check loaded("tma_load" + name), stored("tma_store" + name);
    const int wide = kCols + 8;
    const Layout inside{kCols, 300, 3, 2, 3 * wide, wide, 300 * 3 * wide};
    const Layout outside{kCols, 300, 3, 2, wide, 300 * wide, 3 * 300 * wide};
    const Layout narrow{kCols - 11, 300, 3, 2, 3 * wide, wide, 300 * 3 * wide};  // fewer columns than the tile
    const Layout single{kCols, 40, 1, 1, wide, 0, 40 * wide};                    // a stride of 0
    for (const Layout& layout : {inside, outside, narrow}) {
        check_tile<kRows, kCols>(loaded, stored, layout, 0, 0, 0);
        check_tile<kRows, kCols>(loaded, stored, layout, 37, 2, 1);
        check_tile<kRows, kCols>(loaded, stored, layout, 256, 1, 1);  // beyond the end
    }
    check_tile<kRows, kCols>(loaded, stored, single, 0, 0, 0);
}

// offset() and store_fragment() against the same description.
template <int kRows, int kCols>
__global__ void place_values(uint16_t* in_tile, int* offsets) {
    using Tile = SwizzledTile<kRows, kCols>;
    extern __shared__ char shared[];
    char* tile = Tile::align(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int slab = warp; slab < kRows / 16; slab += kThreads / 32)
        for (int group = 0; group < kCols / 8; group += 2) {
            uint32_t f[4];
            for (int i = 0; i < 4; ++i) {
                const int row = slab * 16 + i % 2 * 8 + lane / 4, col = group * 8 + i / 2 * 8 + lane % 4 * 2;
                f[i] = (row * kCols + col) | (row * kCols + col + 1) << 16;
            }
            Tile::store_fragment(shared_address(tile), slab * 16, group, lane, f);
        }
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) in_tile[i] = reinterpret_cast<const uint16_t*>(tile)[i];
    for (int i = threadIdx.x; i < kRows * kCols / 8; i += kThreads) offsets[i] = Tile::offset(i / (kCols / 8), i % (kCols / 8));
}

template <int kRows, int kCols>
void check_places() {
    const blocks::Device<uint16_t> in_tile(kRows * kCols, kJunk);
    const blocks::Device<int> offsets(kRows * kCols / 8, -1);
    constexpr int kShared = SwizzledTile<kRows, kCols>::kBytes + 1024;
    blocks::cuda_check(cudaFuncSetAttribute(place_values<kRows, kCols>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
                       "attribute");
    place_values<kRows, kCols><<<1, kThreads, kShared>>>(in_tile.get(), offsets.get());
    blocks::finish("store_fragment");
    const std::vector<uint16_t> got = in_tile.read();
    const std::vector<int> where = offsets.read();
    const std::string name = ", " + std::to_string(kRows) + " x " + std::to_string(kCols);
    blocks::Check stored("store_fragment" + name), offset("offset" + name);
    for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kCols; ++c) {
            stored.equal(got[place(kRows, r, c)], static_cast<uint16_t>(r * kCols + c), "row %d col %d", r, c);
            if (c % 8 == 0) offset.equal(where[r * (kCols / 8) + c / 8], 2 * place(kRows, r, c), "row %d col %d", r, c);
        }
}

}  // namespace

int main() {
    check_size<64, 64>();
    check_size<64, 128>();
    check_size<128, 128>();
    check_size<80, 256>();
    check_places<64, 64>();
    check_places<64, 256>();
    return blocks::failed_checks() > 0;
}
