// FlashAttention-3 forward for sm_90a (Shah and others, arXiv 2407.08608). A thread block stays and does one tile of query rows after the other. One
// warp finds out which, and asks the copy engine for tiles of Q, K and V; warpgroups of 64 query rows each multiply and exponentiate. In a warpgroup the
// product Q K^T of a tile and P V of the one before go on under the exponentials, and so does the first product of the next query tile under the end of
// this one. P goes from registers to registers. The warpgroups need no order among themselves: turns at the tensor cores cost 2 to 3 % at long lengths.
//
// Rows whose maximum was not safe (row_softmax.cuh) are noted; at the end of all its work the thread block does the tiles with such rows again.
#pragma once

#include "cuda/attention/key_range.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/params.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/ring.cuh"
#include "cuda/sm90/row_softmax.cuh"
#include "cuda/tile/quad.cuh"
#include "cuda/tile/swizzled_tile.cuh"
#include "cuda/tile/tensor_map.cuh"

#include <climits>
#include <type_traits>

namespace libflash::cuda::sm90 {

struct ForwardMaps {
    CUtensorMap q, k, v;
};

template <class Row>
struct Forward {
    static constexpr KernelConfig config = Row::config;
    using T = std::conditional_t<config.dtype == RowType::f16_, __half, __nv_bfloat16>;
    static constexpr int kHeadDim = config.head_dim, kHeadDimV = config.head_dim_v;
    static constexpr int kBlockM = config.tile_q, kBlockN = config.tile_k, kStages = config.stages;
    static constexpr int kGroupRows = 64, kGroups = kBlockM / kGroupRows;
    static constexpr int kThreads = (kGroups + 1) * 128;
    static constexpr int kProducerRegisters = kGroups == 3 ? 32 : 40, kConsumerRegisters = kGroups == 3 ? 160 : 232;

    using QTile = SwizzledTile<kGroupRows, kHeadDim>;
    using KTile = SwizzledTile<kBlockN, kHeadDim>;
    using VTile = SwizzledTile<kBlockN, kHeadDimV>;
    using Softmax = RowSoftmax<kBlockN>;
    static constexpr int kScores = kBlockN / 2, kSums = kHeadDimV / 2;

    // One tile of query rows.
    struct Item {
        WorkTile work;
        KeyRange<kBlockM, kBlockN> keys;
        int kv_head;
        int round;
        bool safe;  // the maximum of every tile
        bool more;  // another item follows
    };
    // Where a role stands in the work of this thread block: all of it, and then what is to be done again.
    struct Rounds {
        int next, end;
        bool safe;
    };
    static constexpr int kItems = 4;
    struct Common {
        RingBarriers<kStages> k, v;
        RingBarriers<1> q[kGroups];
        int redo_begin, redo_end;  // rounds that are to be done again
        // From the warp that copies to those that multiply, in turn. An item is written while the one before is handed over, and that is when all have
        // released Q of the second before, and are done with the third before.
        Item items[kItems];
    };
    static constexpr int kTileBytes = kGroups * QTile::kBytes + kStages * (KTile::kBytes + VTile::kBytes);
    static constexpr int kSharedBytes = kTileBytes + static_cast<int>(sizeof(Common)) + QTile::kAlignment;
    static_assert(kSharedBytes <= 232448, "a thread block has 227 KB of shared memory");

    // Named barrier.
    static constexpr int kAllDone = 1;

    const ForwardParams& params;
    const ForwardMaps& maps;
    uint32_t q_smem, k_smem, v_smem;
    Common& common;

    __device__ __forceinline__ Forward(const ForwardParams& p, const ForwardMaps& m, char* aligned)
        : params(p), maps(m), common(*reinterpret_cast<Common*>(aligned + kTileBytes)) {
        q_smem = shared_address(aligned);
        k_smem = q_smem + kGroups * QTile::kBytes;
        v_smem = k_smem + kStages * KTile::kBytes;
    }

