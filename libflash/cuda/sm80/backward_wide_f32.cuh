// backward_wide.cuh in float32. Four warps share 16 rows, each with a quarter of the channels. The two tensors of the columns are
// loaded one after the other into one tile; the second one is the one that P or dS is multiplied by. The kernel also computes
// dbias: a thread block has a tile of the bias and loops over all pairs of query and key tiles whose dS is added to this tile.
#pragma once

#include "cuda/attention/bias_tile.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/tile/split_product.cuh"

namespace libflash::cuda::sm80 {

// `Base`: WideBackward.
template <class Base>
struct WideBackwardFloat : Base {
    using Base::common, Base::computes_dbias, Base::dp, Base::kBlocks, Base::kCols, Base::kColsAt, Base::kParts, Base::kPartsAt,
        Base::lane, Base::params, Base::part, Base::s, Base::shared, Base::smem, Base::sums, Base::thread, Base::transposed;
    using typename Base::ColTile, typename Base::RowTile, typename Base::Scores;
    static constexpr int kSteps = 2 * Base::kPartSteps;  // steps of 8 channels of a warp
    static constexpr int kRows = kCols;                  // rows of a tile of either side

    float bias_sums[1][kBlocks][4];

    using Base::Base;

    // How many of `channels` channels come from this warp's first channel on.
    __device__ __forceinline__ int channels_left(int channels) const { return channels - part() * kSteps * 8; }

    // c = A B^T over this warp's channels. `tensor`: 0 for Q and K, 1 for dO and V.
    __device__ __forceinline__ void multiply(Scores& c, int tensor) const {
        const int at = hide_from_compiler(lane), first = part() * kSteps;
        const auto a_address = RowTile::template skip_columns<kSteps>(
            RowTile::a_address(smem() + tensor * RowTile::kBytes, this->warp_row(), at), first);
        const auto b_address = ColTile::template skip_columns<kSteps>(ColTile::b_address(smem() + Base::kColsAt, at), first);
        split_product<true, kSteps, true>(
            c, channels_left(tensor == 0 ? params.head_dim : params.head_dim_v),
            [=](int step, uint32_t (&f)[1][4]) { ldmatrix_x4(f[0], a_address.at(0, step)); },
            [=](int step, int pair, uint32_t (&f)[4]) { ldmatrix_x4(f, b_address.at(pair * 16, step)); });
    }

