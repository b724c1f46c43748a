// The tangent of forward from saved out and LSE for sm_80 and later. As in forward.cuh, a thread block computes one tile of query
// rows of one head, each warp its own rows against all keys. Probabilities follow from the LSE, so there is neither a maximum nor
// rescaling, and one accumulator suffices:
//
//   p = exp(s - lse)      tout += P (ts - pivot) V + P tV      sum += rowsum(p (ts - pivot))
//
// s: score, ts: its tangent, R: dropout (left out above). A constant may be subtracted from all ts of a row, because the last
// step (forward_tangent_rows.cuh) corrects for it with out. The pivot, the mean of ts over the first tile that the row sees,
// keeps P (ts - pivot) small, so that rounding it to 16 bits loses little.
//
// With more than 256 channels (float32: 128) four warps share their rows: each multiplies a quarter of the channels of Q and K,
// the parts of the scores are added through shared memory, and each computes a quarter of the channels of tout. K, tK, V and tV
// are loaded one after the other into the same tile, so that the kernel fits every GPU (forward_tangent_in_turn.cuh).
#pragma once

#include "cuda/attention/dropout.cuh"
#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/element.cuh"
#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/score_tangents.cuh"
#include "cuda/attention/softmax_statistics.cuh"
#include "cuda/attention/tangent_params.h"
#include "cuda/params.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm80/forward_tangent_in_turn.cuh"
#include "cuda/sm80/forward_tangent_rows.cuh"
#include "cuda/sm80/forward_tangent_tiles.h"
#include "cuda/sm80/tangent_products.cuh"
#include "cuda/tile/accumulator.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/quad.cuh"
#include "cuda/tile/shared_tile.cuh"

#include <type_traits>

namespace libflash::cuda::sm80 {

// kGeneral: supports softcap, ALiBi, bias, mask, dropout, scales that are not positive, and rows of any alignment.
template <class T, int kHeadDim, int kBlockM, int kBlockN, int kWarps, bool kGeneral>
struct ForwardTangent {
    using Element = T;
    static constexpr int kThreads = kWarps * 32;
    static constexpr bool kInTurn = loads_in_turn(kHeadDim, sizeof(T));
    static constexpr int kParts = tangent_parts(kHeadDim, sizeof(T)), kSlabs = kBlockM / (kWarps / kParts) / 16;
    using Products = TangentProducts<T, kHeadDim, kBlockM, kBlockN, kSlabs>;
    static constexpr int kKeyBlocks = Products::kBlocks, kChannelBlocks = Products::kChannelBlocks, kPartDim = Products::kPartDim;
    static constexpr bool kHalf = std::is_same<T, __half>::value;
    using QTile = typename Products::RowTile;
    using KvTile = typename Products::ColTile;
    using Scores = typename Products::Scores;
    // Values that are the same for all threads. They are in shared memory because registers are scarce.
    struct Common {
        TileCoordinates work;
        SequenceRows q_rows, k_rows;
        KeyTiles<kBlockM, kBlockN> tiles;
        ScoreRules<T> rules;
        BiasTangent bias_tangent;
    };
    static_assert(sizeof(Common) <= kForwardTangentCommonBytes, "the host and the kernel must agree");

    // Shared memory: Q, tQ, K, tK, V, tV (with kInTurn one tile for the last four), the LSE of the rows in base-2 units, Common.
    static constexpr int kTangentQAt = QTile::kBytes, kKeysAt = 2 * QTile::kBytes, kTangentKeysAt = kKeysAt + KvTile::kBytes;
    static constexpr int kValuesAt = kKeysAt + 2 * KvTile::kBytes, kTangentValuesAt = kValuesAt + KvTile::kBytes;
    static constexpr int kLseAt = kKeysAt + (kInTurn ? 1 : 4) * KvTile::kBytes, kCommonAt = kLseAt + kBlockM * 4;
    static constexpr int kSharedBytes = kCommonAt + kForwardTangentCommonBytes;
    // `half` has few numbers near 0. So P and P (ts - pivot) of a row are multiplied by a power of two (half_scale). It begins as
    // kHalfScale and is lowered where P (ts - pivot) would exceed kHalfLimit.
    static constexpr float kHalfScale = 16384.0f, kHalfLimit = 32768.0f;