    // The tile of query rows that this thread block has in a round; batch < 0: none.
    __device__ __forceinline__ WorkTile work_of(int round) const {
        const ScheduleParams& schedule = params.schedule;
        const int unit = (schedule.paired ? round / 2 : round) * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
        if (unit >= schedule.heads * schedule.tiles) return {-1, 0, 0};
        WorkTile work = work_tile<kBlockM>(schedule, params.q_lengths, params.batch, unit);
        if (!schedule.paired) return work;
        const int early = work.tile, late = (params.q_lengths.capacity + kBlockM - 1) / kBlockM - 1 - early;
        if (round % 2 == 1 && early == late) return {-1, 0, 0};
        work.tile = round % 2 == 1 ? early : late;
        return work;
    }

    __device__ __forceinline__ Rounds first_rounds() const {
        const int units = params.schedule.heads * params.schedule.tiles, blocks = gridDim.x;
        return {0, (units + blocks - 1) / blocks * (params.schedule.paired ? 2 : 1), false};
    }
    // Waits for the others to have done theirs. False: there is nothing left.
    __device__ __forceinline__ bool start_again(Rounds& rounds) const {
        if (rounds.safe) return false;
        named_barrier_wait(kAllDone, kGroups * 128 + 32);
        rounds = {*const_cast<volatile int*>(&common.redo_begin), *const_cast<volatile int*>(&common.redo_end), true};
        return rounds.next < rounds.end;
    }
    // False: the rounds are over.
    __device__ __forceinline__ bool next_item(Rounds& rounds, Item& item) const {
        while (rounds.next < rounds.end) {
            item.round = rounds.next++;
            item.safe = rounds.safe;
            item.work = work_of(item.round);
            if (item.work.batch < 0) continue;
            item.kv_head = item.work.head / params.group_size;
            item.keys.init(params.mask, item.work.tile, params.q_lengths.capacity, params.k_lengths.capacity);
            return true;
        }
        return false;
    }

    // Before the roles part.
    __device__ __forceinline__ void prepare() {
        if (threadIdx.x == 0) {
            tma_prefetch_map(maps.q);
            tma_prefetch_map(maps.k);
            tma_prefetch_map(maps.v);
            common.k.init(kGroups * 4);
            common.v.init(kGroups * 4);
            for (int group = 0; group < kGroups; ++group) common.q[group].init(4);
            common.redo_begin = INT_MAX;
            common.redo_end = 0;
            fence_barrier_init();
        }
        __syncthreads();
    }

    // The thread that finds out what there is to do, and copies.
    struct Producer {
        Ring<kStages> k, v;
        uint32_t q_phase;
        int slot;  // the item's
    };

    // One warp, of which one lane works. Keys go from the last tile to the first; V of a tile comes after K of the next.
    __device__ __forceinline__ void produce() {
        const bool leader = elect_one();
        Producer p{Ring<kStages>(common.k), Ring<kStages>(common.v), 0, 0};
        Rounds rounds = first_rounds();
        do {
            if (leader) hand_over_all(p, rounds);
            __syncwarp();
        } while (start_again(rounds));
    }

    __device__ __forceinline__ void hand_over_all(Producer& p, Rounds& rounds) const {
        bool pending = false, found = true;  // an item is known, and not yet handed over
#pragma unroll 1
        while (found) {
            Item& item = common.items[pending ? following(p.slot) : p.slot];
            found = find_item(rounds, item);
            if (pending) {
                common.items[p.slot].more = found;
                if (found) prefetch_q(item);
            }
            if (pending || !found) hand_over(p, pending);
            pending = true;
        }
    }

    // The next item that has keys. False: the rounds are over, and the item has none.
    __device__ __forceinline__ bool find_item(Rounds& rounds, Item& item) const {
        while (next_item(rounds, item)) {
            if (item.keys.begin != item.keys.end) return true;
        }
        item.keys.begin = item.keys.end = 0;
        return false;
    }

    // Another warp: rows that see no key.
    __device__ __forceinline__ void write_empty_items() const {
        Rounds rounds = first_rounds();
        Item item;
        while (next_item(rounds, item)) {
            if (item.keys.begin == item.keys.end) write_nothing(item);
        }
    }