    // Adds up the parts of the warps that share the rows; all of them add in the same order. Contains barriers of the thread
    // block. Between two calls there must be another barrier.
    __device__ __forceinline__ void add_parts(Scores& c) {
        const int me = hide_from_compiler(thread), first = me / (kParts * 32) * (kParts * 32) + me % 32;
        const auto address_of = [&](int thread) { return smem() + Base::kPartsAt + thread * 16; };
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
            float (&x)[4] = c[0][n];
            if (n > 0) __syncthreads();  // every warp has read the previous block
            store_shared_16(address_of(me), x[0], x[1], x[2], x[3]);
            __syncthreads();
            x[0] = x[1] = x[2] = x[3] = 0.0f;
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const float4 y = load_shared_16(address_of(first + part * 32));
                x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w;
            }
        }
    }

    // sums += W C for this warp's channels. C: the tensor in the tile of the columns, of `channels` channels.
    __device__ __forceinline__ void add_sums(const Scores& w, int channels) {
        auto rows = ColTile::row_pair(smem() + Base::kColsAt, hide_from_compiler(lane));
        rows.even = ColTile::template skip_columns<kSteps>(rows.even, part() * kSteps);
        rows.odd = ColTile::template skip_columns<kSteps>(rows.odd, part() * kSteps);
        SplitRows<1> left[kBlocks];
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) left[n].split_columns(0, w[0][n]);
        add_split_product<true>(sums, left, channels_left(channels),
                                [&](int step, int block, uint32_t (&f)[2]) { rows.load(step * 8, block, f[0], f[1]); });
    }

    // Computes P in s and dS in dp for one tile of the other side and one query head. Afterwards the tile of the columns holds
    // the tensor that P or dS is multiplied by. of_values: for dv, which needs no dS.
    __device__ __forceinline__ void differentiate(int head, int tile, bool of_values) {
        clear(dp);
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            const int tensor = of_values ? i : 1 - i;
            __syncthreads();  // no warp reads the previous tile
            const int column_head = transposed() ? head : head / params.group_size;
            this->template load_side<ColTile, true>(Base::kColsAt, !transposed(), column_head, tile * kCols, tensor);
            if (i == 0 && transposed()) this->load_statistics(head, tile * kCols, kCols);
            cp_async_commit();
            cp_async_wait<0>();
            __syncthreads();
            if (of_values && i == 1) break;  // dv needs no dP
            Scores c;
            multiply(c, tensor);
            add_parts(c);
#pragma unroll
            for (int j = 0; j < kBlocks * 4; ++j)
                if (tensor == 0) {
                    s[0][j / 4][j % 4] = c[0][j / 4][j % 4];
                } else {
                    dp[0][j / 4][j % 4] = c[0][j / 4][j % 4];
                }
        }
        this->apply_rules(head, tile);
    }

    // Adds one tile of the other side, for one query head.
    __device__ __forceinline__ void add_tile(int head, int tile) {
        const bool of_values = this->output == decltype(this->output)::dv;
        differentiate(head, tile, of_values);
        if (computes_dbias()) return add_bias(tile);
#pragma unroll
        for (int j = 0; j < kBlocks * 4; ++j)
            if (of_values) dp[0][j / 4][j % 4] = s[0][j / 4][j % 4];
        add_sums(dp, of_values ? params.head_dim_v : params.head_dim);
    }
    // dS of rows and keys that do not exist may have any value.
    __device__ __forceinline__ void add_bias(int tile) {
#pragma unroll
        for (int i = 0; i < kBlocks * 4; ++i) {
            const auto at = this->index_of(i, tile * kCols);
            const bool exists = this->first_row() + at.own < common().length_q && at.other < common().length_k;
            bias_sums[0][i / 4][i % 4] += exists ? dp[0][i / 4][i % 4] : 0.0f;
        }
    }

    // Loops over tiles [begin, end) of the other side.
    __device__ __forceinline__ void loop(int begin, int end) {
        const auto& c = common();
        const int heads = transposed() ? params.group_size : 1, first_head = c.work.head * heads;
#pragma unroll 1
        for (int head = first_head; head < first_head + heads; ++head) {
            int cursor = transposed() ? 0 : c.key_tiles.list_count;
            int tile = transposed() ? c.query_tiles.begin - 1 : min(c.key_tiles.end, end);
#pragma unroll 1
            while (true) {
                tile =
                    transposed() ? c.query_tiles.next(params.block_cols, head, tile, cursor) : c.key_tiles.previous(tile, cursor);
                if (tile < begin) break;
                add_tile(head, tile);
            }
        }
    }

    __device__ __forceinline__ void store_bias(const BiasTile& at) {
        float* const tile = reinterpret_cast<float*>(shared);
        __syncthreads();  // no warp reads the rows
#pragma unroll
        for (int i = 0; i < kBlocks * 4; ++i) {
            const auto index = this->index_of(i, 0);
            if (part() == 0) tile[index.own * kCols + index.other] = bias_sums[0][i / 4][i % 4];
        }
        __syncthreads();
        const ScoreGradientParams& out = params.dbias;
        write_bias_tile<kRows, kCols, Base::kThreads>(
            out, at, thread, [=](int row, int col) { return tile[row * kCols + col]; },
            [&](int64_t index, float sum) {
                store_number<float>(out.data, index, out.is_float, undo_exponent_shift<float>() * sum);
            });
    }

    __device__ __forceinline__ void run() {
        const ScoreGradientParams& bias = params.dbias;
        BiasTile target{};
        BiasRows<kRows> rows;
        clear(sums);
        clear(bias_sums);
        if (computes_dbias()) {
            target = bias_tile_of<kRows, kCols>(bias, blockIdx.x);
            rows.start(params, bias, target);
        } else if (!this->prepare()) {
            return;
        }
#pragma unroll 1
        while (!computes_dbias() || rows.next(params, bias)) {
            int begin = 0, end = INT32_MAX;
            if (computes_dbias()) {
                const SequenceRows q_rows = SequenceRows::of(params.q_lengths, rows.at.batch),
                                   k_rows = SequenceRows::of(params.k_lengths, rows.at.batch);
                if (rows.at.tile * kRows >= q_rows.length) continue;
                const BiasRange cols(target.col, bias.extent[3], tile_count(k_rows.length, kCols));
                begin = cols.begin, end = cols.end;
                __syncthreads();  // no warp reads the previous rows
                this->begin(rows.at, q_rows, k_rows);
            }
            loop(begin, end);
            cp_async_wait<0>();
            if (!computes_dbias()) break;
        }
        if (computes_dbias()) return store_bias(target);
        __syncthreads();
        this->store();
    }
};

}  // namespace libflash::cuda::sm80