    const ForwardTangentParams& params;
    char* shared;
    int thread, warp, lane;
    Scores s, ts;
    typename Products::Sums tout;
    float pivot[kSlabs][2], sum[kSlabs][2];
    float half_scale[kSlabs][2];  // only with kHalf
    uint32_t unstarted;           // bit 2 * a + r: the row has no pivot yet

    __device__ __forceinline__ ForwardTangent(const ForwardTangentParams& p, char* shared_memory)
        : params(p), shared(shared_memory) {
        thread = threadIdx.x;
        warp = thread / 32;
        lane = thread % 32;
    }

    __device__ __forceinline__ uint32_t smem() const { return shared_address(shared); }
    __device__ __forceinline__ Common& common() const { return *reinterpret_cast<Common*>(shared + kCommonAt); }
    __device__ __forceinline__ Products products() const { return {smem(), warp, lane}; }
    __device__ __forceinline__ int warp_row() const { return products().warp_row(); }
    __device__ __forceinline__ int part() const { return products().part(); }
    // Row in the sequence of accumulator element e of slab a of this lane.
    __device__ __forceinline__ int row_of(int a, int e) const {
        return common().tiles.first_row + warp_row() + a * 16 + (e >> 1) * 8 + lane / 4;
    }
    // LSE in base-2 units of row 8 * r of slab a of this lane; +infinity: the row does not exist or sees no key.
    __device__ __forceinline__ float lse_of(int a, int r) const {
        return reinterpret_cast<const float*>(shared + kLseAt)[warp_row() + a * 16 + r * 8 + lane / 4];
    }
    __device__ __forceinline__ float factor_of(int a, int r) const {
        const float factor = kGeneral ? params.rare.dropout.keep_factor : 1.0f;
        return kHalf ? factor / half_scale[a][r] : factor;
    }

    // Returns false if the thread block has no work. Otherwise starts to load Q and tQ, after a barrier.
    __device__ __forceinline__ bool prepare() {
        const TileCoordinates work = tile_coordinates<kBlockM>(params.schedule, params.q_lengths, params.batch);
        if (work.batch < 0) return false;
        const SequenceRows q_rows = SequenceRows::of(params.q_lengths, work.batch);
        if (work.tile * kBlockM >= q_rows.owned) return false;
        if (thread == 0) {
            Common& c = common();
            c.work = work;
            c.q_rows = q_rows;
            c.k_rows = SequenceRows::of(params.k_lengths, work.batch);
            c.tiles.init(params.mask, params.block_mask, work, q_rows, c.k_rows);
            if constexpr (kGeneral) {
                c.rules.init(params.rare, work.batch, work.head, c.k_rows.length - q_rows.length);
                c.bias_tangent.template init<T>(params.tbias, work.batch, work.head);
            }
        }
        load_lse(work, q_rows);
        __syncthreads();
        load<QTile>(0, params.q, common().q_rows, work.head, common().tiles.first_row, params.head_dim);
        load<QTile>(kTangentQAt, params.tq, common().q_rows, work.head, common().tiles.first_row, params.head_dim);
        return true;
    }

    __device__ __forceinline__ void load_lse(const TileCoordinates& work, const SequenceRows& q_rows) {
        const float* lse = params.lse.data + work.batch * params.lse.batch + work.head * params.lse.head;
        for (int i = thread; i < kBlockM; i += kThreads) {
            const int row = work.tile * kBlockM + i;
            const float x = row < q_rows.length ? lse[(q_rows.start + row) * params.lse.row] : -INFINITY;
            reinterpret_cast<float*>(shared + kLseAt)[i] = x == -INFINITY ? INFINITY : lse_with_margin(x * kLog2e);
        }
    }

