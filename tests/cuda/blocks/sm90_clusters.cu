// Tests ptx/cluster.cuh and the multicast of ptx/tma.cuh: ranks and the barrier of a cluster, arrivals at other thread blocks'
// mbarriers, boxes that go to several thread blocks. Waits are bounded: missing bytes show as wrong values.
#define LIBFLASH_BOUNDED_WAITS
#include "check.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/tile/swizzled_tile.cuh"
#include "cuda/tile/tensor_map.cuh"

using namespace libflash::cuda;

namespace {

constexpr uint16_t kJunk = 0xabcd;

__device__ void cluster_barrier() {
    cluster_barrier_arrive();
    cluster_barrier_wait();
}

// A delay of up to 30 us, different for each thread block and round.
__device__ void fall_behind(int block, int round) { __nanosleep((block * 5 + round * 3) % 7 * 5000); }

// In each round a thread block writes a number after a delay, and reads those of its cluster after the barrier.
template <int kSize>
__global__ void __cluster_dims__(kSize) exchange(int rounds, int* ranks, int* numbers, int* seen) {
    const int block = blockIdx.x, first = block / kSize * kSize;
    if (threadIdx.x == 0) {
        ranks[2 * block] = static_cast<int>(cluster_rank());
        ranks[2 * block + 1] = static_cast<int>(cluster_size());
    }
    for (int round = 0; round < rounds; ++round) {
        const int place = round * gridDim.x;
        if (threadIdx.x == 0) {
            fall_behind(block, round);
            numbers[place + block] = 100 * round + block;
        }
        cluster_barrier();
        if (threadIdx.x < kSize) seen[(place + block) * kSize + threadIdx.x] = numbers[place + first + threadIdx.x];
    }
}

template <int kSize>
void check_barrier() {
    const int blocks = 6 * kSize, rounds = 20;
    const blocks::Device<int> ranks(2 * blocks, -1), numbers(rounds * blocks, -1), seen(rounds * blocks * kSize, -2);
    exchange<kSize><<<blocks, 64>>>(rounds, ranks.get(), numbers.get(), seen.get());
    blocks::finish("cluster barrier");
    const std::vector<int> rank = ranks.read(), got = seen.read();
    const std::string name = ", clusters of " + std::to_string(kSize);
    blocks::Check check_rank("cluster_rank, cluster_size" + name), check("cluster barrier" + name);
    for (int block = 0; block < blocks; ++block) {
        check_rank.equal(rank[2 * block], block % kSize, "rank of block %d", block);
        check_rank.equal(rank[2 * block + 1], kSize, "size at block %d", block);
        for (int round = 0; round < rounds; ++round)
            for (int peer = 0; peer < kSize; ++peer)
                check.equal(got[(round * blocks + block) * kSize + peer], 100 * round + block / kSize * kSize + peer,
                            "round %d block %d peer %d", round, block, peer);
    }
}

// How often rank `from` arrives at the mbarrier of rank `to`.
template <int kSize>
__host__ __device__ int arrivals(int from, int to) {
    return 1 + from * kSize + to;
}

// An mbarrier for exactly the arrivals at its rank: they end its phase, and as many of the rank's own end the next one.
template <int kSize>
__global__ void __cluster_dims__(kSize) arrive(int* ended) {
    __shared__ uint64_t words[3];  // the neighbours must not change
    const MBarrier barrier{shared_address(words + 1)};
    const int rank = static_cast<int>(cluster_rank());
    int needed = 0;
    for (int from = 0; from < kSize; ++from) needed += arrivals<kSize>(from, rank);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 3; ++i) MBarrier{shared_address(words + i)}.init(needed);
        fence_barrier_init();
    }
    cluster_barrier();
    if (threadIdx.x < kSize)
        for (int i = 0; i < arrivals<kSize>(rank, threadIdx.x); ++i) arrive_in_cluster(barrier, threadIdx.x);
    __syncwarp();
    cluster_barrier();
    if (threadIdx.x == 0) {
        int* out = ended + blockIdx.x * 5;
        barrier.wait(0);
        *out++ = barrier.try_wait(0);
        for (int i = 0; i < needed - 1; ++i) barrier.arrive();
        *out++ = barrier.try_wait(1);
        barrier.arrive();
        *out++ = barrier.try_wait(1);
        *out++ = MBarrier{shared_address(words)}.try_wait(0);
        *out++ = MBarrier{shared_address(words + 2)}.try_wait(0);
    }
    cluster_barrier();
}

