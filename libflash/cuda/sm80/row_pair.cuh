// Forward with two warps for the same 32 query rows: each computes half of the keys of a tile in Q K^T and half of the channels
// in P V. So each fragment of K or V is used in two products, although one warp has too few registers for 32 rows of all
// channels. With more than 256 channels it has too few even for 16 rows; then two warps share 16 rows.
//
// The two warps exchange P through shared memory. They also exchange maxima and sums, so that both have the same kept maximum of
// a row. The barrier at the beginning of a tile tells all warps whether a sum of the previous tile exceeded its limit.
//
// P V begins with the warp's own keys: the products of the first 16 keys overlap the exponentials of the next 16. The other
// warp's P comes last.
#pragma once

#include "cuda/attention/online_softmax.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/sm80/forward_epilogue.cuh"
#include "cuda/sm80/forward_products.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/shared_tile.cuh"

#include <type_traits>

namespace libflash::cuda::sm80 {

template <class Body>
struct RowPair {
    using T = typename Body::Element;
    using QTile = typename Body::QTile;
    using KvTile = typename Body::KvTile;
    static constexpr int kSlabs = Body::kSlabs, kChannelBlocks = Body::kChannelBlocks, kRows = Body::kTileRows;
    static constexpr int kPairs = kChannelBlocks / 2;    // pairs of channel blocks
    static constexpr int kSteps = Body::kKeyBlocks / 2;  // steps of 16 keys per warp
    using PTile = SharedTile<kSlabs * 16, Body::kTileKeys>;
    using Fragments = uint32_t[kSteps][kSlabs][4];
    // Between two uses of the same array there is always another barrier of the thread block.
    struct Words {
        float largest[2][kRows], sum[2][kRows];  // [warp of the pair][row]
    };

    static constexpr int kPBytes = kRows / (kSlabs * 16) * PTile::kBytes;
    static constexpr int kStaticBytes = static_cast<int>(sizeof(Words)) + kPBytes;

    Body& body;
    const int part;
    __device__ __forceinline__ explicit RowPair(Body& b) : body(b), part(b.part()) {}

    // Static shared memory, because only some architectures need it: the host sets the size of the dynamic part and does not know
    // for which architecture the code that runs was compiled.
    __device__ static __forceinline__ Words& words() {
        __shared__ Words shared;
        return shared;
    }
    // Space for one number per row, for use after the last tile.
    using RowNumbers = float[kRows];
    __device__ static __forceinline__ RowNumbers& row_numbers() { return words().largest[0]; }
    __device__ __forceinline__ uint32_t p_smem() const {
        __shared__ __align__(128) char shared[kPBytes];
        return shared_address(shared) + body.warp / 2 * PTile::kBytes;
    }

    template <class Do>
    __device__ static __forceinline__ void for_rows(const Do& for_row) {
#pragma unroll
        for (int i = 0; i < kSlabs * 2; ++i) for_row(i / 2, i % 2);
    }

    // x = combine(x, x of the other warp), exchanged through the array `of`. Contains a barrier of the thread block. x must be
    // the same in the four lanes of a row.
    template <class Combine>
    __device__ __forceinline__ void exchange(float (&of)[2][kRows], float (&x)[kSlabs][2], const Combine& combine) {
        const int row = body.warp_row() + body.lane / 4;
        for_rows([&](int a, int r) {
            if (body.lane % 4 == 0) of[part][row + a * 16 + r * 8] = x[a][r];
        });
        __syncthreads();
        for_rows([&](int a, int r) { x[a][r] = combine(x[a][r], of[1 - part][row + a * 16 + r * 8]); });
    }
    __device__ __forceinline__ void take_larger(float (&of)[2][kRows], float (&x)[kSlabs][2]) {
        exchange(of, x, [](float mine, float others) { return fmaxf(mine, others); });
    }

