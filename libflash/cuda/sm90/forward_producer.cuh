// The producer warp of the sm_90a forward kernel: for one work tile after another it loads Q, K and V by TMA, and with
// Traits::kBiasTiles copies the bias or the mask by cp.async.
#pragma once

#include "cuda/ptx/copy_barrier.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm90/forward_rare_options.cuh"
#include "cuda/sm90/forward_tile_scheduler.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardProducer {
    using Storage = ForwardSharedStorage<Traits>;
    using WorkTile = ForwardWorkTile<Traits>;
    using QTile = typename Traits::QTile;
    using KTile = typename Traits::KTile;
    using VTile = typename Traits::VTile;
    using RareOptions = ForwardRareOptions<Traits>;
    static constexpr int kBlockN = Traits::kBlockN, kStages = Traits::kStages;

    const ForwardContext<Traits>& context;
    const ForwardTileScheduler<Traits> scheduler{context};

    struct State {
        bool leader;  // the thread that issues TMA loads and arrives; all lanes issue copies
        PipelineState<kStages> k;
        PipelineState<Traits::kVStages> v;
        PipelineState<Traits::kQStages> q;  // of group 0; all groups have the same stage and phase
        PipelineState<Storage::kScheduledTiles> scheduled;
        int slot;  // of the work tile
    };

    // Loads key tiles from the last to the first; V of a tile after K of the next tile. First waits for the previous kernel,
    // which may still write q, k and v.
    __device__ __forceinline__ void run() const {
        State p = initial_state();
        ScheduleCursor cursor{};
        wait_for_previous_kernel();
        do {
            bool found = wait_for_work_tile(p);
            if (!Traits::kSeparateFirstTile && found && p.leader) provide_empty_v(p);
            for (; found; found = wait_for_work_tile(p)) load_work_tile(p);
            announce_end(p);
            // Read from shared memory, because there are too few registers to keep it.
            cursor.exact_maximum = context.storage.work_tiles[Storage::previous_slot(p.slot)].exact_maximum;
        } while (scheduler.start_recompute(cursor));
    }

