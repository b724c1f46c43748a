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
#include "cuda/tile/product.cuh"
#include "cuda/tile/swizzled_tile.cuh"
#include "cuda/tile/tensor_map.cuh"

#include <climits>
#include <type_traits>

namespace libflash::cuda::sm90 {

struct ForwardMaps {
    CUtensorMap q, k, v;
};

constexpr int kLargestShared = 232448;

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
    using OutTile = SwizzledTile<kGroupRows, kHeadDimV>;
    using Softmax = RowSoftmax<kBlockN>;
    static constexpr int kScores = kBlockN / 2, kSums = kHeadDimV / 2;

    // One tile of query rows.
    struct Item {
        WorkTile work;
        KeyRange<kBlockM, kBlockN> keys;
        int round;
        bool safe;  // the maximum of every tile
    };

    struct Common {
        RingBarriers<kStages> k, v;
        RingBarriers<1> q[kGroups];
        int redo_begin, redo_end;  // rounds that are to be done again
        Item items[kGroups * 4];   // of each warp: in registers it would push out accumulators
    };
    static constexpr int kRingBytes = kStages * (KTile::kBytes + VTile::kBytes);
    static constexpr int kFixedBytes =
        kGroups * QTile::kBytes + kRingBytes + static_cast<int>(sizeof(Common)) + SwizzledTile<8, 64>::kAlignment;
    // Where there is room, results leave through a place of their own, and the next Q arrives meanwhile; else through that of Q.
    static constexpr bool kOwnOut = kFixedBytes + kGroups * OutTile::kBytes <= kLargestShared;
    static constexpr int kSharedBytes = kFixedBytes + (kOwnOut ? kGroups * OutTile::kBytes : 0);
    static_assert(kSharedBytes <= kLargestShared, "a thread block has 227 KB of shared memory");
    static_assert(kOwnOut || OutTile::kBytes <= QTile::kBytes, "results leave through the place of Q");

    // Named barriers.
    static constexpr int kTurn = 1, kGroupBarrier = kTurn + kGroups, kAllDone = kGroupBarrier + kGroups;

    const ForwardParams& params;
    const ForwardMaps& maps;
    uint32_t q_smem, k_smem, v_smem, out_smem;
    Common& common;

    __device__ __forceinline__ Forward(const ForwardParams& p, const ForwardMaps& m, char* aligned)
        : params(p), maps(m),
          common(*reinterpret_cast<Common*>(aligned + kSharedBytes - SwizzledTile<8, 64>::kAlignment - sizeof(Common))) {
        q_smem = shared_address(aligned);
        k_smem = q_smem + kGroups * QTile::kBytes;
        v_smem = k_smem + kStages * KTile::kBytes;
        out_smem = kOwnOut ? v_smem + kStages * VTile::kBytes : q_smem;
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

    // Calls work(item) for all items of this thread block, and then once more for those that are to be done again.
    template <class Work>
    __device__ __forceinline__ void for_all_items(const Work& work) const {
        const int units = params.schedule.heads * params.schedule.tiles, blocks = gridDim.x;
        int begin = 0, end = (units + blocks - 1) / blocks * (params.schedule.paired ? 2 : 1);
        bool safe = false;
#pragma unroll 1
        while (true) {
#pragma unroll 1
            for (int round = begin; round < end; ++round) {
                Item item;
                item.work = work_of(round);
                if (item.work.batch < 0) continue;
                item.keys.init(params.mask, item.work.tile, params.q_lengths.capacity, params.k_lengths.capacity);
                item.round = round;
                item.safe = safe;
                work(item);
            }
            if (safe) return;
            named_barrier_wait(kAllDone, kGroups * 128 + 32);
            begin = *const_cast<volatile int*>(&common.redo_begin);
            end = *const_cast<volatile int*>(&common.redo_end);
            safe = true;
        }
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
        for_all_items([&](const Item& item) {
            const KeyRange<kBlockM, kBlockN>& keys = item.keys;
            if (keys.begin == keys.end) return;
            if (leader) {
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
                load_k(keys.end - 1);
                for (int group = 0; group < kGroups; ++group) load_q(group, q_phase, item);
#pragma unroll 1
                for (int tile = keys.end - 2; tile >= keys.begin; --tile) {
                    load_k(tile);
                    load_v(tile + 1);
                }
                load_v(keys.begin);
            }
            q_phase ^= 1;
            __syncwarp();
        });
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
        for_all_items([&](const Item& next) {
            Item& item = common.items[warp - 4];
            __syncwarp();
            if (c.lane == 0) item = next;
            __syncwarp();
            c.softmax.clear();
            if (item.keys.begin == item.keys.end) {
                finish_row(c, item, 0);
                finish_row(c, item, 1);
                write_rows(c, item, [](int, int) { return make_uint4(0, 0, 0, 0); });
                return;
            }
            walk_keys(c, item);
            if (c.softmax.finish() && !item.safe && c.lane == 0) {
                atomicMin(&common.redo_begin, item.round);
                atomicMax(&common.redo_end, item.round + 1);
            }
            normalize(c, item);
            store_out(c, item);
        });
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
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step)
            Wgmma<T, kBlockN>::template multiply_shared<false>(c.s, QTile::along_columns(q, step), KTile::along_columns(k, step),
                                                               step > 0);
        wgmma_commit();
    }