    // update_max() and rescale_large_sums() are those of OnlineSoftmax, for a pair of warps. `first`: the sums are still zero.
    __device__ __forceinline__ void update_max(bool first) {
        float largest[kSlabs][2];
        for_rows([&](int a, int r) { largest[a][r] = body.row_largest(a, r); });
        take_larger(words().largest, largest);
        for_rows([&](int a, int r) {
            if (first) {
                body.kept_maximum[a][r] = fmaxf(kNoScore, largest[a][r] * body.scale);
            } else {
                body.raise_kept_maximum(a, r, largest[a][r]);
            }
        });
    }
    __device__ __forceinline__ void rescale_large_sums() {
        float sum[kSlabs][2];
        for_rows([&](int a, int r) { sum[a][r] = body.row_largest_sum(a, r); });
        take_larger(words().sum, sum);
        for_rows([&](int a, int r) { body.rescale_large_sum(a, r, sum[a][r]); });
    }
    __device__ __forceinline__ void combine_statistics() {
        take_larger(words().largest, body.largest_score);
        exchange(words().sum, body.weighted, [](float mine, float others) { return mine + others; });
    }
    __device__ __forceinline__ void add_sums() {
        exchange(words().sum, body.row_sum, [](float mine, float others) { return mine + others; });
    }

