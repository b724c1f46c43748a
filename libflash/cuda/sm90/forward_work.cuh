// The work of a thread block of the sm_90a forward kernel: its work tiles, what the warps know of each (WorkTile), and the shared
// memory layout (Common).
#pragma once

#include "cuda/attention/key_range.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/config.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/sm90/block_mask_iterator.cuh"
#include "cuda/sm90/forward_instance.h"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/sequence_order.cuh"
#include "cuda/tile/swizzled_tile.cuh"
#include "cuda/tile/tensor_map.cuh"

#include <climits>
#include <type_traits>

namespace libflash::cuda::sm90 {

struct ForwardMaps {
    CUtensorMap q, k, v, out;
    bool all_see_keys;    // the host knows that every query row sees a key
    bool keys_end_early;  // rows after the keys of a sequence may belong to others or hold anything
};

template <class Kernel, ForwardInstance kInstance>
struct ForwardWork {
    static constexpr KernelConfig config = Kernel::config;
    using T = std::conditional_t<config.dtype == KernelType::f16_, __half, __nv_bfloat16>;
    static constexpr int kHeadDim = config.head_dim, kHeadDimV = config.head_dim_v;
    static constexpr bool kGeneral = kInstance == ForwardInstance::general, kDynamic = kInstance != ForwardInstance::plain,
                          kBlockMask = kGeneral || kInstance == ForwardInstance::block_mask;  // iterates over a block mask
    static constexpr int kBlockM = forward_tile_q(config, kInstance), kBlockN = forward_tile_k(config, kInstance),
                         kStages = config.stages;
    static constexpr int kGroupRows = 64, kGroups = kBlockM / kGroupRows;
    static constexpr int kThreads = (kGroups + 1) * 128;
    static constexpr bool kFirstApart = kGroups == 3;     // the first tile has code of its own (begin_first_work_tile)
    static constexpr bool kSkipsWorkTiles = kFirstApart;  // needs kFirstApart
    // Iteration over a block mask needs more registers in the producer warp; it gets them where the consumers can spare them.
    static constexpr bool kSpares = kBlockMask && !(kGeneral && kHeadDimV == 256);
    static constexpr int kProducerRegisters = kSpares ? 56 : (kGroups == 3 ? 32 : 40),
                         kConsumerRegisters = (kGroups == 3 ? 160 : 232) - (kSpares ? 8 : 0);

    using QTile = SwizzledTile<kGroupRows, kHeadDim>;
    using KTile = SwizzledTile<kBlockN, kHeadDim>;
    using VTile = SwizzledTile<kBlockN, kHeadDimV>;
    using OutTile = SwizzledTile<16, kHeadDimV>;  // one per consumer warp