    // Tells the others of an item, and copies what it needs, if it has keys.
    __device__ __forceinline__ void hand_over(Producer& p, bool has_keys) const {
        const Item& item = common.items[p.slot];
        if (has_keys) load_k(p, item, item.keys.end - 1);
        for (int group = 0; group < kGroups; ++group) {
            Ring<1> q(common.q[group]);
            q.phase = p.q_phase;
            q.wait_empty();
            if (!has_keys) {
                q.full().arrive();
                continue;
            }
            q.full().arrive_and_expect(QTile::kBytes);
            QTile::load(q_smem + group * QTile::kBytes, maps.q, q.full(), item.keys.first_row + group * kGroupRows,
                        item.work.head, item.work.batch);
        }
        if (has_keys) load_keys(p, item);
        p.q_phase ^= 1;
        p.slot = following(p.slot);
    }
    __device__ static __forceinline__ int following(int slot) { return slot + 1 == kItems ? 0 : slot + 1; }

    // Into the L2 cache: its place in shared memory is not free before the present item is nearly done.
    __device__ __forceinline__ void prefetch_q(const Item& item) const {
        for (int group = 0; group < kGroups; ++group)
            for (int chunk = 0; chunk < QTile::kChunks; ++chunk)
                tma_prefetch(maps.q, chunk * 64, item.keys.first_row + group * kGroupRows, item.work.head, item.work.batch);
    }

    __device__ __forceinline__ void load_k(Producer& p, const Item& item, int tile) const {
        p.k.wait_empty();
        p.k.full().arrive_and_expect(KTile::kBytes);
        KTile::load(k_smem + p.k.stage * KTile::kBytes, maps.k, p.k.full(), tile * kBlockN, item.kv_head, item.work.batch);
        p.k.advance();
    }
    __device__ __forceinline__ void load_v(Producer& p, const Item& item, int tile) const {
        p.v.wait_empty();
        p.v.full().arrive_and_expect(VTile::kBytes);
        VTile::load(v_smem + p.v.stage * VTile::kBytes, maps.v, p.v.full(), tile * kBlockN, item.kv_head, item.work.batch);
        p.v.advance();
    }
    __device__ __forceinline__ void load_keys(Producer& p, const Item& item) const {
#pragma unroll 1
        for (int tile = item.keys.end - 2; tile >= item.keys.begin; --tile) {
            load_k(p, item, tile);
            load_v(p, item, tile + 1);
        }
        load_v(p, item, item.keys.begin);
    }

    __device__ __forceinline__ void write_nothing(const Item& item) const {
        for (int row = item.keys.first_row + static_cast<int>(threadIdx.x % 32); row < item.keys.first_row + kBlockM; row += 32) {
            finish_row(item, row, Softmax::kNothing, 0.0f, true);
            for (int col = 0; col < kHeadDimV; col += 8) write_eight(row_of_out(item, row), col, make_uint4(0, 0, 0, 0));
        }
    }

    // What a warpgroup that multiplies has at hand.
    struct Consumer {
        int group, warp, lane;  // `warp` of the group
        Ring<kStages> k, v;
        Ring<1> q;
        int slot;                     // the item's
        float s[kScores];             // scores, then probabilities
        float o[kSums];               // sums of p v
        uint32_t p[kBlockN / 16][4];  // probabilities, rounded
        Softmax softmax;
    };

    __device__ __forceinline__ void consume() {
        // The same for all lanes, and known to be so.
        const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
        const int group = warp / 4 - 1;
        Consumer c{group,
                   warp % 4,
                   static_cast<int>(threadIdx.x) % 32,
                   Ring<kStages>(common.k),
                   Ring<kStages>(common.v),
                   Ring<1>(common.q[group]),
                   0};
        Rounds rounds = first_rounds();
        do {
            c.q.wait_full();
            if (common.items[c.slot].keys.begin == common.items[c.slot].keys.end) {
                __syncwarp();
                release(c, c.q.empty());
                c.q.advance();
                c.slot = following(c.slot);
            } else {
                do_items(c);
            }
        } while (start_again(rounds));
    }

