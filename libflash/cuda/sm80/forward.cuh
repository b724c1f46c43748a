// FlashAttention-2 forward for sm_80 and later (Dao, arXiv 2307.08691): one thread block computes one tile of query rows of one
// head. Each warp computes its own query rows against all keys; warps share only the tiles of K and V. (With 256 channels two
// warps may share rows: row_pair.cuh.) Q stays in shared memory. All threads load with cp.async: V of a tile during its Q K^T, K
// of the next tile during the softmax and P V. online_softmax.cuh describes the softmax.
#pragma once

#include "cuda/attention/dropout.cuh"
#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/element.cuh"
#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/params.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm80/forward_instance.h"
#include "cuda/sm80/online_softmax.cuh"
#include "cuda/sm80/row_pair.cuh"
#include "cuda/tile/accumulator.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "cuda/tile/split_product.cuh"
#include "cuda/tile/store_floats.cuh"

#include <type_traits>

namespace libflash::cuda::sm80 {

// kSharers: warps that share query rows. With two, each has half of the keys and half of the channels (row_pair.cuh).
// kGeneral: supports softcap, ALiBi, bias, mask, dropout, scales that are not positive, and rows of any alignment.
template <class T, int kHeadDim, int kBlockM, int kBlockN, int kWarps, int kSharers, bool kGeneral>
struct Forward : OnlineSoftmax<kBlockM * kSharers / kWarps / 16, kBlockN / kSharers / 8, kHeadDim / kSharers / 8> {
    using Softmax = OnlineSoftmax<kBlockM * kSharers / kWarps / 16, kBlockN / kSharers / 8, kHeadDim / kSharers / 8>;
    using Softmax::any_too_large, Softmax::clear, Softmax::move_base, Softmax::sums_past_limit, Softmax::update_max;
    using Softmax::base, Softmax::o, Softmax::row_sum, Softmax::s, Softmax::scale;
    using Element = T;
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kSlabs = kBlockM * kSharers / kWarps / 16;  // 16-row slabs of a warp
    static constexpr int kKeyBlocks = kBlockN / kSharers / 8;        // blocks of 8 keys in a warp's scores
    static constexpr int kChannelBlocks = kHeadDim / kSharers / 8;   // blocks of 8 channels in a warp's O
    static constexpr int kTileRows = kBlockM, kTileKeys = kBlockN;
    static constexpr bool kRare = kGeneral;
    using Pair = RowPair<Forward>;
    static constexpr bool kHalf = std::is_same<T, __half>::value;

    static constexpr bool kFloat = std::is_same<T, float>::value;
    using QTile = SharedTile<kBlockM, kHeadDim, sizeof(T)>;
    using KvTile = SharedTile<kBlockN, kHeadDim, sizeof(T)>;
    // The same for all threads; in shared memory, because registers are short.
    struct Common {
        TileCoordinates work;
        SequenceRows q_rows, k_rows;
        KeyTiles<kBlockM, kBlockN> tiles;
        ScoreRules<T> rules;
        const T *q, *k, *v;
    };
    static constexpr int kTileBytes = QTile::kBytes + 2 * KvTile::kBytes;
    static constexpr int kSharedBytes = kTileBytes + (sizeof(Common) + 15) / 16 * 16;

    const ForwardParams& params;
    char* shared;
    int thread, warp, lane;
    typename QTile::LaneAddress q_address;
    __device__ __forceinline__ Forward(const ForwardParams& p, char* shared_memory) : params(p), shared(shared_memory) {
        thread = threadIdx.x;
        warp = thread / 32;
        lane = thread % 32;
    }

    __device__ __forceinline__ Common& common() const { return *reinterpret_cast<Common*>(shared + kTileBytes); }
    // This warp's number among the warps that share rows, and the warp's first row in the tile.
    __device__ __forceinline__ int part() const { return warp % kSharers; }
    __device__ __forceinline__ int warp_row() const { return warp / kSharers * kSlabs * 16; }
    __device__ __forceinline__ uint32_t q_smem() const { return shared_address(shared); }
    __device__ __forceinline__ uint32_t k_smem() const { return shared_address(shared) + QTile::kBytes; }
    __device__ __forceinline__ uint32_t v_smem() const { return shared_address(shared) + QTile::kBytes + KvTile::kBytes; }
    // Row in the sequence of accumulator element e of slab a of this lane. Its column is first_column() + 8 * block + e % 2.
    __device__ __forceinline__ int row_of(int a, int e) const {
        if constexpr (kFloat)
            return common().tiles.first_row + (hide_from_compiler(warp) * kSlabs + a) * 16 + (e >> 1) * 8 + lane / 4;
        return common().tiles.first_row + (warp / kSharers * kSlabs + a) * 16 + (e >> 1) * 8 + lane / 4;
    }
    __device__ __forceinline__ int first_column(int tile) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
        // float32: no register is free to keep the lane's offset from tile to tile. On sm_100 and later recomputing it causes
        // spills.
        if constexpr (kFloat) return tile * kBlockN + hide_from_compiler(lane) % 4 * 2;
#endif
        return tile * kBlockN + part() * kKeyBlocks * 8 + lane % 4 * 2;
    }

