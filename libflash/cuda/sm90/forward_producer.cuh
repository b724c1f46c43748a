// The producer warpgroup of the sm_90a forward kernel: the producer warp loads Q, K and V by TMA, the scheduler warp finds work
// tiles, and the zero-fill warp zeroes rows of V that lie beyond a sequence. (For the remaining warp see forward_epilogue.cuh.)
#pragma once

#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm90/forward_epilogue.cuh"

namespace libflash::cuda::sm90 {

template <class Kernel, ForwardInstance kInstance>
struct ForwardProducer : ForwardEpilogue<Kernel, kInstance> {
    using Base = ForwardEpilogue<Kernel, kInstance>;
    using Base::Base, Base::common, Base::first_cursor, Base::kAhead, Base::following, Base::k_smem, Base::kFirstApart,
        Base::kBlockN, Base::kDynamic, Base::kGroupRows, Base::kGroups, Base::kQStages, Base::kStages, Base::kVStages,
        Base::kBlockMask, Base::maps, Base::next_work, Base::preceding, Base::fill, Base::q_tile, Base::start_recompute,
        Base::start_of, Base::v_smem, Base::walk_of;
    using typename Base::GroupTiles, typename Base::WorkTile, typename Base::KTile, typename Base::ZeroFill, typename Base::QTile,
        typename Base::ScheduleCursor, typename Base::Assignment, typename Base::VTile;

    // State of the producer warp.
    struct Producer {
        bool leader;  // the thread that issues loads and arrives
        PipelineState<kStages> k;
        PipelineState<kVStages> v;
        PipelineState<kQStages> q;  // of group 0; all groups have the same stage and phase
        PipelineState<kAhead> ahead;
        int slot;  // of the work tile
    };

    __device__ __forceinline__ Producer begin() const {
        return {elect_one(),
                PipelineState<kStages>(common.k),
                PipelineState<kVStages>(common.v),
                PipelineState<kQStages>(common.q[0]),
                PipelineState<kAhead>(common.ahead),
                0};
    }

    // Loads key tiles from the last to the first; V of a tile after K of the next. Waits first, because the previous kernel may
    // still write q, k and v.
    __device__ __forceinline__ void produce() const {
        Producer p = begin();
        ScheduleCursor rounds{};
        wait_for_previous_kernel();
        do {
            bool found = take_work_tile(p);
            if (!kFirstApart && found && p.leader) hand_over_no_values(p);
            for (; found; found = take_work_tile(p)) hand_over(p);
            hand_over_end(p);
            rounds.safe = common.work_tiles[preceding(p.slot)].safe;  // read back: there are too few registers to keep it
        } while (start_recompute(rounds));
    }

    // Finds the next work tile that sees keys. False: no rounds are left, and `work_tile` has no keys, which marks the end.
    __device__ __forceinline__ bool find_work_tile(ScheduleCursor& rounds, bool leader, WorkTile& work_tile) const {
        Assignment turn;
        while (next_work(rounds, turn)) {
            bool has_keys = false;
            if (leader) {
                fill(work_tile, turn, rounds.safe);
                has_keys = work_tile.keys.begin != work_tile.keys.end;
            }
            if (__any_sync(0xffffffffu, has_keys)) return true;  // the same for all lanes
        }
        if (leader) {
            work_tile.keys.begin = work_tile.keys.end = 0;
            for (GroupTiles& tiles : work_tile.of_group) tiles.begin = tiles.end = 0;
            work_tile.safe = rounds.safe;
        }
        return false;
    }

    // The scheduler warp, one work tile ahead of the producer warp: a search by the latter would delay its load of the second K
    // of a work tile. With lengths on the device a work tile depends on memory that the previous kernel may still write, so the
    // warp waits for that kernel. Otherwise it prefetches the first Q, K and V into L2 while that kernel ends. The next kernel
    // may begin when no work tile is left to be found; it waits for the end of this whole kernel.
    __device__ __forceinline__ void schedule_ahead() const {
        if constexpr (kDynamic) wait_for_previous_kernel();
        const bool leader = elect_one();
        PipelineState<kAhead> ahead(common.ahead);
        ScheduleCursor rounds = first_cursor();
        int slot = 0;
        bool first = !kDynamic;
        do {
            bool found = true;
#pragma unroll 1
            while (found) {
                ahead.wait_empty();
                __syncwarp();  // all lanes have seen this phase before the slot can be filled, taken and empty again
                WorkTile& work_tile = common.work_tiles[slot];
                found = find_work_tile(rounds, leader, work_tile);
                if (leader) {
                    if (found) prefetch_q(work_tile);
                    if (found && first) prefetch_keys(work_tile);
                    ahead.full().arrive();
                }
                __syncwarp();
                ahead.advance();
                slot = following(slot);
                first = false;
            }
            if (leader) allow_next_kernel();  // the second call, after recomputation, has no effect
        } while (start_recompute(rounds));
    }
    // Waits for the next work tile. False: the end mark.
    __device__ __forceinline__ bool take_work_tile(Producer& p) const {
        p.ahead.wait_full();
        __syncwarp();  // all lanes have seen this phase before it can be full again
        if (p.leader) p.ahead.empty().arrive();
        p.ahead.advance();
        const WorkTile& work_tile = common.work_tiles[p.slot];
        return work_tile.keys.begin != work_tile.keys.end;
    }

