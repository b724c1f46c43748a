// The matrix products of the tangent kernels for sm_80 and later: 3xTF32 for float32, 16-bit products otherwise. Each warp has
// its own rows, or shares them with other warps and has a part of the channels (tangent_parts()).
#pragma once

#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/sm80/tangent_parts.h"
#include "cuda/tile/product.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "cuda/tile/split_product.cuh"

#include <type_traits>

namespace libflash::cuda::sm80 {

// kBlockM x kBlockN: the scores of a thread block. kSlabs: 16-row slabs of a warp.
template <class T, int kHeadDim, int kBlockM, int kBlockN, int kSlabs>
struct TangentProducts {
    static constexpr bool kFloat = std::is_same<T, float>::value;
    static constexpr bool kShortSums = kHeadDim > 256;  // as forward (split_product())
    static constexpr int kParts = tangent_parts(kHeadDim, sizeof(T)),
                         kPartDim = kHeadDim / kParts;  // warps per row, channels of a warp
    static constexpr int kBlocks = kBlockN / 8, kChannelBlocks = kPartDim / 8;
    static constexpr int kSteps = kPartDim * static_cast<int>(sizeof(T)) / 32;  // of SharedTile
    using RowTile = SharedTile<kBlockM, kHeadDim, sizeof(T)>;
    using ColTile = SharedTile<kBlockN, kHeadDim, sizeof(T)>;
    using Scores = float[kSlabs][kBlocks][4];
    using Sums = float[kSlabs][kChannelBlocks][4];

    uint32_t memory;  // the address of the thread block's shared memory
    int warp, lane;

    // The warp's first row in the tile, and which part of the channels it has.
    __device__ __forceinline__ int warp_row() const { return hide_from_compiler(warp) / kParts * kSlabs * 16; }
    __device__ __forceinline__ int part() const { return kParts == 1 ? 0 : hide_from_compiler(warp) % kParts; }

    // The address of the warp's first channel.
    template <class Tile>
    __device__ __forceinline__ typename Tile::LaneAddress of_part(const typename Tile::LaneAddress& address) const {
        if constexpr (kParts == 1) {
            return address;
        } else {
            return Tile::template skip_columns<kSteps>(address, part() * kSteps);
        }
    }
    // How many of `channels` channels come from the warp's first channel on.
    __device__ __forceinline__ int channels_left(int channels) const { return channels - part() * kPartDim; }

    // c += A B^T over the warp's channels. A: the warp's rows of the tile at rows_at. B: the tile at cols_at.
    __device__ __forceinline__ void add_scores(Scores& c, int rows_at, int cols_at, int channels) const {
        const int at = hide_from_compiler(lane);
        const auto a_address = of_part<RowTile>(RowTile::a_address(memory + rows_at, warp_row(), at));
        const auto b_address = of_part<ColTile>(ColTile::b_address(memory + cols_at, at));
        const auto load_a = [=](int step, uint32_t (&f)[kSlabs][4]) {
#pragma unroll
            for (int a = 0; a < kSlabs; ++a) ldmatrix_x4(f[a], a_address.at(a * 16, step));
        };
        const auto load_b = [=](int step, int pair, uint32_t (&f)[4]) { ldmatrix_x4(f, b_address.at(pair * 16, step)); };
        if constexpr (kFloat) {
            Scores product;
            split_product<true, kSteps, kShortSums>(product, channels_left(channels), load_a, load_b);
            add_elements(c, product);
        } else {
            auto product = make_product<T, kSteps, 1, kSlabs, kBlocks>(load_a, load_b);
            product.start();
            product.add_to(c, [](int) {});
        }
    }

    // sums += W C for the warp's channels of the tile C at cols_at.
    __device__ __forceinline__ void add_values(Sums& sums, const Scores& w, int cols_at, int channels) const {
        const int at = hide_from_compiler(lane);
        if constexpr (kFloat) {
            SplitRows<kSlabs> f[kBlocks];
#pragma unroll
            for (int n = 0; n < kBlocks; ++n)
#pragma unroll
                for (int a = 0; a < kSlabs; ++a) f[n].split_columns(a, w[a][n]);
            auto pair = ColTile::row_pair(memory + cols_at, at);
            pair.even = of_part<ColTile>(pair.even), pair.odd = of_part<ColTile>(pair.odd);
            add_split_product<false>(sums, f, channels_left(channels),
                                     [=](int step, int block, uint32_t (&b)[2]) { pair.load(step * 8, block, b[0], b[1]); });
        } else {
            const auto b_address = of_part<ColTile>(ColTile::b_trans_address(memory + cols_at, at));
            auto product = make_product<T, kBlockN / 16, 1, kSlabs, kChannelBlocks>(
                [&](int step, uint32_t (&f)[kSlabs][4]) {
#pragma unroll
                    for (int a = 0; a < kSlabs; ++a) to_fragment<T>(f[a], w[a][2 * step], w[a][2 * step + 1]);
                },
                [=](int step, int pair, uint32_t (&b)[4]) { ldmatrix_x4_trans(b, b_address.at(step * 16, pair)); });
            product.start();
            product.add_to(sums, [](int) {});
        }
    }
};

}  // namespace libflash::cuda::sm80