    // Loads a tile unless the tensor is absent.
    template <class Tile>
    __device__ __forceinline__ void load(int offset, const RowsParams& rows, const SequenceRows& sequence, int head, int first,
                                         int channels) {
        if (!rows.data) return;
        const int me = hide_from_compiler(thread);
        const T* matrix = static_cast<const T*>(rows.data) + common().work.batch * rows.batch + sequence.start * rows.row +
                          int64_t{head} * rows.head;
        if (kGeneral && !params.vector_loads) {
            Tile::template load_slow<kThreads>(shared + offset, matrix, rows.row, first, sequence.length, channels, me);
        } else {
            Tile::template load_async<kThreads>(smem() + offset, matrix, rows.row, first, sequence.length, channels, me);
        }
    }
    __device__ __forceinline__ void load_keys(int tile) {
        if (tile < 0) return;
        const int head = common().work.head / params.group_size;
        load<KvTile>(kKeysAt, params.k, common().k_rows, head, tile * kBlockN, params.head_dim);
        load<KvTile>(kTangentKeysAt, params.tk, common().k_rows, head, tile * kBlockN, params.head_dim);
        cp_async_commit();
    }
    __device__ __forceinline__ void load_values(int tile) {
        const int head = common().work.head / params.group_size;
        load<KvTile>(kValuesAt, params.v, common().k_rows, head, tile * kBlockN, params.head_dim_v);
        load<KvTile>(kTangentValuesAt, params.tv, common().k_rows, head, tile * kBlockN, params.head_dim_v);
        cp_async_commit();
    }

    // c += A B^T over the warp's channels. A: the warp's rows of the tile at rows_at. B: the tile at keys_at.
    __device__ __forceinline__ void add_scores(Scores& c, int rows_at, int keys_at) const {
        products().add_scores(c, rows_at, keys_at, params.head_dim);
    }
    // tout += X V for x = s or ts, and the tile V at values_at.
    __device__ __forceinline__ void add_values(const Scores& x, int values_at) {
        products().add_values(tout, x, values_at, params.head_dim_v);
    }
    // s = Q K^T, ts = tQ K^T + Q tK^T.
    __device__ __forceinline__ void multiply_scores() {
        clear(s);
        clear(ts);
        add_scores(s, 0, kKeysAt);
        if (params.tq.data) add_scores(ts, kTangentQAt, kKeysAt);
        if (params.tk.data) add_scores(ts, 0, kTangentKeysAt);
    }