template <int kSize>
void check_arrivals() {
    const int blocks = 8 * kSize;
    const blocks::Device<int> ended(blocks * 5, -1);
    arrive<kSize><<<blocks, 32>>>(ended.get());
    blocks::finish("arrive_in_cluster");
    const std::vector<int> got = ended.read();
    blocks::Check check("arrive_in_cluster, clusters of " + std::to_string(kSize));
    const int expected[5] = {1, 0, 1, 0, 0};
    for (int i = 0; i < blocks * 5; ++i) check.equal(got[i], expected[i % 5], "block %d question %d", i / 5, i % 5);
}

// A matrix of 16-bit values for each cluster, as the heads of a tensor.
struct Matrices {
    int rows, columns, count;
    int64_t at(int matrix, int row, int column) const { return (int64_t{row} * count + matrix) * columns + column; }
    int64_t size() const { return int64_t{rows} * count * columns; }
    TensorExtent extent(void* data) const { return {data, columns, rows, count, 1, int64_t{count} * columns, columns, size()}; }
};

std::vector<uint16_t> values_of(const Matrices& matrices) {
    std::vector<uint16_t> memory(matrices.size());
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<uint16_t>(i * 40503u >> 3 | 1);
    return memory;
}

// Rank t loads a box into slot t of the ranks in masks[t].
constexpr int kBoxRows = 8, kBoxValues = kBoxRows * 64;

template <int kSize>
__global__ void __cluster_dims__(kSize) send(const __grid_constant__ CUtensorMap map, const uint16_t* masks, uint16_t* out) {
    extern __shared__ char shared[];
    __shared__ uint64_t word;
    uint16_t* const slots = reinterpret_cast<uint16_t*>(SwizzledTile<kBoxRows, 64>::align(shared));
    const MBarrier barrier{shared_address(&word)};
    const int rank = static_cast<int>(cluster_rank()), cluster = blockIdx.x / kSize;
    const uint16_t* const mine = masks + cluster * kSize;
    for (int i = threadIdx.x; i < kSize * kBoxValues; i += blockDim.x) slots[i] = kJunk;
    fence_shared_for_async();
    if (threadIdx.x == 0) {
        barrier.init(1);
        fence_barrier_init();
    }
    cluster_barrier();
    if (threadIdx.x == 0) {
        int senders = 0;
        for (int from = 0; from < kSize; ++from) senders += mine[from] >> rank & 1;
        fall_behind(blockIdx.x, 0);
        if (rank % 2 == 0) barrier.arrive_and_expect(senders * kBoxValues * 2);
        tma_load_multicast(shared_address(slots + rank * kBoxValues), map, barrier, mine[rank], 0, rank * kBoxRows, cluster, 0);
        fall_behind(blockIdx.x, 1);
        if (rank % 2 == 1) barrier.arrive_and_expect(senders * kBoxValues * 2);  // some or all bytes have arrived by then
    }
    barrier.wait(0);
    cluster_barrier();
    for (int i = threadIdx.x; i < kSize * kBoxValues; i += blockDim.x) out[blockIdx.x * kSize * kBoxValues + i] = slots[i];
}

template <int kSize>
void check_masks() {
    const int clusters = 40;
    const Matrices matrices{kSize * kBoxRows, 64, clusters};
    const std::vector<uint16_t> memory = values_of(matrices);
    blocks::Random random(kSize);
    std::vector<uint16_t> masks(clusters * kSize);
    for (uint16_t& mask : masks) mask = static_cast<uint16_t>(random.between(1, (1 << kSize) - 1));
    const blocks::Device<uint16_t> source(memory), there(masks), out(clusters * kSize * kSize * kBoxValues, 0);
    CUtensorMap map;
    blocks::cuda_check(encode_map<__half>(&map, matrices.extent(source.get()), kBoxRows), "encode_map");
    send<kSize><<<clusters * kSize, 64, kSize * kBoxValues * 2 + 1024>>>(map, there.get(), out.get());
    blocks::finish("tma_load_multicast to some");
    const std::vector<uint16_t> got = out.read();
    blocks::Check check("tma_load_multicast to some, clusters of " + std::to_string(kSize));
    for (int block = 0; block < clusters * kSize; ++block)
        for (int slot = 0; slot < kSize; ++slot)
            for (int i = 0; i < kBoxValues; ++i) {
                const int cluster = block / kSize, row = i / 64, column = ((i / 8 % 8) ^ (row % 8)) * 8 + i % 8;
                const bool gets = masks[cluster * kSize + slot] >> (block % kSize) & 1;
                check.equal(got[(block * kSize + slot) * kBoxValues + i],
                            gets ? memory[matrices.at(cluster, slot * kBoxRows + row, column)] : kJunk,
                            "block %d slot %d row %d column %d", block, slot, row, column);
            }
}