    struct Nothing {};
    struct Assignment {
        TileCoordinates work;
        int round;
        uint32_t
            writers;  // a bit per consumer warp: whether it writes; in recomputation only warps with overflowed rows write theirs
    };
    // The key tiles [begin, end) that a consumer warpgroup processes. Its rows see all keys of the tiles [plain_begin,
    // plain_end); the others are edge tiles.
    struct alignas(16) GroupTiles {
        int begin, end, plain_begin, plain_end;
    };
    // One query tile of one head.
    struct WorkTile : Assignment {
        SequenceRows q_rows;
        int first_key;  // first row of its sequence in K and V
        float* lse;     // of the first row; nullptr: not requested
        KeyRange<kBlockM, kBlockN> keys;
        GroupTiles of_group[kGroups];  // computed once from `keys`, read for every key tile
        std::conditional_t<kGeneral, ScoreRules<T>, Nothing> rules;
        int kv_head;
        bool safe;  // recomputation: take the maximum of every tile
    };
    // The position of a warp in the thread block's rounds [next, end). A round is a work tile (static schedule) or a unit
    // (dynamic schedule). All are computed once; then (`safe`) those with overflowed rows are computed again.
    struct ScheduleCursor {
        int next, end;
        bool safe;
    };
    static constexpr int kAhead = 1;  // work tiles that the scheduler warp has found and the producer warp has not taken
    // A request to zero rows of a tile of V that reaches beyond its sequence: its stage, and how many of its rows belong to the
    // sequence; -1: no more requests.
    struct ZeroFill {
        PipelineBarriers<1> barriers;
        uint32_t phase;  // of the producer warp
        int stage, count;
    };
    struct DynamicState {
        TileWord tiles[kStages];  // those in the stages of K
        int newest;               // the unit that was taken last, see SequenceOrder::before()
        ZeroFill zero_fill;
    };
    static constexpr int kMostBytes = 227 * 1024;  // shared memory of a thread block
    static constexpr int kOwnBytes = 3 * 1024;     // of it for Common and alignment
    static constexpr int kQBytes = kGroups * QTile::kBytes, kOutBytes = kGroups * 4 * OutTile::kBytes,
                         kLeastBytes = kQBytes + kStages * (KTile::kBytes + VTile::kBytes);
    // Shared memory beyond the minimum is used, in this order, for: output tiles, so that TMA stores the output; a third stage of
    // V; a second stage of Q, so that Q of the next work tile is loaded before the current one is done.
    static constexpr int kRoom = kMostBytes - kOwnBytes - kLeastBytes;
    static constexpr bool kSendsRows = kRoom >= kOutBytes;
    static constexpr int kVStages = kStages + (kStages == 2 && kRoom >= (kSendsRows ? kOutBytes : 0) + VTile::kBytes ? 1 : 0);
    static constexpr int kQStages = kSendsRows && kRoom >= kOutBytes + (kVStages - kStages) * VTile::kBytes + kQBytes ? 2 : 1;
    static constexpr int kWorkTiles = 3 + kQStages + kAhead;
    static constexpr int kMostRecomputed = 128;
    struct Common {
        PipelineBarriers<kStages> k;
        PipelineBarriers<kVStages> v;
        PipelineBarriers<kQStages> q[kGroups];
        PipelineBarriers<kAhead> ahead;
        uint64_t all_done;
        // What must be recomputed: the rounds [begin, end), and in them the warps listed as round * 16 + warp; all warps if the
        // list is too short.
        int recompute_begin, recompute_end;
        int recompute_count, overflowed[kMostRecomputed];
        // A ring of slots: the scheduler warp fills them, the producer warp and the consumers read them in the same order.
        // With one stage of Q, work tile n is filled in after the producer warp took n-1, so after all consumers released Q
        // of n-3. They may still have to write the rows of n-4, so that five slots are needed.
        WorkTile work_tiles[kWorkTiles];
        std::conditional_t<kDynamic, DynamicState, Nothing> dynamic;
    };
    static constexpr int kTileBytes =
        kQStages * kQBytes + kStages * KTile::kBytes + kVStages * VTile::kBytes + (kSendsRows ? kOutBytes : 0);
    static constexpr int kSharedBytes = kTileBytes + static_cast<int>(sizeof(Common)) + QTile::kAlignment;
    static_assert(sizeof(Common) + QTile::kAlignment <= kOwnBytes && kSharedBytes <= kMostBytes, "a thread block has 227 KB");

    const ForwardParams& params;
    const ForwardMaps& maps;
    uint32_t q_smem, k_smem, v_smem, out_smem;
    Common& common;

    __device__ __forceinline__ ForwardWork(const ForwardParams& p, const ForwardMaps& m, char* aligned)
        : params(p), maps(m), common(*reinterpret_cast<Common*>(aligned + kTileBytes)) {
        q_smem = shared_address(aligned);
        k_smem = q_smem + kQStages * kQBytes;
        v_smem = k_smem + kStages * KTile::kBytes;
        out_smem = v_smem + kVStages * VTile::kBytes;
    }

    // Static schedule: the work tile of this thread block in a round; batch < 0: none.
    __device__ __forceinline__ TileCoordinates static_work(int round) const {
        const ScheduleParams& schedule = params.schedule;
        // Rotated by one thread block per round: otherwise a thread block could get the same tile of every head, which may be
        // longer or shorter than the rest.
        const int turn = schedule.paired ? round / 2 : round, blocks = gridDim.x;
        const int unit = turn * blocks + (static_cast<int>(blockIdx.x) + turn) % blocks;
        if (unit >= schedule.heads * schedule.tiles) return {-1, 0, 0};
        TileCoordinates work = tile_coordinates<kBlockM>(schedule, params.q_lengths, params.batch, unit);
        if (!schedule.paired) return work;
        const int early = work.tile, late = (params.q_lengths.capacity + kBlockM - 1) / kBlockM - 1 - early;
        if (round % 2 == 1 && early == late) return {-1, 0, 0};
        work.tile = round % 2 == 1 ? early : late;
        return work;
    }
    __device__ __forceinline__ TileCoordinates tile_of_order(int unit) const {
        return SequenceOrder(params).template tile_of<kBlockM>(unit, params.q_lengths, params.schedule.reversed);
    }