    // From the present item to the last.
    __device__ __forceinline__ void do_items(Consumer& c) {
        start_first_scores(c);
        wgmma_wait<0>();
        wgmma_settle(c.s);
        while (true) {
            const Item& item = common.items[c.slot];
            const bool first = walk_keys(c, item);
            c.slot = following(c.slot);
            c.v.wait_full();
            if (!item.more) {
                start_values(c, first);
                wgmma_wait<0>();
                finish(c, item);
                return;
            }
            // The last product, and the first scores of the next item, which go on under what is left to do of this one.
            start_values(c, first);
            c.q.wait_full();
            start_first_scores(c);
            wgmma_wait<1>();
            finish(c, item);
            wgmma_wait<0>();
            wgmma_settle(c.s);
        }
    }

    // O of an item, once its last product is there.
    __device__ __forceinline__ void finish(Consumer& c, const Item& item) const {
        wgmma_settle(c.o);
        release(c, c.v.empty());
        c.v.advance();
        if (c.softmax.finish() && !item.safe && c.lane == 0) {
            atomicMin(&common.redo_begin, item.round);
            atomicMax(&common.redo_end, item.round + 1);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float inverse = finish_row(item, row_of(c, item, r), c.softmax.base[r], c.softmax.sum[r], c.lane % 4 == 0);
            write_row(c, item, r, inverse);
        }
    }

    __device__ __forceinline__ void release(const Consumer& c, const MBarrier& empty) const {
        if (c.lane == 0) empty.arrive();
    }
    // s = Q K^T, begun.
    __device__ __forceinline__ void start_scores(Consumer& c) const {
        const uint32_t q = q_smem + c.group * QTile::kBytes, k = k_smem + c.k.stage * KTile::kBytes;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step)
            Wgmma<T, kBlockN>::template multiply_shared<false>(c.s, QTile::along_columns(q, step), KTile::along_columns(k, step),
                                                               step > 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void start_first_scores(Consumer& c) const {
        const Item& item = common.items[c.slot];
        for (int tile = item.keys.end; tile > end_of_keys(c, item); --tile) skip(c, c.k);
        c.k.wait_full();
        start_scores(c);
    }

    // Key tiles that none of this group's rows sees are left out at the end, all but one: groups that have fewer keys, or no rows, do not work as long as
    // the others. Not more than there are stages, because K is asked for before V of the tiles that are left out can be given back.
    __device__ __forceinline__ int end_of_keys(const Consumer& c, const Item& item) const {
        const int first_row = item.keys.first_row + c.group * kGroupRows,
                  last_row = min(first_row + kGroupRows, params.q_lengths.capacity) - 1;
        const int cols = last_row < first_row ? 0 : last_row + item.keys.shift + item.keys.right + 1;
        const int end = min((max(cols, 0) + kBlockN - 1) / kBlockN, item.keys.end);
        return max(max(end, item.keys.begin + 1), item.keys.end - (kStages - 1));
    }
    // A stage is given back when it is full: before that, an arrival might count for what was in it before; and when all lanes have seen it.
    __device__ __forceinline__ void skip(const Consumer& c, Ring<kStages>& ring) const {
        ring.wait_full();
        __syncwarp();
        release(c, ring.empty());
        ring.advance();
    }

    // o += P V, begun; the first time o = P V.
    __device__ __forceinline__ void start_values(Consumer& c, bool first) const {
        const uint32_t v = v_smem + c.v.stage * VTile::kBytes;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step)
            Wgmma<T, kHeadDimV>::template multiply<true>(c.o, c.p[step], VTile::down_rows(v, step), step > 0 || !first);
        wgmma_commit();
    }

    // From the first scores, which are there, to the last probabilities. True: there was one tile only.
    __device__ __forceinline__ bool walk_keys(Consumer& c, const Item& item) const {
        const float scale = item.safe ? 1.0f : params.scale_log2;
        float factor[2];
        int tile = end_of_keys(c, item) - 1;
        for (int skipped = item.keys.end - 1; skipped > tile; --skipped) skip(c, c.v);
        c.softmax.clear();
        release_scores(c, item, tile);
        prepare_scores(c, item, tile);
        c.softmax.apply(c.s, scale, true, factor);
        round_probabilities(c);
        bool first = true;
#pragma unroll 1
        for (--tile; tile >= item.keys.begin; --tile) {
            c.k.wait_full();
            wgmma_settle(c.s);
            start_scores(c);
            c.v.wait_full();
            start_values(c, first);
            wgmma_wait<1>();
            wgmma_settle(c.s);
            release_scores(c, item, tile);
            const bool edge = prepare_scores(c, item, tile);
            const bool moved = c.softmax.apply(c.s, scale, edge || item.safe, factor);
            wgmma_wait<0>();
            wgmma_settle(c.o);
            release(c, c.v.empty());
            c.v.advance();
            if (moved) {
#pragma unroll
                for (int i = 0; i < kSums; ++i) c.o[i] *= factor[i / 2 % 2];
            }
            round_probabilities(c);
            first = false;
        }
        return first;
    }