// A pipeline of tiles: each rank loads its part of the rows for all ranks, and a stage is loaded again once all warps of all
// ranks have read it.
constexpr int kRows = 64, kCols = 128, kStages = 3, kWarps = 4;
using Tile = SwizzledTile<kRows, kCols>;

template <int kSize>
__device__ void load_shares(const CUtensorMap& map, uint32_t tiles, uint64_t* full, uint64_t* empty, int count) {
    constexpr int kShare = kRows / kSize;
    const int rank = static_cast<int>(cluster_rank()), cluster = blockIdx.x / kSize;
    for (int tile = 0; tile < count; ++tile) {
        const int stage = tile % kStages;
        const MBarrier barrier{shared_address(full + stage)};
        MBarrier{shared_address(empty + stage)}.wait(tile / kStages % 2 ^ 1);
        barrier.arrive_and_expect(Tile::kBytes);
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk)
            tma_load_multicast(tiles + stage * Tile::kBytes + chunk * Tile::kChunkBytes + rank * kShare * 128, map, barrier,
                               (1 << kSize) - 1, chunk * 64, tile * kRows + rank * kShare, cluster, 0);
    }
}

template <int kSize>
__device__ void read_tiles(const uint16_t* tiles, uint64_t* full, uint64_t* empty, int count, uint16_t* out) {
    constexpr int kValues = kRows * kCols / kWarps;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int tile = 0; tile < count; ++tile) {
        const int stage = tile % kStages;
        MBarrier{shared_address(full + stage)}.wait(tile / kStages % 2);
        fall_behind(blockIdx.x + warp, tile);
        for (int i = warp * kValues + lane; i < (warp + 1) * kValues; i += 32)
            out[tile * kRows * kCols + i] = tiles[stage * kRows * kCols + i];
        __syncwarp();
        if (lane < kSize) arrive_in_cluster(MBarrier{shared_address(empty + stage)}, lane);
        __syncwarp();
    }
}

template <int kSize>
__global__ void __cluster_dims__(kSize) ring(const __grid_constant__ CUtensorMap map, int count, uint16_t* out) {
    extern __shared__ char shared[];
    __shared__ uint64_t full[kStages], empty[kStages];
    char* const tiles = Tile::align(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            MBarrier{shared_address(full + i)}.init(1);
            MBarrier{shared_address(empty + i)}.init(kSize * kWarps);
        }
        fence_barrier_init();
    }
    cluster_barrier();
    if (threadIdx.x < kWarps * 32)
        read_tiles<kSize>(reinterpret_cast<const uint16_t*>(tiles), full, empty, count, out + blockIdx.x * count * kRows * kCols);
    else if (elect_one())
        load_shares<kSize>(map, shared_address(tiles), full, empty, count);
    __syncwarp();
    cluster_barrier();
}

template <int kSize>
void check_ring() {
    const int clusters = 5, count = 11;
    const Matrices matrices{count * kRows - 13, kCols, clusters};  // the last tile is partial
    const std::vector<uint16_t> memory = values_of(matrices);
    const blocks::Device<uint16_t> source(memory), out(clusters * kSize * count * kRows * kCols, kJunk);
    CUtensorMap map;
    blocks::cuda_check(encode_map<__half>(&map, matrices.extent(source.get()), kRows / kSize), "encode_map");
    constexpr int kShared = kStages * Tile::kBytes + 1024;
    blocks::cuda_check(cudaFuncSetAttribute(ring<kSize>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "attribute");
    ring<kSize><<<clusters * kSize, (kWarps + 1) * 32, kShared>>>(map, count, out.get());
    blocks::finish("tma_load_multicast");
    const std::vector<uint16_t> got = out.read();
    blocks::Check check("tma_load_multicast to all, clusters of " + std::to_string(kSize));
    for (int block = 0; block < clusters * kSize; ++block)
        for (int tile = 0; tile < count; ++tile)
            for (int i = 0; i < kRows * kCols; ++i) {
                // As the head comment of swizzled_tile.cuh describes.
                const int row = i / 64 % kRows, column = i / (kRows * 64) * 64 + ((i / 8 % 8) ^ (row % 8)) * 8 + i % 8;
                const bool exists = tile * kRows + row < matrices.rows;
                check.equal(got[(block * count + tile) * kRows * kCols + i],
                            exists ? memory[matrices.at(block / kSize, tile * kRows + row, column)] : 0,
                            "block %d tile %d row %d column %d", block, tile, row, column);
            }
}

template <int kSize>
void check_size() {
    check_barrier<kSize>();
    check_arrivals<kSize>();
    check_masks<kSize>();
    check_ring<kSize>();
}

}  // namespace

int main() {
    check_size<2>();
    check_size<4>();
    return blocks::failed_checks() > 0;
}