    // o += P V, begun; the first time o = P V.
    __device__ __forceinline__ void start_values(Consumer& c, bool first) const {
        const uint32_t v = v_smem + c.v.stage * VTile::kBytes;
#pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step)
            Wgmma<T, kHeadDimV>::template multiply<true>(c.o, c.p[step], VTile::down_rows(v, step), step > 0 || !first);
        wgmma_commit();
    }

    __device__ __forceinline__ void walk_keys(Consumer& c, const Item& item) const {
        const float scale = item.safe ? 1.0f : params.scale_log2;
        float factor[2];
        int tile = item.keys.end - 1;
        c.q.wait_full();
        c.k.wait_full();
        wgmma_settle(c.s);
        wgmma_fence();
        take_turn(c);
        start_scores(c);
        pass_turn(c);
        wgmma_wait<0>();
        wgmma_settle(c.s);
        release(c, c.k.empty());
        c.k.advance();
        prepare_scores(c, item, tile);
        c.softmax.apply(c.s, scale, true, factor);
        round_probabilities(c);
        bool first = true;
#pragma unroll 1
        for (--tile; tile >= item.keys.begin; --tile) {
            c.k.wait_full();
            wgmma_settle(c.s);
            wgmma_fence();
            take_turn(c);
            start_scores(c);
            c.v.wait_full();
            wgmma_fence();
            start_values(c, first);
            pass_turn(c);
            wgmma_wait<1>();
            wgmma_settle(c.s);
            release(c, c.k.empty());
            c.k.advance();
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
        if (kOwnOut) release(c, c.q.empty());
        c.v.wait_full();
        wgmma_fence();
        start_values(c, first);
        wgmma_wait<0>();
        wgmma_settle(c.o);
        release(c, c.v.empty());
        c.v.advance();
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
    __device__ __forceinline__ float finish_row(const Consumer& c, const Item& item, int r) const {
        const WorkTile& work = item.work;
        const float sink = params.sink.data ? head_number<T>(params.sink, work.batch, work.head) * kLog2e : -INFINITY;
        const float base = c.softmax.base[r], largest = fmaxf(base, sink);
        float total = c.softmax.sum[r], factor = 1.0f;  // no score at all: 0, or NaN where there was nothing but NaN
        if (largest != Softmax::kNothing) {
            factor = exp2_approx(base - largest);
            total = total * factor + exp2_approx(sink - largest);
        }
        const int row = row_of(c, item, r);
        if (params.lse.data && c.lane % 4 == 0 && row < params.q_lengths.capacity)
            params.lse.data[work.batch * params.lse.batch + work.head * params.lse.head + row * params.lse.row] =
                total != 0.0f ? (largest + __log2f(total)) * kLn2 : -INFINITY;
        // A NaN row stays one: total is NaN then, and so is its reciprocal.
        return total != 0.0f ? factor / total : 0.0f;
    }

    __device__ __forceinline__ void normalize(Consumer& c, const Item& item) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float inverse = finish_row(c, item, r);
#pragma unroll
            for (int i = 2 * r; i < kSums; i += 4) {
                c.o[i] = inverse == 0.0f ? 0.0f : c.o[i] * inverse;
                c.o[i + 1] = inverse == 0.0f ? 0.0f : c.o[i + 1] * inverse;
            }
        }
    }

    // Each warp its 16 rows, through shared memory so that the stores are whole rows.
    __device__ __forceinline__ void store_out(Consumer& c, const Item& item) const {
        if (!kOwnOut) named_barrier_wait(kGroupBarrier + c.group, 128);  // nobody reads Q any more
        const uint32_t tile = out_smem + c.group * OutTile::kBytes;
        const int lane = opaque(c.lane);
        __syncwarp();
#pragma unroll
        for (int step = 0; step < kHeadDimV / 16; ++step) {
            uint32_t f[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) f[i] = pack_pair(c.o[8 * step + 2 * i], c.o[8 * step + 2 * i + 1], T());
            OutTile::store_fragment(tile, c.warp * 16, 2 * step, lane, f);
        }
        __syncwarp();
        write_rows(c, item, [&](int row, int piece) { return load_shared_16(tile + OutTile::offset(row, piece)); });
        if (!kOwnOut) {
            fence_shared_for_async();
            __syncwarp();
            release(c, c.q.empty());
        }
        c.q.advance();
    }

    // Eight values at a time: values(row of the group, piece).
    template <class Values>
    __device__ __forceinline__ void write_rows(const Consumer& c, const Item& item, const Values& values) const {
        constexpr int kPieces = kHeadDimV / 8;
        T* out = static_cast<T*>(params.out.data) + item.work.batch * params.out.batch + item.work.head * params.out.head;
        const int first_row = item.keys.first_row + c.group * kGroupRows;
#pragma unroll 4
        for (int i = opaque(c.lane); i < 16 * kPieces; i += 32) {
            const int row = c.warp * 16 + i / kPieces, piece = i % kPieces;
            if (first_row + row >= params.q_lengths.capacity || piece * 8 >= params.head_dim_v) continue;
            const uint4 eight = values(row, piece);
            T* target = out + (first_row + row) * params.out.row + piece * 8;
            if (params.vector_out) {
                *reinterpret_cast<uint4*>(target) = eight;
            } else {
                const T* single = reinterpret_cast<const T*>(&eight);
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (piece * 8 + e < params.head_dim_v) target[e] = single[e];
            }
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
    constexpr uint32_t kAlignment = SwizzledTile<8, 64>::kAlignment;
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