    __device__ __forceinline__ bool dynamic_schedule() const { return !kGeneral || params.sequence_order; }

    __device__ __forceinline__ ScheduleCursor first_cursor() const {
        const int units = params.schedule.heads * params.schedule.tiles, blocks = gridDim.x;
        return {0, (units + blocks - 1) / blocks * (params.schedule.paired ? 2 : 1), false};
    }
    // Waits until all warps have finished the first pass. Returns false if there is nothing to recompute, or if that has been
    // done.
    __device__ __forceinline__ bool start_recompute(ScheduleCursor& rounds) const {
        if (rounds.safe) return false;
        const MBarrier all_done{shared_address(&common.all_done)};
        __syncwarp();
        if (threadIdx.x % 32 == 0) all_done.arrive();
        all_done.wait(0);
        rounds = {*const_cast<volatile int*>(&common.recompute_begin), *const_cast<volatile int*>(&common.recompute_end), true};
        return rounds.next < rounds.end;
    }
    // The next work tile and its writers. A whole warp calls it; all lanes get the same. False: no rounds are left.
    __device__ __forceinline__ bool next_static_work(ScheduleCursor& rounds, Assignment& turn) const {
        while (rounds.next < rounds.end) {
            turn.round = rounds.next++;
            turn.writers = rounds.safe ? warps_to_recompute(turn.round) : 0xffffffffu;
            if (turn.writers == 0) continue;
            turn.work = static_work(turn.round);
            if (turn.work.batch >= 0) return true;
        }
        return false;
    }
    // The same for the dynamic schedule: a round is a unit. The first two units of a thread block are fixed, so that it can begin
    // without the counter. For recomputation the thread block goes through the units that it took, from the last to the first.
    __device__ __forceinline__ bool next_dynamic_work(ScheduleCursor& rounds, Assignment& turn) const {
        const SequenceOrder order(params);
        const bool leader = threadIdx.x % 32 == 0;
        int& unit = turn.round;
        if (rounds.safe) {
            do {
                unit = *const_cast<volatile int*>(&common.dynamic.newest);
                if (unit < 0) return false;
                __syncwarp();
                if (leader) common.dynamic.newest = order.before()[unit];
                __syncwarp();
                turn.writers = warps_to_recompute(unit);
            } while (turn.writers == 0);
        } else {
            const int blocks = gridDim.x, block = blockIdx.x, taken = rounds.next++;
            unit = taken == 0 ? block : 2 * blocks - 1 - block;
            if (leader && taken > 1) unit = 2 * blocks + atomicAdd(order.counter(), 1);
            unit = __shfl_sync(0xffffffffu, unit, 0);
            if (unit >= order.units()) return false;
            if (leader) order.before()[unit] = common.dynamic.newest, common.dynamic.newest = unit;
            turn.writers = 0xffffffffu;
        }
        turn.work = tile_of_order(unit);
        return true;
    }

    __device__ __forceinline__ bool next_work(ScheduleCursor& rounds, Assignment& turn) const {
        if constexpr (kDynamic) {
            if (dynamic_schedule()) return next_dynamic_work(rounds, turn);
        }
        return next_static_work(rounds, turn);
    }

    // One lane calls it for its warp, whose rows of this round must be recomputed.
    __device__ __forceinline__ void mark_for_recompute(int round, int warp) const {
        atomicMin(&common.recompute_begin, round);
        atomicMax(&common.recompute_end, round + 1);
        const int place = atomicAdd(&common.recompute_count, 1);
        if (place < kMostRecomputed) common.overflowed[place] = round * 16 + warp;
    }
    // After the first pass of all warps: the warps that must recompute a round, a bit each.
    __device__ __forceinline__ uint32_t warps_to_recompute(int round) const {
        const int count = *const_cast<volatile int*>(&common.recompute_count);
        if (count > kMostRecomputed) return 0xffffffffu;
        uint32_t warps = 0;
        for (int i = 0; i < count; ++i) {
            const int overflowed = *const_cast<volatile int*>(common.overflowed + i);
            if (overflowed / 16 == round) warps |= 1u << overflowed % 16;
        }
        return warps;
    }