    // K of the tile is no longer needed; after the last one, neither is Q.
    __device__ __forceinline__ void release_scores(Consumer& c, const Item& item, int tile) const {
        release(c, c.k.empty());
        c.k.advance();
        if (tile > item.keys.begin) return;
        release(c, c.q.empty());
        c.q.advance();
    }

    // True: the tile has a mask.
    __device__ __forceinline__ bool prepare_scores(Consumer& c, const Item& item, int tile) const {
        if (item.safe) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) c.s[i] *= params.scale_log2;
        }
        const bool edge = item.keys.template is_edge<kGroupRows>(tile, c.group * kGroupRows);
        if (edge) mask_scores(c, item, tile);
        return edge;
    }

    __device__ __forceinline__ int row_of(const Consumer& c, const Item& item, int r) const {
        return item.keys.first_row + c.group * kGroupRows + c.warp * 16 + r * 8 + c.lane / 4;
    }

    __device__ __forceinline__ void mask_scores(Consumer& c, const Item& item, int tile) const {
        const int first_col = tile * kBlockN + c.lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // Columns of this lane, counted from its first one, that the row sees: [begin, end).
            const int row = row_of(c, item, r);
            const int begin = row + item.keys.shift - item.keys.left - first_col;
            const int end = min(item.keys.length_k, row + item.keys.shift + item.keys.right + 1) - first_col;
#pragma unroll
            for (int i = 2 * r; i < kScores; i += 4)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int col = i / 4 * 8 + e;
                    if (col < begin || col >= end) c.s[i + e] = -INFINITY;
                }
        }
    }

    __device__ __forceinline__ void round_probabilities(Consumer& c) const {
#pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) c.p[step][i] = pack_pair(c.s[8 * step + 2 * i], c.s[8 * step + 2 * i + 1], T());
    }

    // Writes the lse of a row, with the sink if there is one. What its sums of p v are to be multiplied by; 0: the row sees no key.
    __device__ __forceinline__ float finish_row(const Item& item, int row, float base, float sum, bool write) const {
        const WorkTile& work = item.work;
        const float sink = params.sink.data ? head_number<T>(params.sink, work.batch, work.head) * kLog2e : -INFINITY;
        const float largest = fmaxf(base, sink);
        float factor = 1.0f;
        if (largest != Softmax::kNothing) {  // else no score at all: the sum is 0, or NaN where there was nothing but NaN
            factor = exp2_approx(base - largest);
            sum = sum * factor + exp2_approx(sink - largest);
        }
        if (params.lse.data && write && row < params.q_lengths.capacity)
            params.lse.data[work.batch * params.lse.batch + work.head * params.lse.head + row * params.lse.row] =
                sum != 0.0f ? (largest + __log2f(sum)) * kLn2 : -INFINITY;
        // A NaN row stays one: the sum is NaN then, and so is its reciprocal.
        return sum != 0.0f ? __fdividef(factor, sum) : 0.0f;
    }

    // Row r of this thread, times `inverse`; 0 whatever the sums are if that is 0. Each of the four lanes of a row gets eight neighbouring channels of 32.
    __device__ __forceinline__ void write_row(const Consumer& c, const Item& item, int r, float inverse) const {
        T* out = row_of_out(item, row_of(c, item, r));
        const int lane = opaque(c.lane);
#pragma unroll
        for (int first = 0; first < kHeadDimV / 8; first += 4) {
            uint32_t words[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float left = c.o[4 * (first + k) + 2 * r], right = c.o[4 * (first + k) + 2 * r + 1];
                words[k] = inverse == 0.0f ? 0 : pack_pair(left * inverse, right * inverse, T());
            }
            transpose_quad(words, lane);
            write_eight(out, (first + lane % 4) * 8, make_uint4(words[0], words[1], words[2], words[3]));
        }
    }

    // nullptr: there is no such row.
    __device__ __forceinline__ T* row_of_out(const Item& item, int row) const {
        if (row >= params.q_lengths.capacity) return nullptr;
        return static_cast<T*>(params.out.data) + item.work.batch * params.out.batch + item.work.head * params.out.head +
               row * params.out.row;
    }

    __device__ __forceinline__ void write_eight(T* row, int col, const uint4& eight) const {
        if (!row || col >= params.head_dim_v) return;
        if (params.vector_out) {
            *reinterpret_cast<uint4*>(row + col) = eight;
        } else {
            const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (col + e < params.head_dim_v)
                    reinterpret_cast<uint16_t*>(row)[col + e] = static_cast<uint16_t>(words[e / 2] >> e % 2 * 16);
        }
    }

    __device__ __forceinline__ void run() {
        prepare();
        if (threadIdx.x < 128) {
            give_registers<kProducerRegisters>();
            if (threadIdx.x < 32) {
                produce();
            } else if (threadIdx.x < 64) {
                write_empty_items();
            }
        } else {
            take_registers<kConsumerRegisters>();
            consume();
        }
    }
};