    // Rounds the probabilities of 16 of the warp's keys and stores them in shared memory for the other warp.
    __device__ __forceinline__ void store_own_p(int step, Fragments& own) {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a) {
            to_fragment<T>(own[step][a], body.s[a][2 * step], body.s[a][2 * step + 1]);
            PTile::store_fragment(p_smem(), a * 16, part * Body::kKeyBlocks + 2 * step, body.lane, own[step][a]);
        }
    }
    // Waits for the other warp and loads its probabilities.
    __device__ __forceinline__ void load_other_p(Fragments& others) {
        named_barrier_wait(1 + body.warp / 2, 64);
        const auto address = PTile::template skip_columns<kSteps>(PTile::a_address(p_smem(), 0, hide_from_compiler(body.lane)),
                                                                  (1 - part) * kSteps);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int a = 0; a < kSlabs; ++a) ldmatrix_x4(others[step][a], address.at(a * 16, step));
    }

    // o += P V for the warp's channels. Calls between(t) before product number t (16 keys, 16 channels).
    template <class Between>
    __device__ __forceinline__ void multiply_pv(const Fragments& own, const Fragments& others, const Between& between) {
        constexpr int kOwn = kSteps * kPairs, kKeyBytes = Body::kKeyBlocks * 8 * KvTile::kRowBytes;
        auto v_address = KvTile::template skip_columns<kPairs>(
            KvTile::b_trans_address(body.v_smem(), hide_from_compiler(body.lane)), part * kPairs);
        const uint32_t own_base = v_address.base + part * kKeyBytes, others_base = v_address.base + (1 - part) * kKeyBytes;
        uint32_t vf[2][4];
        const auto load = [&](int t) {
            v_address.base = t < kOwn ? own_base : others_base;
            ldmatrix_x4_trans(vf[t % 2], v_address.at(t / kPairs % kSteps * 16, t % kPairs));
        };
        load(0);
#pragma unroll
        for (int t = 0; t < 2 * kOwn; ++t) {
            if (t + 1 < 2 * kOwn) load(t + 1);
            between(t);
            const int step = t / kPairs % kSteps, pair = t % kPairs;
#pragma unroll
            for (int a = 0; a < kSlabs; ++a) {
                const uint32_t (&p)[4] = t < kOwn ? own[step][a] : others[step][a];
                mma_m16n8k16(body.o[a][2 * pair], p, vf[t % 2][0], vf[t % 2][1], T());
                mma_m16n8k16(body.o[a][2 * pair + 1], p, vf[t % 2][2], vf[t % 2][3], T());
            }
        }
    }

    // Converts the scores of a tile to probabilities and adds P V to o. Loads K of tile `next` as soon as no warp reads K of this
    // tile any more.
    __device__ __forceinline__ void add_values(int tile, int next) {
        // With rare options all exponentials come first: registers do not suffice to interleave them with the products.
        constexpr int kBefore = Body::kRare ? kSteps : 1;
        Fragments own, others;
#pragma unroll
        for (int step = 0; step < kBefore; ++step) {
            body.template exponentiate<1>(2 * step, 0);
            if constexpr (Body::kRare) {
                if (body.params.rare.dropout.active) body.drop(2 * step, tile);
            }
            store_own_p(step, own);
        }
        cp_async_wait<0>();
        __syncthreads();  // V has arrived; no warp reads K
        body.load_k(body.common(), next);
        multiply_pv(own, others, [&](int t) {
            const int step = t / kPairs, pair = t % kPairs;
            if (step + 1 >= kBefore && step + 1 < kSteps) body.template exponentiate<kPairs>(2 * step + 2, pair);
            if (pair == 0 && step >= kBefore && step < kSteps) store_own_p(step, own);
            if (step == kSteps - 1 && pair == kPairs / 2) load_other_p(others);
        });
    }

    __device__ __forceinline__ void loop_over_keys(bool exact_maximum) {
        body.clear();
        body.begin_long_sums();
        body.scale = Body::kRare || exact_maximum ? 1.0f : body.params.scale_log2;
        int cursor = body.common().tiles.list_count;
        int tile = body.common().tiles.previous(body.common().tiles.end, cursor);
        bool first = true, past_limit = false;
#pragma unroll 1
        while (tile >= 0) {
            const int next = body.common().tiles.previous(tile, cursor);
            cp_async_wait<0>();
            if (__syncthreads_or(past_limit)) rescale_large_sums();  // K has arrived; no warp reads V of the previous tile
            body.load_v(body.common(), tile);
            bool need_max = body.common().tiles.is_edge(tile);
            ForwardProducts<Body>{body}.multiply_qk();
            if constexpr (Body::kRare) {
                body.apply_rules(tile);
            } else if (exact_maximum) {
                body.for_all_scores(tile, [&](float& score, int, int) { score *= body.params.scale_log2; });
            }
            if (need_max) body.mask_edge(tile);
            need_max |= exact_maximum || first;
            if (std::is_same<T, __half>::value && __syncthreads_or(body.any_too_large())) need_max = true;
            if (need_max) update_max(first);
            add_values(tile, next);
            past_limit = body.sums_past_limit();
            body.take_long_sums(tile, next);
            first = false;
            tile = next;
        }
        cp_async_wait<0>();
        body.add_long_sums();
    }

    // Stages O in the pair's rows of the Q tile in shared memory. Each warp writes and reads only its own channels.
    __device__ __forceinline__ void store_out() {
        float factor[kSlabs][2];
        ForwardEpilogue<Body> epilogue{body};
        epilogue.normalize([&](int a, int r, float inverse) {
            factor[a][r] = inverse;
            if (inverse == 0.0f || epilogue.stores_shard()) epilogue.scale_out(a, r, inverse);
        });
        if (epilogue.stores_shard()) return epilogue.store_shard();
        [[maybe_unused]] const auto address = QTile::template skip_columns<kPairs>(
            QTile::a_address(body.q_smem(), body.warp_row(), hide_from_compiler(body.lane)), part * kPairs);
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
                const auto& o = body.o[a];
                uint32_t f[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* x = o[2 * pair + i / 2] + i % 2 * 2;
                    f[i] = pack_pair(x[0] * factor[a][i % 2], x[1] * factor[a][i % 2], T());
                }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
                stmatrix_x4(address.at(a * 16, pair), f);
#else
                QTile::store_fragment(body.q_smem(), body.warp_row() + a * 16, part * kChannelBlocks + 2 * pair, body.lane, f);
#endif
            }
        __syncwarp();
        store_rows();
    }
    __device__ __forceinline__ void store_rows() {
        const auto work = body.common().work;
        const auto q_rows = body.common().q_rows;
        const auto& out = body.params.out;
        constexpr int kRowsAtOnce = 32 / kChannelBlocks;
        const int row = body.warp_row() + body.lane / kChannelBlocks, chunk = part * kChannelBlocks + body.lane % kChannelBlocks;
        const int sequence_row = work.tile * kRows + row, rows_left = q_rows.owned - sequence_row;
        const int cols_left = body.params.head_dim_v - chunk * 8;
        T* target = Body::template start<T>(out, work.batch, q_rows.start, work.head) + sequence_row * out.row + chunk * 8;
        const auto source = [&](int i) { return body.shared + QTile::offset(row + i, chunk); };
        if (cols_left <= 0) return;
        if (body.params.vector_out) {
#pragma unroll
            for (int i = 0; i < kSlabs * 16; i += kRowsAtOnce, target += kRowsAtOnce * out.row)
                if (i < rows_left) *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source(i));
        } else {
#pragma unroll 1
            for (int i = 0; i < kSlabs * 16 && i < rows_left; i += kRowsAtOnce, target += kRowsAtOnce * out.row)
                for (int c = 0; c < min(8, cols_left); ++c) target[c] = reinterpret_cast<const T*>(source(i))[c];
        }
    }
};

}  // namespace libflash::cuda::sm80
