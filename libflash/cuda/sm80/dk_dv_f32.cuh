// dK and dV in float32: the algorithm of dk_dv.cuh with 3xTF32 products (split_product.cuh), one stage, 16 queries at a time.
// Without a split P^T and dS^T are left operands from registers. With a split they go through shared memory, which has space for
// only one of them at a time: dS^T stays in registers until all warps have read P^T.
#pragma once

#include "cuda/sm80/dk_dv.cuh"
#include "cuda/sm80/dq_accumulator_f32.cuh"
#include "cuda/tile/split_product.cuh"
#include "cuda/tile/store_floats.cuh"

namespace libflash::cuda::sm80 {

template <int kHeadDim, int kBlockM, int kBlockN, int kStages, bool kGeneral>
struct FloatDkDv : DkDv<float, kHeadDim, kBlockM, kBlockN, kStages, kGeneral> {
    using Base = DkDv<float, kHeadDim, kBlockM, kBlockN, kStages, kGeneral>;
    using Base::Base;
    using Base::kChannels, Base::kChunk, Base::kKeyWarps, Base::kQueries, Base::kSplit, Base::kWarps;
    using Base::params, Base::dk, Base::dv;
    using typename Base::Chunk, typename Base::KvTile, typename Base::Position, typename Base::QTile, typename Base::Scores,
        typename Base::ScoreTile;
    using Accumulator = FloatDqAccumulator<kHeadDim, kBlockM, kWarps>;
    using GradientColumns = ColumnPair<QTile, kChannels / 8>;
    static constexpr int kSteps = kChunk / 8;
    static_assert(kSplit == 1 || kQueries == kChunk, "dS of one chunk waits in registers");

    Scores delayed_ds;  // dS^T of this warp's queries until P^T has been read

    // Recomputed at every use, unlike in the base class, because registers are scarce.
    __device__ __forceinline__ static int thread() { return hide_from_compiler(static_cast<int>(threadIdx.x)); }
    __device__ __forceinline__ static int lane() { return thread() % 32; }
    __device__ __forceinline__ static int key_warp() { return thread() / 32 / kSplit; }
    __device__ __forceinline__ static int part() { return thread() / 32 % kSplit; }

    // c = A B^T over `channels`. A: the warp's 32 rows of the K or V tile. B: kChunk rows, from `first` on, of the Q or dO tile.
    __device__ __forceinline__ void score_product(Scores& c, uint32_t keys, uint32_t queries, int first, int channels) {
        const int at = lane();
        const auto a_address = KvTile::a_address(keys, key_warp() * 32, at);
        const auto b_address = QTile::b_address(queries + first * QTile::kRowBytes, at);
        split_product<false, kHeadDim / 8>(
            c, channels,
            [=](int step, uint32_t (&f)[2][4]) {
                ldmatrix_x4(f[0], a_address.at(0, step));
                ldmatrix_x4(f[1], a_address.at(16, step));
            },
            [=](int step, int pair, uint32_t (&f)[4]) { ldmatrix_x4(f, b_address.at(pair * 16, step)); });
    }

    // Computes P^T and dS^T of queries [first, first + kChunk) of the tile.
    __device__ __forceinline__ void make_scores(Scores& p, Scores& ds, const Position& at, int first, bool edge) {
        const Chunk rules(params, this->common().tiles, at.head, at.tile * kBlockM + first,
                          this->common().tiles.first_col + key_warp() * 32, this->statistics(0) + first, this->shard());
        if constexpr (kGeneral) {
            score_product(ds, this->v_smem(), this->dout_smem(0), first, params.head_dim_v);
            const uint32_t keep = rules.keep_bits();
            score_product(p, this->k_smem(), this->q_smem(0), first, params.head_dim);
            rules.apply_rules(p, ds, keep, edge);
        } else {
            score_product(p, this->k_smem(), this->q_smem(0), first, params.head_dim);
            if (edge) rules.mask_edge(p);
            rules.template exponentiate<1>(p, 0);
            score_product(ds, this->v_smem(), this->dout_smem(0), first, params.head_dim_v);
            rules.template differentiate<1>(ds, p, 0);
        }
    }

    __device__ __forceinline__ void store_scores(uint32_t tile, const Scores& x, int first) const {
        const int me = lane(), first_row = key_warp() * 32;
#pragma unroll
        for (int n = 0; n < kSteps; ++n)
#pragma unroll
            for (int a = 0; a < 2; ++a) ScoreTile::store_columns(tile, first_row + a * 16, first / 8 + n, me, x[a][n]);
    }

    using Gradient = float[2][kChannels / 8][4];

    // sum += x B. x: P^T or dS^T of the warp's 32 keys. B: rows [first, first + kChunk) of the Q or dO tile.
    __device__ __forceinline__ void add_from_registers(Gradient& sum, const Scores& x, uint32_t rows, int first, int channels) {
        SplitRows<2> f[kSteps];
#pragma unroll
        for (int n = 0; n < kSteps; ++n)
#pragma unroll
            for (int a = 0; a < 2; ++a) f[n].split_columns(a, x[a][n]);
        const auto pair = QTile::row_pair(rows + first * QTile::kRowBytes, lane());
        add_split_product<false>(sum, f, channels,
                                 [=](int step, int block, uint32_t (&b)[2]) { pair.load(step * 8, block, b[0], b[1]); });
    }