template <class Row>
__global__ void __launch_bounds__(Forward<Row>::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params, const __grid_constant__ ForwardMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    constexpr uint32_t kAlignment = Forward<Row>::QTile::kAlignment;
    Forward<Row> body(params, maps, shared + (kAlignment - shared_address(shared) % kAlignment) % kAlignment);
    body.run();
}

// A tensor's rows as the copy engine is told of them. Without rows nothing is read, and any address will do.
inline TensorExtent extent(const RowsParams& rows, int64_t columns, int64_t count, int64_t heads, int64_t batch) {
    return {rows.data, columns, count, heads, batch, rows.row, rows.head, rows.batch};
}

template <class Row>
cudaError_t encode(ForwardMaps* maps, const ForwardParams& params) {
    using Body = Forward<Row>;
    using T = typename Body::T;
    const int64_t queries = params.q_lengths.capacity, keys = params.k_lengths.capacity,
                  kv_heads = params.heads_q / params.group_size;
    const TensorExtent q = extent(params.q, params.head_dim, queries, params.heads_q, params.batch);
    const TensorExtent k = keys > 0 ? extent(params.k, params.head_dim, keys, kv_heads, params.batch) : q;
    const TensorExtent v = keys > 0 ? extent(params.v, params.head_dim_v, keys, kv_heads, params.batch) : q;
    cudaError_t error = encode_map<T>(&maps->q, q, Body::kGroupRows);
    if (error == cudaSuccess) error = encode_map<T>(&maps->k, k, Body::kBlockN);
    if (error == cudaSuccess) error = encode_map<T>(&maps->v, v, Body::kBlockN);
    return error;
}

inline cudaError_t multiprocessors(int* count) {
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    return error == cudaSuccess ? cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device) : error;
}

}  // namespace libflash::cuda::sm90

namespace libflash::cuda {

// Enqueues the work on `stream` and returns what cudaGetLastError() then says.
template <class Row>
int launch_forward(const ForwardParams& params, void* stream) {
    using Body = sm90::Forward<Row>;
    const auto kernel = sm90::forward_kernel<Row>;
    sm90::ForwardMaps maps;
    int blocks = 0;
    cudaError_t error = sm90::encode<Row>(&maps, params);
    if (error == cudaSuccess) error = sm90::multiprocessors(&blocks);
    // Costs a fraction of a microsecond, and holds for the current device, whichever that is.
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Body::kSharedBytes);
    if (error != cudaSuccess) return error;
    const int64_t units = int64_t{params.schedule.heads} * params.schedule.tiles;
    if (units < blocks) blocks = static_cast<int>(units);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    kernel<<<static_cast<unsigned>(blocks), Body::kThreads, Body::kSharedBytes, cuda_stream>>>(params, maps);
    return cudaGetLastError();
}

}  // namespace libflash::cuda
