// Loads tiles of V from a cache by cp.async, for boxes of 16 rows: TMA takes some 130 cycles for 16 rows of 64 channels, too many
// for K and V. A whole warp copies a tile, then another one, and only then waits for the first: a tile is left pending.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/sm90/forward_cached_keys.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardCopiedValues {
    using Tile = typename Traits::VTile;
    using T = typename Traits::T;
    using CachedKeys = ForwardCachedKeys<Traits>;
    using Stages = PipelineState<Traits::kVStages>;
    static constexpr int kVectors = Tile::kChunks * 8;                     // of 16 bytes in a row
    static constexpr int kUnitCopies = CachedKeys::kUnit * kVectors / 32;  // of a lane
    static constexpr int kNone = -1;
    static constexpr bool kHasRegisters = Traits::kHeadDimV < 256;  // otherwise the producer spills

    const ForwardContext<Traits>& context;

    // `count`: rows of the tile that are keys; the others, and those of pages that are not read, become zeros. `pending`: the
    // stage of the tile before, or kNone.
    __device__ __forceinline__ void copy(Stages& v, int& pending, bool leader, int kv_head, int count,
                                         const typename CachedKeys::PageRow& at) const {
        if (__any_sync(0xffffffffu, !v.is_empty())) publish(pending, leader);  // the lanes need not see the same
        v.wait_empty();
        const CacheParams& cache = context.params.cache;
        const uint32_t to = context.tiles.v(v.stage);
#pragma unroll 1
        for (int unit = 0; unit < CachedKeys::kUnits; ++unit) {
            const int page = __shfl_sync(0xffffffffu, at.page, unit), row = __shfl_sync(0xffffffffu, at.row, unit);
            const bool exists = static_cast<uint32_t>(page) < static_cast<uint32_t>(cache.pages);
            const int rows = exists ? count - unit * CachedKeys::kUnit : 0;
            const T* const from = static_cast<const T*>(cache.v.data) + (exists ? page : 0) * cache.v.batch + row * cache.v.row +
                                  kv_head * cache.v.head;
            copy_unit(to, unit * CachedKeys::kUnit, from, rows);
        }
        cp_async_commit();
        if (pending != kNone) wait_and_arrive<1>(pending, leader);
        pending = v.stage;
        v.advance();
    }
    // Waits for the pending tile and hands it over to the consumers.
    __device__ __forceinline__ void publish(int& pending, bool leader) const {
        if (pending != kNone) wait_and_arrive<0>(pending, leader);
        pending = kNone;
    }

private:
    // The first `rows` rows of a unit of 16 are copied.
    __device__ __forceinline__ void copy_unit(uint32_t to, int first, const T* from, int rows) const {
        const int64_t row_stride = context.params.cache.v.row;
#pragma unroll 4
        for (int n = 0; n < kUnitCopies; ++n) {
            const int i = n * 32 + static_cast<int>(threadIdx.x % 32), row = i / kVectors, vector = i % kVectors;
            cp_async_16(to + Tile::offset(first + row, vector), from + row * row_stride + vector * 8,
                        row < rows && vector * 8 < context.params.head_dim_v);
        }
    }
    template <int kPending>
    __device__ __forceinline__ void wait_and_arrive(int stage, bool leader) const {
        cp_async_wait<kPending>();
        fence_shared_for_async();
        __syncwarp();
        if (leader) MBarrier{shared_address(&context.storage.v.full[stage])}.arrive();
    }
};

}  // namespace libflash::cuda::sm90