    // False: the thread block has no work. Otherwise ends with a barrier.
    __device__ __forceinline__ bool prepare() {
        const TileCoordinates work = tile_coordinates<kBlockM>(params.schedule, params.q_lengths, params.batch);
        if (work.batch < 0) return false;
        const SequenceRows q_rows = SequenceRows::of(params.q_lengths, work.batch);
        if (work.tile * kBlockM >= q_rows.owned) return false;
        // Every thread computes it, so that the first loads do not wait for thread 0, which stores it.
        Common c;
        c.work = work;
        c.q_rows = q_rows;
        c.k_rows = SequenceRows::of(params.k_lengths, work.batch);
        c.tiles.init(params.mask, params.block_mask, work, q_rows, c.k_rows);
        if constexpr (kGeneral) c.rules.init(params.rare, work.batch, work.head, q_rows.length, c.k_rows.length);
        const int kv_head = work.head / params.group_size;
        c.q = start<const T>(params.q, work.batch, q_rows.start, work.head);
        c.k = start<const T>(params.k, work.batch, c.k_rows.start, kv_head);
        c.v = start<const T>(params.v, work.batch, c.k_rows.start, kv_head);
        load_first(c);
        if (thread == 0) common() = c;
        q_address = QTile::a_address(q_smem(), warp_row(), lane);
        __syncthreads();
        return true;
    }

    template <class Element>
    __device__ static __forceinline__ Element* start(const RowsParams& rows, int batch, int row, int head) {
        return static_cast<Element*>(rows.data) + batch * rows.batch + row * rows.row + head * rows.head;
    }

    template <class Tile>
    __device__ __forceinline__ void load(int shared_offset, const T* rows, int64_t stride, int first_row, int row_limit,
                                         int col_limit) {
        // float32: no registers are free to keep addresses from tile to tile.
        const int me = kFloat ? hide_from_compiler(thread) : thread;
        if (kGeneral && !params.vector_loads) {
            Tile::template load_slow<kThreads>(shared + shared_offset, rows, stride, first_row, row_limit, col_limit, me);
        } else {
            Tile::template load_async<kThreads>(q_smem() + shared_offset, rows, stride, first_row, row_limit, col_limit, me);
        }
    }
    __device__ __forceinline__ void load_k(const Common& c, int tile) {
        if (tile >= 0) load<KvTile>(QTile::kBytes, c.k, params.k.row, tile * kBlockN, c.tiles.length_k, params.head_dim);
        cp_async_commit();
    }
    __device__ __forceinline__ void load_v(const Common& c, int tile) {
        load<KvTile>(QTile::kBytes + KvTile::kBytes, c.v, params.v.row, tile * kBlockN, c.tiles.length_k, params.head_dim_v);
        cp_async_commit();
    }
    // Q and the first tile of K.
    __device__ __forceinline__ void load_first(const Common& c) {
        load<QTile>(0, c.q, params.q.row, c.tiles.first_row, c.q_rows.length, params.head_dim);
        int cursor = c.tiles.list_count;
        load_k(c, c.tiles.previous(c.tiles.end, cursor));
    }