    // As add_from_registers(), but P^T or dS^T of all queries of the tile comes from a transposed score tile, and B has only this
    // warp's channels.
    __device__ __forceinline__ void add_from_shared(Gradient& sum, uint32_t scores, uint32_t rows, int channels) {
        constexpr int kTogether = 2;
        const int at = lane();
        const auto a_address = ScoreTile::a_address(scores, key_warp() * 32, at);
        const GradientColumns pair(QTile::row_pair(rows, at), part());
#pragma unroll 1
        for (int first = 0; first < kBlockM / 8; first += kTogether) {
            SplitRows<2> f[kTogether];
#pragma unroll
            for (int step = 0; step < kTogether; ++step) {
                uint32_t x[2][4];
                ldmatrix_x4(x[0], a_address.at(0, first + step));
                ldmatrix_x4(x[1], a_address.at(16, first + step));
                f[step].split(x);
            }
            add_split_product<false>(sum, f, channels - part() * kChannels, [=](int step, int block, uint32_t (&b)[2]) {
                pair.load((first + step) * 8, block, b[0], b[1]);
            });
        }
    }

    // With a split each warp has kChunk queries; with small tiles some warps have none.
    __device__ __forceinline__ bool has_queries() const { return part() * kQueries < kBlockM; }

    __device__ __forceinline__ void scores(const Position& at) {
        const bool edge = this->common().tiles.is_edge(at.tile);
        if constexpr (kSplit > 1) {
            if (!has_queries()) return;
            Scores p;
            make_scores(p, delayed_ds, at, part() * kQueries, edge);
            store_scores(this->ds_smem(0), p, part() * kQueries);
        } else {
#pragma unroll 1
            for (int first = 0; first < kBlockM; first += kChunk) {
                Scores p, ds;
                make_scores(p, ds, at, first, edge);
                add_from_registers(dv, p, this->dout_smem(0), first, params.head_dim_v);
                store_scores(this->ds_smem(0), ds, first);
                add_from_registers(dk, ds, this->q_smem(0), first, params.head_dim);
            }
        }
    }

    __device__ __forceinline__ void products(const Position& at) {
        const uint32_t shared_scores = this->ds_smem(0);
        if constexpr (kSplit > 1) {
            add_from_shared(dv, shared_scores, this->dout_smem(0), params.head_dim_v);
            __syncthreads();  // no warp reads P
            if (has_queries()) store_scores(shared_scores, delayed_ds, part() * kQueries);
            __syncthreads();  // dS is complete
            add_from_shared(dk, shared_scores, this->q_smem(0), params.head_dim);
        }
        if (params.dq_accumulator)
            Accumulator::template add_product<kBlockN>(this->sums_of(at), shared_scores, this->k_smem(), thread() / 32, lane(),
                                                       params.head_dim);
    }

    // One stage: the thread blocks of a multiprocessor hide each other's latency. Only one position is kept, because registers
    // are scarce.
    __device__ __forceinline__ void loop_over_queries() {
        static_assert(kStages == 1, "");
        clear(dk);
        clear(dv);
        Position at = this->first_position();
        this->load_keys();
#pragma unroll 1
        while (at.tile >= 0) {
            this->load_stage(0, at);
            cp_async_commit();
            cp_async_wait<0>();
            __syncthreads();  // the stage has arrived
            scores(at);
            __syncthreads();  // P or dS is complete
            products(at);
            __syncthreads();  // no warp reads the stage and the scores
            this->advance(at);
        }
        cp_async_commit();  // if there was no query tile, the copies of K and V are in no group yet
        cp_async_wait<0>();
    }

    __device__ __forceinline__ void store(const Gradient& sums, const RowsParams& rows, float factor, int channels) const {
        const auto& c = this->common();
        float* matrix = this->template start<float>(rows, c.k_rows.start, c.work.head);
        const int first_row = c.tiles.first_col + key_warp() * 32 + lane() / 4;
        const int first_channel = part() * kChannels + lane() % 4 * 2;
#pragma unroll
        for (int a = 0; a < 2; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = first_row + a * 16 + r * 8;
                if (kGeneral && params.adds) {
                    store_sums<kChannels / 8>(matrix + row * rows.row + first_channel,
                                              row < c.k_rows.length ? channels - first_channel : 0, params.vector_out, 1.0f,
                                              [&](int n, int e) { return sums[a][n][2 * r + e] * factor; });
                    continue;
                }
                if (row >= c.k_rows.owned) continue;
                store_floats<kChannels / 8>(matrix + row * rows.row + first_channel, channels - first_channel, params.vector_out,
                                            [&](int n, int e) { return sums[a][n][2 * r + e] * factor; });
            }
    }

    __device__ __forceinline__ void run() {
        if (!this->prepare()) return;
        loop_over_queries();
        store(dv, params.dv, undo_exponent_shift<float>() * (kGeneral ? params.rare.dropout.keep_factor : 1.0f),
              params.head_dim_v);
        store(dk, params.dk, undo_exponent_shift<float>() * params.softmax_scale, params.head_dim);
    }
};

}  // namespace libflash::cuda::sm80