    // Announces the end mark to the consumers, and to the zero-fill warp that no further request comes.
    __device__ __forceinline__ void hand_over_end(Producer& p) const {
        if (p.leader) {
            if constexpr (kDynamic) request_zero_fill(p, -1).arrive();
            load_q(p, common.work_tiles[p.slot], false);
        }
        done_with(p);
    }
    __device__ __forceinline__ void done_with(Producer& p) const {
        __syncwarp();
        p.q.advance();
        p.slot = following(p.slot);
    }

    // Announces a work tile to the consumers, and loads its tiles.
    __device__ __forceinline__ void hand_over(Producer& p) const {
        if constexpr (kBlockMask) {
            hand_over_found(p);
        } else if (p.leader) {
            const WorkTile& work_tile = common.work_tiles[p.slot];
            load_k(p, work_tile, work_tile.keys.end - 1);
            load_q(p, work_tile, true);
            load_keys(p, work_tile);
        }
        done_with(p);
    }
    // With a block mask: the whole warp searches for the next tile. A work tile without a visible block gets the tile after its
    // keys, which is masked entirely.
    __device__ __forceinline__ void hand_over_found(Producer& p) const {
        const WorkTile& work_tile = common.work_tiles[p.slot];
        auto walk = walk_of(work_tile);
        int found = -1, next;
        bool first = true;
#pragma unroll 1
        do {
            next = walk.next();
            if (found < 0 && next < 0) found = (work_tile.keys.length_k + kBlockN - 1) / kBlockN;
            // A tile is loaded when it is known whether another one follows, because its TileWord says so.
            if (p.leader && found >= 0) {
                load_tile(p, work_tile, TileWord::of(found, next < 0), first);
                first = false;
            }
            found = next;
        } while (next >= 0);
        if (p.leader) load_v(p, work_tile, loaded_tile(p, 1));
    }
    __device__ __forceinline__ void load_tile(Producer& p, const WorkTile& work_tile, TileWord word, bool first) const {
        p.k.wait_empty();
        common.dynamic.tiles[p.k.stage] = word;
        load_k(p, work_tile, word.tile());
        if (first) {
            load_q(p, work_tile, true);
        } else {
            load_v(p, work_tile, loaded_tile(p, 2));
        }
    }

    // The tile whose K was loaded last (1), or the one before it (2).
    __device__ __forceinline__ int loaded_tile(const Producer& p, int back) const {
        return common.dynamic.tiles[(p.k.stage + kStages - back) % kStages].tile();
    }

    // Also announces the work tile: the consumers wait for Q.
    __device__ __forceinline__ void load_q(const Producer& p, const WorkTile& work_tile, bool has_keys) const {
        for (int group = 0; group < kGroups; ++group) {
            PipelineState<kQStages> q = p.q;
            q.barriers = shared_address(&common.q[group]);
            q.wait_empty();
            if (has_keys) {
                q.full().arrive_and_expect(QTile::kBytes);
                QTile::load(q_tile(q.stage, group), maps.q, q.full(),
                            start_of(work_tile) + work_tile.keys.first_row + group * kGroupRows, work_tile.work.head,
                            work_tile.work.batch);
            } else {
                q.full().arrive();
            }
        }
    }

    // Into L2: the stage of Q in shared memory may not be free before the current work tile is nearly done.
    __device__ __forceinline__ void prefetch_q(const WorkTile& work_tile) const {
        for (int group = 0; group < kGroups; ++group)
            QTile::prefetch(maps.q, start_of(work_tile) + work_tile.keys.first_row + group * kGroupRows, work_tile.work.head,
                            work_tile.work.batch);
    }
    // K and V of the tile that is loaded first, into L2.
    __device__ __forceinline__ void prefetch_keys(const WorkTile& work_tile) const {
        const int row = key_row(work_tile, work_tile.keys.end - 1);
        KTile::prefetch(maps.k, row, work_tile.kv_head, work_tile.work.batch);
        VTile::prefetch(maps.v, row, work_tile.kv_head, work_tile.work.batch);
    }