    // s = Q K^T. The fragments of the next 16 keys are loaded before the products with the current ones.
    __device__ __forceinline__ void multiply_qk() {
        const auto k_address =
            KvTile::b_address(k_smem() + part() * kKeyBlocks * 8 * KvTile::kRowBytes, hide_from_compiler(lane));
        constexpr int kPairs = kKeyBlocks / 2, kSteps = kHeadDim / 16;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[a][n][e] = 0.0f;
        // Fragments of Q are also loaded one step early if registers allow.
        constexpr int kAhead = kSlabs * kKeyBlocks * 4 < 128 ? 2 : 1;
        uint32_t qf[kAhead][kSlabs][4], kf[2][4];
#pragma unroll
        for (int a = 0; a < kSlabs; ++a) ldmatrix_x4(qf[0][a], q_address.at(a * 16, 0));
        ldmatrix_x4(kf[0], k_address.at(0, 0));
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
                const int t = step * kPairs + pair, next = t + 1;
                if (next < kPairs * kSteps) ldmatrix_x4(kf[next % 2], k_address.at(next % kPairs * 16, next / kPairs));
                if (pair == kPairs - 1 && kAhead == 1) continue;
                if (kAhead == 2 && pair == 0 && step + 1 < kSteps) load_q_fragments(qf[(step + 1) % kAhead], step + 1);
                multiply_pair(pair, qf[step % kAhead], kf[t % 2]);
            }
            if constexpr (kAhead == 1) {
                multiply_pair(kPairs - 1, qf[0], kf[(step * kPairs + kPairs - 1) % 2]);
                if (step + 1 < kSteps) load_q_fragments(qf[0], step + 1);
            }
        }
    }

    __device__ __forceinline__ void load_q_fragments(uint32_t (&qf)[kSlabs][4], int step) {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a) ldmatrix_x4(qf[a], q_address.at(a * 16, step));
    }

    __device__ __forceinline__ void multiply_pair(int pair, const uint32_t (&qf)[kSlabs][4], const uint32_t (&kf)[4]) {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a) {
            mma_m16n8k16(s[a][2 * pair], qf[a], kf[0], kf[1], T());
            mma_m16n8k16(s[a][2 * pair + 1], qf[a], kf[2], kf[3], T());
        }
    }

    // s = Q K^T for float32.
    __device__ __forceinline__ void multiply_qk_split() {
        const int me = hide_from_compiler(lane);
        const auto q_rows = QTile::a_address(q_smem(), warp * kSlabs * 16, me);
        const auto k_address = KvTile::b_address(k_smem(), me);
        split_product<kSlabs == 1, kHeadDim / 8>(
            s, params.head_dim,
            [&](int step, uint32_t (&f)[kSlabs][4]) {
#pragma unroll
                for (int a = 0; a < kSlabs; ++a) ldmatrix_x4(f[a], q_rows.at(a * 16, step));
            },
            [&](int step, int pair, uint32_t (&f)[4]) { ldmatrix_x4(f, k_address.at(pair * 16, step)); });
    }

    // o += P V for float32, at most 32 keys at a time.
    __device__ __forceinline__ void multiply_pv_split(int tile) {
        const auto v_rows = KvTile::row_pair(v_smem(), hide_from_compiler(lane));
        constexpr int kSteps = kKeyBlocks < 4 ? kKeyBlocks : 4;
#pragma unroll
        for (int first = 0; first < kKeyBlocks; first += kSteps) {
            SplitRows<kSlabs> p[kSteps];
#pragma unroll
            for (int n = 0; n < kSteps; n += 2) {
                Softmax::template exponentiate<1>(first + n, 0);
                if constexpr (kGeneral) {
                    if (params.rare.dropout.active) drop(first + n, tile);
                }
            }
#pragma unroll
            for (int n = 0; n < kSteps; ++n)
#pragma unroll
                for (int a = 0; a < kSlabs; ++a) p[n].split_columns(a, s[a][first + n]);
            add_split_product<kSlabs == 1>(o, p, params.head_dim_v, [&](int step, int block, uint32_t (&f)[2]) {
                v_rows.load((first + step) * 8, block, f[0], f[1]);
            });
        }
    }

    // o += P V. s holds scores. Each 16 columns become probabilities just before their product or, if registers allow (kEarly),
    // during the product of the previous 16.
    __device__ __forceinline__ void multiply_pv(int tile) {
        const auto v_address = KvTile::b_trans_address(v_smem(), hide_from_compiler(lane));
        constexpr int kPairs = kHeadDim / 16, kSteps = kBlockN / 16;
        uint32_t vf[2][4];
        ldmatrix_x4_trans(vf[0], v_address.at(0, 0));
        constexpr bool kEarly = kSlabs == 1 && !kGeneral;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (!kEarly || step == 0) Softmax::template exponentiate<1>(2 * step, 0);
            uint32_t pf[kSlabs][4];
            if constexpr (kGeneral) {
                if (params.rare.dropout.active) drop(2 * step, tile);
            }
#pragma unroll
            for (int a = 0; a < kSlabs; ++a) to_fragment<T>(pf[a], s[a][2 * step], s[a][2 * step + 1]);
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
                const int t = step * kPairs + pair;
                if (t + 1 < kPairs * kSteps)
                    ldmatrix_x4_trans(vf[(t + 1) % 2], v_address.at((t + 1) / kPairs * 16, (t + 1) % kPairs));
                if (kEarly && step + 1 < kSteps) Softmax::template exponentiate<kPairs>(2 * step + 2, pair);
#pragma unroll
                for (int a = 0; a < kSlabs; ++a) {
                    mma_m16n8k16(o[a][2 * pair], pf[a], vf[t % 2][0], vf[t % 2][1], T());
                    mma_m16n8k16(o[a][2 * pair + 1], pf[a], vf[t % 2][2], vf[t % 2][3], T());
                }
            }
        }
    }

    // Calls for_row(row, for_scores) for each query row of this lane.
    template <class ForRow>
    __device__ __forceinline__ void for_score_rows(const ForRow& for_row) {
        for_accumulator_rows(s, [&](int a, int r, const auto& for_scores) { for_row(row_of(a, 2 * r), for_scores); });
    }

    // Applies the causal mask, the window and the length.
    __device__ __forceinline__ void mask_edge(int tile) {
        cuda::mask_edge(common().tiles, first_column(tile), [&](const auto& for_row) { for_score_rows(for_row); });
    }

    // Calls rule(score, row, col) for all scores of this lane.
    template <class Rule>
    __device__ __forceinline__ void for_all_scores(int tile, const Rule& rule) {
        const int first_col = first_column(tile);
        for_score_rows([&](int row, const auto& for_scores) {
            for_scores([&](float& score, int col) { rule(score, row, first_col + col); });
        });
    }

    // From dot products to scores in base-2 units.
    __device__ __forceinline__ void apply_rules(int tile) {
        const int rows = common().q_rows.length, cols = common().tiles.length_k;
        const auto for_all = [&](const auto& rule) { for_all_scores(tile, rule); };
        const auto for_each = [&](const auto& rule) {
            for_all_scores(tile, [&](float& score, int row, int col) {
                if (row < rows && col < cols) rule(score, row, col);
            });
        };
        scale_and_cap(params.rare, params.softmax_scale, for_all);
        add_and_hide<T>(params.rare, common().rules, for_all, for_each);
    }

    // Main loop over the key tiles. `exact_maximum`: the maximum is updated for every tile.
    __device__ __forceinline__ void loop_over_keys(bool exact_maximum) {
        clear();
        scale = kGeneral || exact_maximum ? 1.0f : params.scale_log2;
        int cursor = common().tiles.list_count;
        int tile = common().tiles.previous(common().tiles.end, cursor);
        bool first = true;
#pragma unroll 1
        while (tile >= 0) {
            const int next = common().tiles.previous(tile, cursor);
            cp_async_wait<0>();
            __syncthreads();  // K has arrived; no warp reads V of the previous tile
            load_v(common(), tile);
            const bool edge = common().tiles.is_edge(tile);
            if constexpr (kFloat) {
                multiply_qk_split();
            } else {
                multiply_qk();
            }
            if constexpr (kGeneral) {
                apply_rules(tile);
            } else if (exact_maximum) {
                for_all_scores(tile, [&](float& score, int, int) { score *= params.scale_log2; });
            }
            if (edge) mask_edge(tile);
            if (exact_maximum || first || edge || (kHalf && any_too_large())) update_max();
            cp_async_wait<0>();
            __syncthreads();  // V has arrived; no warp reads K
            load_k(common(), next);
            if constexpr (kFloat) {
                multiply_pv_split(tile);
            } else {
                multiply_pv(tile);
            }
            if (sums_past_limit()) move_base();
            first = false;
            tile = next;
        }
        cp_async_wait<0>();
    }

    // Applies dropout to two adjacent 8-column blocks.
    __device__ __forceinline__ void drop(int block, int tile) {
        const uint32_t batch_head = dropout_head(common().work.batch, params.heads_q, common().work.head);
        const uint32_t keep =
            keep_bits<kSlabs * 2>(params.rare.dropout, batch_head, tile * kBlockN + (part() * kKeyBlocks + block) * 8, lane,
                                  [&](int i) { return row_of(i / 2, i % 2 * 2); });
        zero_dropped<kSlabs * 2>(keep, [&](int i, int n, int e) -> float& { return s[i / 2][block + n][i % 2 * 2 + e]; });
    }

    // Adds the partial row sums of all lanes of a row. True if any row of the thread block overflowed or its base is beyond
    // kBaseLimit.
    __device__ __forceinline__ bool finish_sums() {
        bool bad = false;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                row_sum[a][r] = quad_sum(row_sum[a][r]);
                if constexpr (kSharers == 1)
                    bad |= row_sum[a][r] == INFINITY || (fabsf(base[a][r]) > kBaseLimit && base[a][r] != kNoScore);
            }
        if constexpr (kSharers == 2) {
            Pair(*this).add_sums();
            Pair::for_rows([&](int a, int r) {
                bad |= row_sum[a][r] == INFINITY || (fabsf(base[a][r]) > kBaseLimit && base[a][r] != kNoScore);
            });
        }
        return __syncthreads_or(bad || Softmax::values_overflowed());
    }

    // Calls scale_by(a, r, factor) with the factor that normalizes each row of o, sink included. Writes LSE.
    template <class Scale>
    __device__ __forceinline__ void normalize(const Scale& scale_by) {
        const TileCoordinates work = common().work;
        const SequenceRows q_rows = common().q_rows;
        const float sink = params.sink.data ? head_number<T>(params.sink, work.batch, work.head) * kLog2e : -INFINITY;
        float* lse = params.lse.data ? params.lse.data + work.batch * params.lse.batch + work.head * params.lse.head : nullptr;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = row_of(a, 2 * r);
                const bool exists = row < q_rows.length;
                const float largest = fmaxf(base[a][r], sink);
                float total = row_sum[a][r], factor = 1.0f;  // without any score: 0, or NaN if all scores were NaN
                if (largest != kNoScore) {
                    factor = exp2_approx(base[a][r] - largest);
                    total = row_sum[a][r] * factor + exp2_approx(sink - largest);
                }
                // NaN in total propagates: the comparison with 0 is true and the quotient is NaN.
                float inverse = exists && total != 0.0f ? factor / total : 0.0f;
                if constexpr (kGeneral) inverse *= params.rare.dropout.keep_factor;
                if (lse && part() == 0 && lane % 4 == 0 && row < q_rows.owned)
                    lse[(q_rows.start + row) * params.lse.row] =
                        exists && total != 0.0f ? (largest + __log2f(total)) * kLn2 : -INFINITY;
                scale_by(a, r, inverse);
            }
    }
    // A factor of 0 means a row that sees no key or a row past the end. The latter may hold NaN, so it is not multiplied.
    __device__ __forceinline__ void scale_out(int a, int r, float factor) {
#pragma unroll
        for (int n = 0; n < kChannelBlocks; ++n) {
            o[a][n][2 * r] = factor == 0.0f ? 0.0f : o[a][n][2 * r] * factor;
            o[a][n][2 * r + 1] = factor == 0.0f ? 0.0f : o[a][n][2 * r + 1] * factor;
        }
    }

    // Stages the warp's rows of O in shared memory, in its own rows of the Q tile, so that the global stores are contiguous.
    __device__ __forceinline__ void store_out() {
        const TileCoordinates work = common().work;
        const SequenceRows q_rows = common().q_rows;
        T* out = start<T>(params.out, work.batch, q_rows.start, work.head);
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int n = 0; n < kChannelBlocks; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = (warp * kSlabs + a) * 16 + r * 8 + lane / 4;
                    *reinterpret_cast<uint32_t*>(shared + QTile::offset(row, n) + lane % 4 * 4) =
                        pack_pair(o[a][n][2 * r], o[a][n][2 * r + 1], T());
                }
        __syncwarp();
        constexpr int kChunks = kHeadDim / 8;
        for (int i = lane; i < kSlabs * 16 * kChunks; i += 32) {
            const int row = warp * kSlabs * 16 + i / kChunks, chunk = i % kChunks;
            const int sequence_row = work.tile * kBlockM + row;
            if (sequence_row >= q_rows.owned || chunk * 8 >= params.head_dim_v) continue;
            const char* source = shared + QTile::offset(row, chunk);
            T* target = out + sequence_row * params.out.row + chunk * 8;
            if (params.vector_out) {
                *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
            } else {
                for (int c = 0; c < min(8, params.head_dim_v - chunk * 8); ++c) target[c] = reinterpret_cast<const T*>(source)[c];
            }
        }
    }

    __device__ __forceinline__ void store_out_floats() {
        const SequenceRows q_rows = common().q_rows;
        float* out = start<float>(params.out, common().work.batch, q_rows.start, common().work.head);
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = row_of(a, 2 * r);
                const int col = lane % 4 * 2;
                if (row >= q_rows.owned) continue;
                store_floats<kChannelBlocks>(out + row * params.out.row + col, params.head_dim_v - col, params.vector_out,
                                             [&](int n, int e) { return o[a][n][2 * r + e]; });
            }
    }

    __device__ __forceinline__ void run() {
        if (!prepare()) return;
        // One loop, not two calls: a second inlined copy of the main loop costs registers.
        bool exact_maximum = false;
#pragma unroll 1
        while (true) {
            if constexpr (kSharers == 2) {
                Pair(*this).loop_over_keys(exact_maximum);
            } else {
                loop_over_keys(exact_maximum);
            }
            const bool overflow = finish_sums();
            if (exact_maximum || !overflow) break;
            exact_maximum = true;
            load_first(common());
        }
        if constexpr (kSharers == 2) {
            Pair(*this).store_out();
        } else {
            normalize([&](int a, int r, float factor) { scale_out(a, r, factor); });
            if constexpr (kFloat) {
                store_out_floats();
            } else {
                store_out();
            }
        }
    }
};