    template <class Rule>
    __device__ static __forceinline__ void for_elements(const Rule& rule) {
#pragma unroll
        for (int i = 0; i < kSlabs * kKeyBlocks * 4; ++i) rule(i / (kKeyBlocks * 4), i / 4 % kKeyBlocks, i % 4);
    }
    // Calls rule(s, ts, row, col) for all elements of this lane.
    template <class Rule>
    __device__ __forceinline__ void for_pairs(int tile, const Rule& rule) {
        const int first_col = tile * kBlockN + lane % 4 * 2;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = row_of(a, 2 * r);
#pragma unroll
                for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; ++e) rule(s[a][n][e], ts[a][n][e], row, first_col + n * 8 + e % 2);
            }
    }

    // Converts dot products to scores (in base-2 units if kGeneral, else not yet scaled) and to tangents of scores. Hidden scores
    // become -infinity and their tangents 0.
    __device__ __forceinline__ void apply_rules(int tile) {
        const bool edge = common().tiles.is_edge(tile);
        if constexpr (kGeneral) {
            apply_rules_to_both<T>(params.rare, common().rules, params.tbias, common().bias_tangent, params.softmax_scale,
                                   common().q_rows.length, common().tiles.length_k,
                                   [&](const auto& rule) { for_pairs(tile, rule); });
        } else {
            for_elements([&](int a, int n, int e) { ts[a][n][e] *= params.softmax_scale; });
        }
        if (edge) {
            mask_edge_by_element(common().tiles, [&](const auto& rule) {
                for_pairs(tile, [&](float& score, float&, int row, int col) { rule(score, row, col); });
            });
        }
        if (kGeneral || edge) {
            for_elements([&](int a, int n, int e) {
                if (s[a][n][e] == -INFINITY) ts[a][n][e] = 0.0f;
            });
        }
    }

    // Sets the pivot of the rows that see their first keys in this tile: the mean of the tangents of their scores. Called before
    // exponentiate().
    __device__ __forceinline__ void choose_pivots() {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint32_t bit = 1u << (2 * a + r);
                float seen = 0.0f;
#pragma unroll
                for (int i = 0; i < kKeyBlocks * 2; ++i) seen += s[a][i / 2][2 * r + i % 2] == -INFINITY ? 0.0f : 1.0f;
                seen = quad_sum(seen);
                const float share = seen > 0.0f ? 1.0f / seen : 0.0f;
                float mean = 0.0f;
#pragma unroll
                for (int i = 0; i < kKeyBlocks * 2; ++i) mean = fmaf(ts[a][i / 2][2 * r + i % 2], share, mean);
                mean = quad_sum(mean);
                if (!(unstarted & bit) || seen == 0.0f) continue;
                pivot[a][r] = mean;
                unstarted &= ~bit;
            }
    }

    // s = p, ts = p (ts - pivot).
    __device__ __forceinline__ void exponentiate() {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float lse = lse_of(a, r);
#pragma unroll
                for (int i = 0; i < kKeyBlocks * 2; ++i) {
                    float &p = s[a][i / 2][2 * r + i % 2], &tp = ts[a][i / 2][2 * r + i % 2];
                    p = exp2_approx(kGeneral ? min_or_nan(p - lse, 0.0f) : fmaf(p, params.scale_log2, -lse));
                    tp = p * (tp - pivot[a][r]);
                    sum[a][r] += tp;
                }
            }
    }

    // Lowers half_scale of the rows whose P (ts - pivot) would be too large for `half`; then multiplies s and ts by half_scale.
    __device__ __forceinline__ void scale_for_half() {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float largest = 0.0f;
#pragma unroll
                for (int i = 0; i < kKeyBlocks * 2; ++i) largest = fmaxf(largest, fabsf(ts[a][i / 2][2 * r + i % 2]));
                largest = quad_max(largest) * half_scale[a][r];
                if (largest > kHalfLimit) {
                    const float factor = exp2_approx(-fminf(ceilf(__log2f(largest) - 13.0f), 126.0f));
                    half_scale[a][r] *= factor;
#pragma unroll
                    for (int n = 0; n < kChannelBlocks; ++n)
#pragma unroll
                        for (int e = 2 * r; e < 2 * r + 2; ++e) tout[a][n][e] *= factor;
                }
#pragma unroll
                for (int i = 0; i < kKeyBlocks * 2; ++i) {
                    s[a][i / 2][2 * r + i % 2] *= half_scale[a][r];
                    ts[a][i / 2][2 * r + i % 2] *= half_scale[a][r];
                }
            }
    }

    __device__ __forceinline__ void drop(int tile) {
        const DropoutParams& dropout = params.rare.dropout;
        const uint32_t batch_head = dropout_head(common().work.batch, params.heads_q, common().work.head);
#pragma unroll
        for (int block = 0; block < kKeyBlocks; block += 2) {
            const uint32_t keep = keep_bits<kSlabs * 2>(dropout, batch_head, tile * kBlockN + block * 8, lane,
                                                        [&](int i) { return row_of(i / 2, i % 2 * 2); });
            zero_dropped<kSlabs * 2>(keep, [&](int i, int n, int e) -> float& { return s[i / 2][block + n][i % 2 * 2 + e]; });
            zero_dropped<kSlabs * 2>(keep, [&](int i, int n, int e) -> float& { return ts[i / 2][block + n][i % 2 * 2 + e]; });
        }
    }

    // Converts the dot products of a tile to the left operands of the products with V and tV.
    __device__ __forceinline__ void make_weights(int tile) {
        apply_rules(tile);
        if (__any_sync(0xffffffffu, unstarted != 0)) choose_pivots();
        exponentiate();
        if (kGeneral && params.rare.dropout.active) drop(tile);
        if constexpr (kHalf) scale_for_half();
    }

    __device__ __forceinline__ void start() {
        clear(tout);
        unstarted = (1u << 2 * kSlabs) - 1;
#pragma unroll
        for (int i = 0; i < kSlabs * 2; ++i) {
            pivot[i / 2][i % 2] = sum[i / 2][i % 2] = 0.0f;
            half_scale[i / 2][i % 2] = kHalfScale;
        }
    }

    __device__ __forceinline__ void loop_over_keys() {
        int cursor = common().tiles.list_count;
        int tile = common().tiles.previous(common().tiles.end, cursor);
        load_keys(tile);
#pragma unroll 1
        while (tile >= 0) {
            const int next = common().tiles.previous(tile, cursor);
            cp_async_wait<0>();
            __syncthreads();  // K and tK have arrived; no warp reads V of the previous tile
            load_values(tile);
            multiply_scores();
            make_weights(tile);
            cp_async_wait<0>();
            __syncthreads();  // V and tV have arrived; no warp reads K
            load_keys(next);
            add_values(ts, kValuesAt);
            if (params.tv.data) add_values(s, kTangentValuesAt);
            tile = next;
        }
        // If there was no key tile, the copies of Q may still be in flight. The result is staged in the memory of Q.
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
    }

    __device__ __forceinline__ void run() {
        if (!prepare()) return;
        start();
        if constexpr (kInTurn) {
            ForwardTangentInTurn<ForwardTangent>{*this}.loop_over_keys();
        } else {
            loop_over_keys();
        }
        ForwardTangentRows<ForwardTangent> rows{*this};
        rows.finish();
        rows.store();
    }
};