    __device__ __forceinline__ void load_k(Producer& p, const WorkTile& work_tile, int tile) const {
        p.k.wait_empty();
        p.k.full().arrive_and_expect(KTile::kBytes);
        KTile::load(k_smem + p.k.stage * KTile::kBytes, maps.k, p.k.full(), key_row(work_tile, tile), work_tile.kv_head,
                    work_tile.work.batch);
        p.k.advance();
    }
    // A stage of V without data, for the product that the consumers issue before their first tile (begin_with_none).
    __device__ __forceinline__ void hand_over_no_values(Producer& p) const {
        p.v.wait_empty();
        p.v.full().arrive();
        p.v.advance();
    }
    __device__ __forceinline__ void load_v(Producer& p, const WorkTile& work_tile, int tile) const {
        p.v.wait_empty();
        MBarrier full = p.v.full();
        if constexpr (kDynamic) {
            const int count = work_tile.keys.length_k - tile * kBlockN;
            if (count < kBlockN && maps.keys_end_early) full = request_zero_fill(p, max(count, 0));
        }
        full.arrive_and_expect(VTile::kBytes);
        VTile::load(v_smem + p.v.stage * VTile::kBytes, maps.v, full, key_row(work_tile, tile), work_tile.kv_head,
                    work_tile.work.batch);
        p.v.advance();
    }
    __device__ __forceinline__ int key_row(const WorkTile& work_tile, int tile) const {
        return (kDynamic ? work_tile.first_key : 0) + tile * kBlockN;
    }

    // Rows of V beyond the sequence are multiplied by 0, which gives NaN where they hold NaN or infinity. So the zero-fill
    // warp waits for such a tile, zeroes the rows and only then marks the stage full. K needs nothing: scores beyond the end are
    // masked. Returns the barrier on which the load must complete.
    __device__ __forceinline__ MBarrier request_zero_fill(Producer& p, int count) const {
        ZeroFill& zero_fill = common.dynamic.zero_fill;
        MBarrier{shared_address(zero_fill.barriers.empty)}.wait(zero_fill.phase ^ 1);
        zero_fill.phase ^= 1;
        zero_fill.stage = p.v.stage, zero_fill.count = count;
        return {shared_address(zero_fill.barriers.full)};
    }
    // The zero-fill warp.
    __device__ __forceinline__ void zero_fill_values() const {
        PipelineState<1> zero_fill(common.dynamic.zero_fill.barriers);
        ScheduleCursor rounds{};
        do {
#pragma unroll 1
            while (true) {
                zero_fill.wait_full();
                const volatile ZeroFill& there = common.dynamic.zero_fill;
                const bool first = threadIdx.x % 32 == 0;  // only the lane that releases the request reads it
                const int stage = __shfl_sync(0xffffffffu, first ? there.stage : 0, 0),
                          count = __shfl_sync(0xffffffffu, first ? there.count : 0, 0);
                if (count >= 0) write_zeros(v_smem + stage * VTile::kBytes, count);
                fence_shared_for_async();
                __syncwarp();
                if (first) {
                    zero_fill.empty().arrive();
                    if (count >= 0) MBarrier{shared_address(&common.v.full[stage])}.arrive();
                }
                zero_fill.advance();
                if (count < 0) break;
            }
        } while (start_recompute(rounds));
    }
    __device__ __forceinline__ void write_zeros(uint32_t tile, int first_row) const {
        constexpr int kEights = VTile::kChunks * 8;
        for (int i = first_row * kEights + static_cast<int>(threadIdx.x % 32); i < kBlockN * kEights; i += 32)
            store_zeros_16(tile + VTile::offset(i / kEights, i % kEights));
    }

    __device__ __forceinline__ void load_keys(Producer& p, const WorkTile& work_tile) const {
#pragma unroll 1
        for (int tile = work_tile.keys.end - 2; tile >= work_tile.keys.begin; --tile) {
            load_k(p, work_tile, tile);
            load_v(p, work_tile, tile + 1);
        }
        load_v(p, work_tile, work_tile.keys.begin);
    }
};

}  // namespace libflash::cuda::sm90