protected:
    __device__ __forceinline__ State initial_state() const {
        return {elect_one(),
                PipelineState<kStages>(context.storage.k),
                PipelineState<Traits::kVStages>(context.storage.v),
                PipelineState<Traits::kQStages>(context.storage.q[0]),
                PipelineState<Storage::kScheduledTiles>(context.storage.scheduled),
                0};
    }
    // Waits for the next work tile from the scheduler warp. Returns false for the end mark.
    __device__ __forceinline__ bool wait_for_work_tile(State& p) const {
        p.scheduled.wait_full();
        __syncwarp();  // all lanes have seen this phase before it can be full again
        if (p.leader) p.scheduled.empty().arrive();
        p.scheduled.advance();
        return context.storage.work_tiles[p.slot].has_keys();
    }
    __device__ __forceinline__ void go_to_next_slot(State& p) const {
        __syncwarp();
        p.q.advance();
        p.slot = Storage::next_slot(p.slot);
    }

    // Announces a work tile to the consumers, and loads its tiles.
    __device__ __forceinline__ void load_work_tile(State& p) const {
        if constexpr (Traits::kBlockMask) {
            load_visible_tiles(p);
        } else if (p.leader) {
            const WorkTile& work_tile = context.storage.work_tiles[p.slot];
            load_k(p, work_tile, work_tile.keys.end - 1);
            load_q(p, work_tile, true);
            load_keys(p, work_tile);
        }
        go_to_next_slot(p);
    }
    // Announces the end mark to the consumers, and to the zero-fill warp that no further request comes.
    __device__ __forceinline__ void announce_end(State& p) const {
        if (p.leader) {
            if constexpr (Traits::kDynamic) context.storage.dynamic.zero_fill.send(p.v.stage, -1).arrive();
            load_q(p, context.storage.work_tiles[p.slot], false);
        }
        go_to_next_slot(p);
    }

    __device__ __forceinline__ void load_keys(State& p, const WorkTile& work_tile) const {
#pragma unroll 1
        for (int tile = work_tile.keys.end - 2; tile >= work_tile.keys.begin; --tile) {
            load_k(p, work_tile, tile);
            load_v(p, work_tile, tile + 1);
        }
        load_v(p, work_tile, work_tile.keys.begin);
    }
    // With a block mask: the whole warp searches for the next tile. A work tile without a visible block gets the tile after its
    // last key, which is masked entirely.
    __device__ __forceinline__ void load_visible_tiles(State& p) const {
        const WorkTile& work_tile = context.storage.work_tiles[p.slot];
        BlockMaskIterator<Traits::kBlockM, kBlockN> visible{context.params.block_mask, work_tile.assignment.coordinates,
                                                            work_tile.keys};
        int found = -1, next;
        bool first = true;
#pragma unroll 1
        do {
            next = visible.next();
            if constexpr (Traits::kRareOptions) {
                if (next >= 0) RareOptions{context}.prefetch(work_tile, next, static_cast<int>(threadIdx.x & 31));
            }
            if (found < 0 && next < 0) found = (work_tile.keys.length_k + kBlockN - 1) / kBlockN;
            // A tile is loaded only when the next tile has been searched for, because the TileWord says whether another tile
            // follows.
            if ((Traits::kBiasTiles || p.leader) && found >= 0) {
                load_visible_tile(p, work_tile, TileWord::of(found, next < 0), first);
                first = false;
            }
            found = next;
        } while (next >= 0);
        if (p.leader) load_v(p, work_tile, loaded_tile(p, 1));
    }
    __device__ __forceinline__ void load_visible_tile(State& p, const WorkTile& work_tile, TileWord word, bool first) const {
        if constexpr (Traits::kBiasTiles) {
            load_with_bias(p, work_tile, word);
            if (!p.leader) return;
        } else {
            p.k.wait_empty();
            context.storage.dynamic.tiles[p.k.stage] = word;
            load_k(p, work_tile, word.tile());
        }
        if (first) {
            load_q(p, work_tile, true);
        } else {
            load_v(p, work_tile, loaded_tile(p, 2));
        }
    }
    // K and the bias or the mask of its keys. All lanes keep the state of the pipeline of K.
    __device__ __forceinline__ void load_with_bias(State& p, const WorkTile& work_tile, TileWord word) const {
        const PipelineState<kStages> k = p.k;
        const RareOptions options{context};
        const InShared beside_k = options.to_copy(work_tile, word.tile());
        if (p.leader) {
            k.wait_empty();
            word.set_in_shared(beside_k);
            context.storage.dynamic.tiles[k.stage] = word;
            load_k(p, work_tile, word.tile());
        } else {
            p.k.advance();
        }
        __syncwarp();
        options.copy(beside_k, context.tiles.bias(k.stage), work_tile, word.tile(), static_cast<int>(threadIdx.x & 31));
        arrive_after_copies(k.full());
    }
    // The tile whose K was loaded last (1), or the one before it (2).
    __device__ __forceinline__ int loaded_tile(const State& p, int back) const {
        return context.storage.dynamic.tiles[(p.k.stage + kStages - back) % kStages].tile();
    }

    // Also announces the work tile to the consumers, which wait for Q.
    __device__ __forceinline__ void load_q(const State& p, const WorkTile& work_tile, bool has_keys) const {
        for (int group = 0; group < Traits::kGroups; ++group) {
            PipelineState<Traits::kQStages> q = p.q;
            q.barriers = shared_address(&context.storage.q[group]);
            q.wait_empty();
            if (has_keys) {
                q.full().arrive_and_expect(QTile::kBytes);
                QTile::load(context.tiles.q(q.stage, group), context.maps.q, q.full(),
                            work_tile.start_q() + work_tile.keys.first_row + group * Traits::kGroupRows, work_tile.head(),
                            work_tile.batch());
            } else {
                q.full().arrive();
            }
        }
    }
    __device__ __forceinline__ void load_k(State& p, const WorkTile& work_tile, int tile) const {
        p.k.wait_empty();
        p.k.full().arrive_and_expect(KTile::kBytes);
        KTile::load(context.tiles.k(p.k.stage), context.maps.k, p.k.full(), work_tile.key_row(tile), work_tile.kv_head,
                    work_tile.batch());
        p.k.advance();
    }
    // Where rows of the tile lie beyond the sequence, the load completes on the barrier of the zero-fill warp, which then marks
    // the stage full.
    __device__ __forceinline__ void load_v(State& p, const WorkTile& work_tile, int tile) const {
        p.v.wait_empty();
        MBarrier full = p.v.full();
        if constexpr (Traits::kDynamic) {
            const int count = work_tile.keys.length_k - tile * kBlockN;
            if (count < kBlockN && context.maps.zero_fill_values)
                full = context.storage.dynamic.zero_fill.send(p.v.stage, max(count, 0));
        }
        full.arrive_and_expect(VTile::kBytes);
        VTile::load(context.tiles.v(p.v.stage), context.maps.v, full, work_tile.key_row(tile), work_tile.kv_head,
                    work_tile.batch());
        p.v.advance();
    }
    // A stage of V without data, for the product that the consumers issue before their first tile
    // (begin_with_zero_probabilities).
    __device__ __forceinline__ void provide_empty_v(State& p) const {
        if (p.leader) {
            p.v.wait_empty();
            p.v.full().arrive();
        }
        p.v.advance();
    }
};

}  // namespace libflash::cuda::sm90
