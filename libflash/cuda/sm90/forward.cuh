// FlashAttention-3 forward for sm_90a (Shah and others, arXiv 2407.08608). A thread block stays and does one tile of query rows after the other. One
// warp asks the copy engine for tiles of Q, K and V; warpgroups of 64 query rows each multiply and exponentiate. In a warpgroup the product Q K^T of a
// tile and P V of the one before run under the exponentials; the warpgroups take turns at issuing products, so that one exponentiates
// under the products of another. P goes from registers to registers.
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
    // Wide heads fill the tensor cores without it.
    static constexpr bool kTurns = kHeadDim <= 128;

    using QTile = SwizzledTile<kGroupRows, kHeadDim>;
    using KTile = SwizzledTile<kBlockN, kHeadDim>;
    using VTile = SwizzledTile<kBlockN, kHeadDimV>;
    using Softmax = RowSoftmax<kBlockN>;
    static constexpr int kScores = kBlockN / 2, kSums = kHeadDimV / 2;

    // One tile of query rows.
    struct Item {
        WorkTile work;
        KeyRange<kBlockM, kBlockN> keys;
        int round;
        bool safe;  // the maximum of every tile
    };

    // Where a role stands in the work of this thread block: all of it, and then what is to be done again.
    struct Rounds {
        int next, end;
        bool safe;
    };
    // What a warp that multiplies keeps in shared memory, because in registers it would push out accumulators.
    struct WarpWords {
        Rounds rounds;
        Item items[2];  // this one and the next
    };
    struct Common {
        RingBarriers<kStages> k, v;
        RingBarriers<1> q[kGroups];
        int redo_begin, redo_end;  // rounds that are to be done again
        WarpWords warps[kGroups * 4];
    };
    static constexpr int kTileBytes = kGroups * QTile::kBytes + kStages * (KTile::kBytes + VTile::kBytes);
    static constexpr int kSharedBytes = kTileBytes + static_cast<int>(sizeof(Common)) + QTile::kAlignment;
    static_assert(kSharedBytes <= 232448, "a thread block has 227 KB of shared memory");

    // Named barriers.
    static constexpr int kTurn = 1, kAllDone = kTurn + kGroups;

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

    // One warp. Keys go from the last tile to the first; V of a tile comes after K of the next.
    __device__ __forceinline__ void produce() {
        const bool leader = elect_one();
        Ring<kStages> k(common.k), v(common.v);
        uint32_t q_phase = 0;
        Rounds rounds = first_rounds();
        Item item;
        do {
            while (next_item(rounds, item)) {
                if (item.keys.begin == item.keys.end) continue;
                if (leader) load_item(k, v, q_phase, item);
                q_phase ^= 1;
            }
            __syncwarp();
        } while (start_again(rounds));
    }

    __device__ __forceinline__ void load_item(Ring<kStages>& k, Ring<kStages>& v, uint32_t q_phase, const Item& item) const {
        const int kv_head = item.work.head / params.group_size;
        const auto load_k = [&](int tile) {
            k.wait_empty();
            k.full().arrive_and_expect(KTile::kBytes);
            KTile::load(k_smem + k.stage * KTile::kBytes, maps.k, k.full(), tile * kBlockN, kv_head, item.work.batch);
            k.advance();
        };
        const auto load_v = [&](int tile) {
            v.wait_empty();
            v.full().arrive_and_expect(VTile::kBytes);
            VTile::load(v_smem + v.stage * VTile::kBytes, maps.v, v.full(), tile * kBlockN, kv_head, item.work.batch);
            v.advance();
        };
        load_k(item.keys.end - 1);
        for (int group = 0; group < kGroups; ++group) load_q(group, q_phase, item);
#pragma unroll 1
        for (int tile = item.keys.end - 2; tile >= item.keys.begin; --tile) {
            load_k(tile);
            load_v(tile + 1);
        }
        load_v(item.keys.begin);
    }

    __device__ __forceinline__ void load_q(int group, uint32_t phase, const Item& item) const {
        Ring<1> q(common.q[group]);
        q.phase = phase;
        q.wait_empty();
        q.full().arrive_and_expect(QTile::kBytes);
        QTile::load(q_smem + group * QTile::kBytes, maps.q, q.full(), item.keys.first_row + group * kGroupRows, item.work.head,
                    item.work.batch);
    }

    // What a warpgroup that multiplies has at hand.
    struct Consumer {
        int group, warp, lane;  // `warp` of the group
        Ring<kStages> k, v;
        Ring<1> q;
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
                   Ring<1>(common.q[group])};
        if (kTurns && group == kGroups - 1) named_barrier_arrive(kTurn, 256);  // the first turn is that of group 0
        WarpWords& words = common.warps[warp - 4];
        put(c, words.rounds, first_rounds());
        int slot = 0;
        do {
            if (!next_with_keys(c, words, slot)) continue;
            take_turn(c);
            start_first_scores(c);
            pass_turn(c);
            wgmma_wait<0>();
            wgmma_settle(c.s);
            while (true) {
                const Item& item = words.items[slot];
                walk_keys(c, item);
                const bool single = item.keys.end - item.keys.begin == 1;
                const bool more = next_with_keys(c, words, slot ^= 1);
                c.v.wait_full();
                take_turn(c);
                if (!more) {
                    start_values(c, single);
                    pass_turn(c);
                    wgmma_wait<0>();
                    finish(c, item);
                    break;
                }
                // The last product, and the first scores of the next item, which go on under what is left to do of this one.
                start_values(c, single);
                start_first_scores(c);
                pass_turn(c);
                wgmma_wait<1>();
                finish(c, item);
                wgmma_wait<0>();
                wgmma_settle(c.s);
            }
        } while (again(c, words));
    }

    // A lane writes for the warp.
    template <class Value>
    __device__ __forceinline__ void put(const Consumer& c, Value& place, const Value& value) const {
        __syncwarp();
        if (c.lane == 0) place = value;
        __syncwarp();
    }

    // Puts the next item that has keys into a slot; rows without keys are done at once.
    __device__ __forceinline__ bool next_with_keys(const Consumer& c, WarpWords& words, int slot) const {
        Rounds rounds = words.rounds;
        Item next;
        bool found = false;
        while (!found && next_item(rounds, next)) {
            put(c, words.items[slot], next);
            found = next.keys.begin != next.keys.end;
            if (!found) write_nothing(c, words.items[slot]);
        }
        put(c, words.rounds, rounds);
        return found;
    }

    __device__ __forceinline__ bool again(const Consumer& c, WarpWords& words) const {
        Rounds rounds = words.rounds;
        const bool more = start_again(rounds);
        put(c, words.rounds, rounds);
        return more;
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
            const float inverse = finish_row(c, item, r, c.softmax.base[r], c.softmax.sum[r]);
            write_row(c, item, r, inverse);
        }
    }

    __device__ __forceinline__ void release(const Consumer& c, const MBarrier& empty) const {
        if (c.lane == 0) empty.arrive();
    }
    __device__ __forceinline__ void take_turn(const Consumer& c) const {
        if (kTurns) named_barrier_wait(kTurn + c.group, 256);
    }
    __device__ __forceinline__ void pass_turn(const Consumer& c) const {
        if (kTurns) named_barrier_arrive(kTurn + (c.group + 1 == kGroups ? 0 : c.group + 1), 256);
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
        c.q.wait_full();
        c.k.wait_full();
        start_scores(c);
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

    // From the first scores, which are there, to the last probabilities.
    __device__ __forceinline__ void walk_keys(Consumer& c, const Item& item) const {
        const float scale = item.safe ? 1.0f : params.scale_log2;
        float factor[2];
        int tile = item.keys.end - 1;
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
            take_turn(c);
            start_scores(c);
            c.v.wait_full();
            start_values(c, first);
            pass_turn(c);
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
    __device__ __forceinline__ float finish_row(const Consumer& c, const Item& item, int r, float base, float sum) const {
        const WorkTile& work = item.work;
        const float sink = params.sink.data ? head_number<T>(params.sink, work.batch, work.head) * kLog2e : -INFINITY;
        const float largest = fmaxf(base, sink);
        float factor = 1.0f;
        if (largest != Softmax::kNothing) {  // else no score at all: the sum is 0, or NaN where there was nothing but NaN
            factor = exp2_approx(base - largest);
            sum = sum * factor + exp2_approx(sink - largest);
        }
        const int row = row_of(c, item, r);
        if (params.lse.data && c.lane % 4 == 0 && row < params.q_lengths.capacity)
            params.lse.data[work.batch * params.lse.batch + work.head * params.lse.head + row * params.lse.row] =
                sum != 0.0f ? (largest + __log2f(sum)) * kLn2 : -INFINITY;
        // A NaN row stays one: the sum is NaN then, and so is its reciprocal.
        return sum != 0.0f ? factor / sum : 0.0f;
    }

    // Row r of this thread, times `inverse`; 0 whatever the sums are if that is 0. Each of the four lanes of a row gets eight neighbouring channels of 32.
    __device__ __forceinline__ void write_row(const Consumer& c, const Item& item, int r, float inverse) const {
        T* out = row_of_out(c, item, r);
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

    __device__ __forceinline__ void write_nothing(const Consumer& c, const Item& item) const {
        for (int r = 0; r < 2; ++r) {
            finish_row(c, item, r, Softmax::kNothing, 0.0f);
            for (int col = c.lane % 4 * 8; col < kHeadDimV; col += 32)
                write_eight(row_of_out(c, item, r), col, make_uint4(0, 0, 0, 0));
        }
    }

    // nullptr: there is no such row.
    __device__ __forceinline__ T* row_of_out(const Consumer& c, const Item& item, int r) const {
        const int row = row_of(c, item, r);
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
            if (threadIdx.x < 32) produce();
        } else {
            take_registers<kConsumerRegisters>();
            consume();
        }
    }
};

template <class Row>
__global__ void __launch_bounds__(Forward<Row>::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params, const __grid_constant__ ForwardMaps maps) {
    extern __shared__ char shared[];
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
    kernel<<<static_cast<unsigned>(blocks), Body::kThreads, Body::kSharedBytes, static_cast<cudaStream_t>(stream)>>>(params,
                                                                                                                     maps);
    return cudaGetLastError();
}

}  // namespace libflash::cuda