template <class Kernel, bool kGeneral>
struct Instance {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    // With 32 rows per warp each fragment of K or V is used in two products. Registers do not suffice for wide heads, nor for
    // float32 with rare options; these use 16 rows.
    static constexpr bool kFewRows = config.head_dim > 128 || (config.dtype == KernelType::f32_ && kGeneral);
    static constexpr int kWarps = config.tile_q / (kFewRows ? 16 : 32);
    // If shared memory has space for P, two warps share 32 rows instead.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100
    static constexpr int kSharers = config.head_dim == 256 && config.dtype != KernelType::f32_ ? 2 : 1;
#else
    static constexpr int kSharers = 1;
#endif
    static constexpr int kMinBlocks = kWarps <= 4 ? 2 : 1;
#if defined(__CUDA_ARCH__)
    static constexpr int kVersion = __CUDA_ARCH__ / 10;
#else
    static constexpr int kVersion = 90;  // host compilation: the largest tiles, so the largest shared memory
#endif
    template <int kTileK>
    using Tiled = Forward<T, config.head_dim, config.tile_q, kTileK, kWarps, kSharers, kGeneral>;
    using Body = Tiled<forward_tile_k_sm80(config, kGeneral, kVersion)>;
};

template <class Kernel, bool kGeneral>
__global__ void __launch_bounds__(Instance<Kernel, kGeneral>::Body::kThreads, Instance<Kernel, kGeneral>::kMinBlocks)
    forward_kernel(const __grid_constant__ ForwardParams params) {
    extern __shared__ __align__(128) char shared[];
    typename Instance<Kernel, kGeneral>::Body body(params, shared);
    body.run();
}

template <class Kernel, bool kGeneral>
int launch(const LaunchShape& shape, const ForwardParams& params, cudaStream_t stream) {
    const auto kernel = forward_kernel<Kernel, kGeneral>;
    // Set at every launch, because the attribute belongs to the current device.
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, stream>>>(params);
    return cudaGetLastError();
}

template <class Kernel, bool kGeneral>
constexpr KernelResources forward_resources() {
    using Body = typename Instance<Kernel, kGeneral>::Body;
    return {Body::kThreads, Body::kSharedBytes};
}

}  // namespace libflash::cuda::sm80

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_forward(int, int instance) {
    return instance == kGeneralInstance.number ? sm80::forward_resources<Kernel, true>()
                                               : sm80::forward_resources<Kernel, false>();
}

// Enqueues the work on `stream` and returns the CUDA error.
template <class Kernel>
int launch_forward(const ForwardPlan& plan, const ForwardParams& params, void* stream) {
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    return plan.instance.number == kGeneralInstance.number ? sm80::launch<Kernel, true>(plan.attention, params, cuda_stream)
                                                           : sm80::launch<Kernel, false>(plan.attention, params, cuda_stream);
}

}  // namespace libflash::cuda
