// dQ accumulator for float32: the layout of dq_accumulator.cuh. To save registers a warp computes its part of dS K a few columns
// at a time.
#pragma once

#include "cuda/attention/dq_accumulator.cuh"
#include "cuda/tile/split_product.cuh"
#include "cuda/tile/store_floats.cuh"

namespace libflash::cuda::sm80 {

// Row pairs of a float32 tile, restricted to the 8 * kCount columns from 8 * kCount * part on.
template <class Tile, int kCount>
struct ColumnPair {
    ColumnAddress<Tile, kCount> even, odd;

    __device__ __forceinline__ ColumnPair(const typename Tile::RowPair& whole, int part)
        : even(whole.even, part), odd(whole.odd, part) {}
    __device__ __forceinline__ void load(int row, int block, uint32_t& x, uint32_t& y) const {
        x = load_shared(even.at(row, block));
        y = load_shared(odd.at(row, block));
    }
};

template <int kHeadDim, int kBlockM, int kWarps>
struct FloatDqAccumulator : DqAccumulator<float, kHeadDim, kBlockM, kWarps> {
    using Base = DqAccumulator<float, kHeadDim, kBlockM, kWarps>;
    using Base::kBlocks, Base::kRowWarps, Base::kSlabs, Base::kWarpFloats;
    static constexpr int kTogether = kBlocks % 4 == 0 && kSlabs == 1 ? 4 : 2;  // column blocks per step

    // Adds dS K to the accumulator of the query tile. dS comes from the transposed score tile.
    template <int kBlockN>
    __device__ static __forceinline__ void add_product(float* tile, uint32_t scores, uint32_t keys, int warp, int lane,
                                                       int cols) {
        using ScoreTile = SharedTile<kBlockN, kBlockM, 4>;
        using KvTile = SharedTile<kBlockN, kHeadDim, 4>;
        const ColumnPair<ScoreTile, kSlabs * 2> a_pair(ScoreTile::row_pair_of_columns(scores, lane), warp % kRowWarps);
        const auto b_pair = KvTile::row_pair(keys, lane);
        float* mine = tile + warp * kWarpFloats;
#pragma unroll 1
        for (int first = 0; first < kBlocks; first += kTogether) {
            const int block = warp / kRowWarps * kBlocks + first;
            if (block * 8 >= cols) break;
            float dq[kSlabs][kTogether][4];
            split_product<false, kBlockN / 8>(
                dq, kBlockN,
                [=](int step, uint32_t (&f)[kSlabs][4]) {
#pragma unroll
                    for (int a = 0; a < kSlabs; ++a) {
                        a_pair.load(step * 8, 2 * a, f[a][0], f[a][2]);
                        a_pair.load(step * 8, 2 * a + 1, f[a][1], f[a][3]);
                    }
                },
                [=](int step, int pair, uint32_t (&f)[4]) {
                    b_pair.load(step * 8, block + 2 * pair, f[0], f[1]);
                    b_pair.load(step * 8, block + 2 * pair + 1, f[2], f[3]);
                });
#pragma unroll
            for (int i = 0; i < kSlabs * kTogether; ++i)
                WarpQuad::add(mine + (i / kTogether * kBlocks + first + i % kTogether) * 128, lane,
                              dq[i / kTogether][i % kTogether]);
        }
    }

    // Converts one unit (kUnitRows rows) of the accumulator to dq. All warps of the thread block call it.
    __device__ static __forceinline__ void convert(const BackwardParams& params) {
        if (params.adds) return Base::convert_to_floats(params);
        const int index = static_cast<int>(blockIdx.x);
        const TileCoordinates work = tile_coordinates<kUnitRows>(params.query_schedule, params.q_lengths, params.batch, index);
        if (work.batch < 0) return;
        const SequenceRows rows = SequenceRows::of(params.q_lengths, work.batch);
        const int64_t first_unit = QueryUnits::of(params, params.query_schedule, index, work) - work.tile;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int col = warp / kRowWarps * kBlocks * 8 + lane % 4 * 2;
        float* dq = static_cast<float*>(params.dq.data) + work.batch * params.dq.batch + work.head * params.dq.head +
                    rows.start * params.dq.row + col;
        for (int i = 0; i < kUnitRows / kBlockM; ++i) {
            const int tile = work.tile * (kUnitRows / kBlockM) + i;
            const float* mine = params.dq_accumulator + Base::tile_offset(first_unit, tile) + warp * kWarpFloats;
            for (int a = 0; a < kSlabs; ++a) {
                float x[kBlocks][4];
#pragma unroll
                for (int n = 0; n < kBlocks; ++n) WarpQuad::load(mine + (a * kBlocks + n) * 128, lane, x[n]);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = tile * kBlockM + (warp % kRowWarps * kSlabs + a) * 16 + r * 8 + lane / 4;
                    if (row >= rows.owned) continue;
                    const float factor = row < rows.length ? undo_exponent_shift<float>() * params.softmax_scale : 0.0f;
                    store_floats<kBlocks>(dq + row * params.dq.row, params.head_dim - col, params.vector_out,
                                          [&](int n, int e) { return x[n][2 * r + e] * factor; });
                }
            }
        }
    }
};

}  // namespace libflash::cuda::sm80