    __device__ __forceinline__ void fill(WorkTile& work_tile, const Assignment& turn, bool safe) const {
        const TileCoordinates& work = turn.work;
        const SequenceRows k_rows = SequenceRows::of(params.k_lengths, work.batch);
        static_cast<Assignment&>(work_tile) = turn;
        work_tile.safe = safe;
        work_tile.q_rows = SequenceRows::of(params.q_lengths, work.batch);
        work_tile.first_key = k_rows.start;
        work_tile.kv_head = work.head / params.group_size;
        work_tile.keys.init(params.mask, work.tile, work_tile.q_rows.length, k_rows.length);
        const RowStatisticsParams& lse = params.lse;
        work_tile.lse = lse.data ? lse.data + work.batch * lse.batch + work.head * lse.head +
                                       (work_tile.q_rows.start + work_tile.keys.first_row) * lse.row
                                 : nullptr;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) work_tile.of_group[group] = tiles_of_group(work_tile, group);
        if constexpr (kGeneral) work_tile.rules.init(params.rare, work.batch, work.head, work_tile.q_rows.length, k_rows.length);
    }

    // Skips key tiles at the end that no row of the group sees, so that groups with fewer keys, or without rows, do not compute
    // as long as the rest. One tile always remains. At most kStages - 1 are skipped: the group releases their stages of V only
    // when K of its first tile has arrived, and the producer loads V of the skipped tiles before that K. In a longer work tile a
    // group without rows gets no tile at all; this costs a pause between its work tiles.
    __device__ __forceinline__ GroupTiles tiles_of_group(const WorkTile& work_tile, int group) const {
        const auto& keys = work_tile.keys;
        const int row = keys.first_row + group * kGroupRows, diagonal = row + keys.shift,
                  rows = min(length_of(work_tile) - row, kGroupRows);
        const int seen = rows <= 0 ? 0 : max(diagonal + rows + keys.right, 0);  // end of the keys that some row sees
        GroupTiles tiles{keys.begin, min((seen + kBlockN - 1) / kBlockN, keys.end)};
        tiles.end = min(max(max(tiles.end, keys.begin + 1), keys.end - (kStages - 1)), keys.end);
        if (kSkipsWorkTiles && row >= owned_of(work_tile) && keys.end - keys.begin > kStages) tiles.end = keys.begin;
        tiles.plain_begin = (max(diagonal + kGroupRows - 1 - keys.left, 0) + kBlockN - 1) / kBlockN;
        tiles.plain_end = max(min(keys.length_k, diagonal + keys.right + 1), 0) / kBlockN;
        return tiles;
    }

    // Rows of the sequence: the first one, the number that exist, the used length. In the plain instance they are the same for
    // all sequences.
    __device__ __forceinline__ int start_of(const WorkTile& work_tile) const { return kDynamic ? work_tile.q_rows.start : 0; }
    __device__ __forceinline__ int owned_of(const WorkTile& work_tile) const {
        return kDynamic ? work_tile.q_rows.owned : params.q_lengths.capacity;
    }
    __device__ __forceinline__ int length_of(const WorkTile& work_tile) const {
        return kDynamic ? work_tile.q_rows.length : params.q_lengths.capacity;
    }

    // The visible key tiles of a work tile under a block mask. A whole warp calls it.
    __device__ __forceinline__ BlockMaskIterator<kBlockM, kBlockN> walk_of(const WorkTile& work_tile) const {
        return {params.block_mask, work_tile.work, work_tile.keys};
    }

    // One thread calls it before the warps take their roles.
    __device__ __forceinline__ void prepare() {
        tma_prefetch_map(maps.q);
        tma_prefetch_map(maps.k);
        tma_prefetch_map(maps.v);
        if (kSendsRows) tma_prefetch_map(maps.out);
        common.k.init(kGroups * 4);
        common.v.init(kGroups * 4);
        for (int group = 0; group < kGroups; ++group) common.q[group].init(4);
        common.ahead.init(1);
        MBarrier{shared_address(&common.all_done)}.init(kGroups * 4 + (kDynamic ? 3 : 2));
        if constexpr (kDynamic) {
            common.dynamic.newest = -1;
            common.dynamic.zero_fill.barriers.init(1);
            common.dynamic.zero_fill.phase = 0;
        }
        common.recompute_begin = INT_MAX;
        common.recompute_end = common.recompute_count = 0;
        fence_barrier_init();
    }

    __device__ __forceinline__ uint32_t q_tile(int stage, int group) const {
        return q_smem + stage * kQBytes + group * QTile::kBytes;
    }
    __device__ static __forceinline__ int following(int slot) { return slot + 1 == kWorkTiles ? 0 : slot + 1; }
    __device__ static __forceinline__ int preceding(int slot) { return (slot == 0 ? kWorkTiles : slot) - 1; }
};

}  // namespace libflash::cuda::sm90
