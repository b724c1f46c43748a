// The work of a thread block of the sm_90a backward kernel: one key tile of one key head, and the query tiles that see it in all
// query heads that share the key head. The shared memory layout, and the state that the warpgroups share.
#pragma once

#include "cuda/attention/dq_accumulator.cuh"
#include "cuda/attention/element.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/query_tiles.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/config.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/tile/swizzled_tile.cuh"
#include "cuda/tile/tensor_map.cuh"

namespace libflash::cuda::sm90 {

struct BackwardMaps {
    CUtensorMap q, dout, k, v, dk, dv;
};

template <class Kernel>
struct BackwardWork {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr int kHeadDim = config.head_dim, kBlockM = config.tile_q, kBlockN = config.tile_k, kStages = config.stages;
    static constexpr int kGroupKeys = 64, kGroups = kBlockN / kGroupKeys;
    static constexpr int kThreads = (kGroups + 1) * 128;
    static constexpr int kQueryRegisters = 72, kKeyRegisters = 216;
    static_assert(kGroups == 2, "the registers are for two warpgroups with keys");

    using KvTile = SwizzledTile<kBlockN, kHeadDim>;
    using QTile = SwizzledTile<kBlockM, kHeadDim>;
    using ScoreTile = SwizzledTile<kBlockN, kBlockM>;  // dS^T: one row per key

    using Tiles = QueryTiles<kBlockM, kBlockN>;

    // Four warps compute dS K in pieces of 64 x 64, one after another. The layout of the accumulator treats each piece as if it
    // had four warps of its own.
    static constexpr int kPieces = kBlockM / 64 * (kHeadDim / 64);
    using Accumulator = DqAccumulator<T, kHeadDim, kBlockM, kPieces * 4, kBlockM / 16>;

    // The query tiles [begin, end) of each head. Those outside [whole, whole + count) are edge tiles.
    struct alignas(16) QueryTileRange {
        int begin, end, whole, count;

        __device__ __forceinline__ bool is_edge(int tile) const {
            return static_cast<unsigned>(tile - whole) >= static_cast<unsigned>(count);
        }
    };
    // A position in the sequence of query tiles of all query heads that share the key head.
    struct Position {
        int head, tile;
        int left;  // number of tiles left, this one included
    };

    // The next tile to load. The producer thread keeps it in shared memory, because it has few registers.
    struct Copies {
        Position at;
        int stage, phase;  // of the pipeline
    };

    static constexpr int kScoreStages = 2;
    struct Common {
        uint64_t keys;                             // full barrier of K and V
        PipelineBarriers<kStages> queries;         // Q, dO and softmax statistics
        PipelineBarriers<kScoreStages> gradients;  // dS
        Copies copies;
        TileCoordinates work;  // head: a key head
        SequenceRows q_rows;
        Tiles tiles;
        QueryTileRange walk;
    };
    static constexpr int kStatisticsBytes = kBlockM * static_cast<int>(sizeof(SoftmaxStatistics));
    static constexpr int kStageBytes = 2 * QTile::kBytes;
    // Shared memory: K, V; stages of Q and dO; stages of dS; softmax statistics of all stages; Common.
    static constexpr int kStagesAt = 2 * KvTile::kBytes;
    static constexpr int kScoresAt = kStagesAt + kStages * kStageBytes;
    static constexpr int kStatisticsAt = kScoresAt + kScoreStages * ScoreTile::kBytes;
    static constexpr int kTileBytes = kStatisticsAt + kStages * kStatisticsBytes;
    static constexpr int kSharedBytes = kTileBytes + static_cast<int>(sizeof(Common)) + QTile::kAlignment;
    static_assert(kSharedBytes <= 227 * 1024, "a thread block has 227 KB");

    const BackwardParams& params;
    const BackwardMaps& maps;
    char* shared;
    Common& common;

    __device__ __forceinline__ BackwardWork(const BackwardParams& p, const BackwardMaps& m, char* aligned)
        : params(p), maps(m), shared(aligned), common(*reinterpret_cast<Common*>(aligned + kTileBytes)) {}

    __device__ __forceinline__ uint32_t k_smem() const { return shared_address(shared); }
    __device__ __forceinline__ uint32_t v_smem() const { return k_smem() + KvTile::kBytes; }
    __device__ __forceinline__ uint32_t q_smem(int stage) const { return k_smem() + kStagesAt + stage * kStageBytes; }
    __device__ __forceinline__ uint32_t dout_smem(int stage) const { return q_smem(stage) + QTile::kBytes; }
    __device__ __forceinline__ uint32_t ds_smem(int stage) const { return k_smem() + kScoresAt + stage * ScoreTile::kBytes; }
    __device__ __forceinline__ const SoftmaxStatistics* statistics(int stage) const {
        return reinterpret_cast<const SoftmaxStatistics*>(shared + kStatisticsAt + stage * kStatisticsBytes);
    }
    __device__ __forceinline__ MBarrier keys_have_come() const { return {shared_address(&common.keys)}; }

    // All threads call it before the warpgroups take their roles.
    __device__ __forceinline__ void prepare() {
        if (threadIdx.x == 0) {
            keys_have_come().init(1);
            common.queries.init(kGroups * 4);
            common.gradients.init(4, kGroups * 4);
            fence_barrier_init();
            common.work = tile_coordinates<kBlockN>(params.key_schedule, params.k_lengths, params.batch);
            common.q_rows = SequenceRows::of(params.q_lengths, common.work.batch);
            common.tiles.init(params, common.work, common.q_rows.length,
                              SequenceRows::of(params.k_lengths, common.work.batch).length);
            common.walk = walk_of(common.tiles);
        }
        __syncthreads();
    }
    // Must agree with Tiles::is_edge.
    __device__ static __forceinline__ QueryTileRange walk_of(const Tiles& tiles) {
        const int last_col = tiles.first_col + kBlockN - 1;
        const int first_row =
            // Rows from first_row on see the last key of the tile; rows up to last_row see the first one.
            last_col - tiles.shift - tiles.right;
        const int last_row = min(tiles.length_q - 1, tiles.first_col - tiles.shift + tiles.left);
        const int whole = max(tiles.begin, (max(first_row, 0) + kBlockM - 1) / kBlockM);
        const int end = last_col < tiles.length_k && last_row >= 0 ? min(tiles.end, (last_row + 1) / kBlockM) : 0;
        return {tiles.begin, tiles.end, whole, max(0, end - whole)};
    }

    __device__ __forceinline__ Position first_position() const {
        const QueryTileRange& walk = common.walk;
        return {common.work.head * params.group_size, walk.begin, (walk.end - walk.begin) * params.group_size};
    }
    __device__ __forceinline__ void advance(Position& at) const {
        const QueryTileRange walk = common.walk;
        --at.left;
        const bool ends = at.tile + 1 == walk.end;
        at.tile = ends ? walk.begin : at.tile + 1;
        at.head += ends;
    }
    __device__ __forceinline__ int64_t first_unit(const Position& at) const {
        return QueryUnits::first(params, common.work.batch, at.head, common.q_rows.start);
    }
};

}  // namespace libflash::cuda::sm90