template <class Kernel, bool kGeneral>
struct ForwardTangentInstance {
    static constexpr KernelConfig config = Kernel::config;
    static constexpr int kTileQ = forward_tangent_tile_q(config, kGeneral), kWarps = forward_tangent_warps(config);
    using Body = ForwardTangent<ElementOf<config.dtype>, config.head_dim, kTileQ, config.tile_k, kWarps, kGeneral>;
    static_assert(Body::kSharedBytes == forward_tangent_shared_bytes(config, kGeneral), "the host and the kernel must agree");
};

template <class Kernel, bool kGeneral>
__global__ void __launch_bounds__(ForwardTangentInstance<Kernel, kGeneral>::Body::kThreads, loads_in_turn(Kernel::config) ? 1 : 2)
    forward_tangent_kernel(const __grid_constant__ ForwardTangentParams params) {
    extern __shared__ __align__(128) char shared[];
    typename ForwardTangentInstance<Kernel, kGeneral>::Body body(params, shared);
    body.run();
}

// Calls do_with(general) with the template parameter of the instance as an integral constant. Kernels that load in turn have
// one instance.
template <class Kernel, class DoWith>
auto with_tangent_instance(int instance, const DoWith& do_with) {
    if constexpr (!loads_in_turn(Kernel::config)) {
        if (instance != kGeneralInstance.number) return do_with(std::false_type());
    }
    return do_with(std::true_type());
}

template <class Kernel, bool kGeneral>
int enqueue_forward_tangent(const LaunchShape& shape, const ForwardTangentParams& params, cudaStream_t stream) {
    const auto kernel = forward_tangent_kernel<Kernel, kGeneral>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, stream>>>(params);
    return cudaGetLastError();
}

}  // namespace libflash::cuda::sm80

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_forward_tangent(int, int instance) {
    return sm80::with_tangent_instance<Kernel>(instance, [](auto general) {
        using Body = typename sm80::ForwardTangentInstance<Kernel, decltype(general)::value>::Body;
        return KernelResources{Body::kThreads, Body::kSharedBytes};
    });
}

// Enqueues the work on `stream` and returns the CUDA error.
template <class Kernel>
int launch_forward_tangent(const ForwardTangentPlan& plan, const ForwardTangentParams& params, void* stream) {
    return sm80::with_tangent_instance<Kernel>(plan.instance.number, [&](auto general) {
        return sm80::enqueue_forward_tangent<Kernel, decltype(general)::value>(plan.attention, params,
                                                                               static_cast<cudaStream_t>(stream));
    });
}

}  // namespace libflash::cuda
