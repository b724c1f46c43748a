// The dQ accumulator: the part of a tile that a warp computes in the product dQ = dS K, and the address of that part in the
// workspace. The workspace has the order of the registers, so that the additions of a warp are consecutive. Also the last step of
// backward, which converts the accumulator to dq.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/query_units.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/ptx/reduction.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace libflash::cuda {

// Address within the columns [16 * kCount * part, 16 * kCount * (part + 1)) of a tile. skip_columns() requires that kCount is a
// power of two (kAligned); other parts count columns from the beginning of the tile.
template <class Tile, int kCount>
struct ColumnAddress {
    static constexpr bool kAligned = (kCount & (kCount - 1)) == 0;
    typename Tile::LaneAddress address;
    int first;

    __device__ __forceinline__ ColumnAddress(typename Tile::LaneAddress whole, int part) : address(whole), first(part * kCount) {
        if constexpr (kAligned) address = Tile::template skip_columns<kCount>(whole, first);
    }
    __device__ __forceinline__ uint32_t at(int row, int step) const { return address.at(row, kAligned ? step : first + step); }
};

// The number of warps along the rows of a tile; the other warps divide its columns.
constexpr int dq_accumulator_row_warps(int head_dim, int block_m, int warps) {
    return block_m < 32 ? 1 : (head_dim / (warps / 2) % 16 == 0 ? 2 : 4);
}

template <class T, int kHeadDim, int kBlockM, int kAllWarps, int kRows = dq_accumulator_row_warps(kHeadDim, kBlockM, kAllWarps)>
struct DqAccumulator {
    // kRowWarps x kColWarps warps divide the tile.
    static constexpr int kWarps = kAllWarps, kRowWarps = kRows;
    static constexpr int kColWarps = kWarps / kRowWarps;
    static constexpr int kSlabs = kBlockM / kRowWarps / 16;
    static constexpr int kBlocks = kHeadDim / kColWarps / 8;
    static_assert(kSlabs * kRowWarps * 16 == kBlockM && kBlocks * kColWarps * 8 == kHeadDim && kBlocks % 2 == 0, "no such share");
    static constexpr int kWarpFloats = kSlabs * kBlocks * 128;

    // Offset of the tile in the workspace, in floats.
    __device__ static __forceinline__ int64_t tile_offset(int64_t first_unit, int tile) {
        return first_unit * (kUnitRows * kHeadDim) + int64_t{tile} * (kBlockM * kHeadDim);
    }

    // dq = dS K, from the transposed tile of dS.
    template <int kBlockN, int kAhead>
    __device__ static __forceinline__ auto product(uint32_t scores, uint32_t keys, int warp, int lane) {
        using ScoreTile = SharedTile<kBlockN, kBlockM>;
        using KvTile = SharedTile<kBlockN, kHeadDim>;
        const ColumnAddress<ScoreTile, kSlabs> a_address(ScoreTile::a_trans_address(scores, lane), warp % kRowWarps);
        const ColumnAddress<KvTile, kBlocks / 2> b_address(KvTile::b_trans_address(keys, lane), warp / kRowWarps);
        return make_product<T, kBlockN / 16, kAhead, kSlabs, kBlocks>(
            [=](int step, uint32_t (&f)[kSlabs][4]) {
#pragma unroll
                for (int a = 0; a < kSlabs; ++a) ldmatrix_x4_trans(f[a], a_address.at(step * 16, a));
            },
            [=](int step, int pair, uint32_t (&f)[4]) { ldmatrix_x4_trans(f, b_address.at(step * 16, pair)); });
    }

    // Adds part `share` of kShares of the warp's sums to the workspace.
    template <int kShares>
    __device__ static __forceinline__ void add(float* tile, const float (&dq)[kSlabs][kBlocks][4], int warp, int lane,
                                               int share) {
        float* mine = tile + warp * kWarpFloats;
        constexpr int kAll = kSlabs * kBlocks;
#pragma unroll
        for (int i = share * kAll / kShares; i < (share + 1) * kAll / kShares; ++i)
            WarpQuad::add(mine + i * 128, lane, dq[i / kBlocks][i % kBlocks]);
    }

    // Writes one unit of rows to floats, or adds it to them.
    __device__ static __forceinline__ void convert_to_floats(const BackwardParams& params) {
        const int index = static_cast<int>(blockIdx.x);
        const TileCoordinates work = tile_coordinates<kUnitRows>(params.query_schedule, params.q_lengths, params.batch, index);
        if (work.batch < 0) return;
        const SequenceRows rows = SequenceRows::of(params.q_lengths, work.batch);
        const int64_t first_unit = QueryUnits::of(params, params.query_schedule, index, work) - work.tile;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int col = warp / kRowWarps * kBlocks * 8 + lane % 4 * 2;
        const int row_limit = params.adds ? rows.length : rows.owned;
        float* dq = static_cast<float*>(params.dq.data) + work.batch * params.dq.batch + work.head * params.dq.head +
                    rows.start * params.dq.row + col;
        constexpr int kAll = kSlabs * kBlocks;
#pragma unroll 1
        for (int i = 0; i < kUnitRows / kBlockM * kAll; ++i) {
            const int tile = work.tile * (kUnitRows / kBlockM) + i / kAll, block = i % kAll, first = block % kBlocks * 8;
            const float* mine = params.dq_accumulator + tile_offset(first_unit, tile) + warp * kWarpFloats;
            float x[4];
            WarpQuad::load(mine + block * 128, lane, x);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = tile * kBlockM + (warp % kRowWarps * kSlabs + block / kBlocks) * 16 + e / 2 * 8 + lane / 4;
                if (row >= row_limit || col + first + e % 2 >= params.head_dim) continue;
                float* const at = dq + row * params.dq.row + first + e % 2;
                const float sum = row < rows.length ? x[e] * (undo_exponent_shift<T>() * params.softmax_scale) : 0.0f;
                *at = params.adds ? *at + sum : sum;
            }
        }
    }

    // Converts one unit of rows to dq. All warps of the thread block call it; `shared` holds one tile. kWide: dq may be float32.
    // kParts: thread blocks that share a unit.
    template <bool kWide, int kParts = 1>
    __device__ static __forceinline__ void convert(const BackwardParams& params, char* shared) {
        if (kWide && params.wide_dq) return convert_to_floats(params);
        using QTile = SharedTile<kBlockM, kHeadDim>;
        static_assert(kParts == 1 || !kWide, "convert_to_floats() has no parts");
        const int part = static_cast<int>(blockIdx.x) % kParts, index = static_cast<int>(blockIdx.x) / kParts;
        const TileCoordinates work = tile_coordinates<kUnitRows>(params.query_schedule, params.q_lengths, params.batch, index);
        if (work.batch < 0) return;
        const SequenceRows rows = SequenceRows::of(params.q_lengths, work.batch);
        const int64_t first_unit = QueryUnits::of(params, params.query_schedule, index, work) - work.tile;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        T* dq = static_cast<T*>(params.dq.data) + work.batch * params.dq.batch + work.head * params.dq.head +
                rows.start * params.dq.row;
        const float* const sums = params.dq_accumulator + warp * kWarpFloats;
        // The sums of two tiles are loaded before the first is stored, where they fit 64 registers.
        constexpr int kTiles = kUnitRows / kBlockM / kParts, kTogether = 2 * kWarpFloats <= 64 * 32 && kTiles % 2 == 0 ? 2 : 1;
#pragma unroll 1
        for (int i = 0; i < kTiles; i += kTogether) {
            float x[kTogether][kSlabs * kBlocks][4];
#pragma unroll
            for (int t = 0; t < kTogether; ++t) {
                const int tile = (work.tile * kParts + part) * kTiles + i + t;
                if (tile * kBlockM >= rows.owned) continue;
#pragma unroll
                for (int n = 0; n < kSlabs * kBlocks; ++n)
                    WarpQuad::load(sums + tile_offset(first_unit, tile) + n * 128, lane, x[t][n]);
            }
#pragma unroll
            for (int t = 0; t < kTogether; ++t) {
                const int first_row = ((work.tile * kParts + part) * kTiles + i + t) * kBlockM;
                if (first_row >= rows.owned) return;
                write_rounded(x[t], shared_address(shared), warp, lane, rows.length - first_row,
                              undo_exponent_shift<T>() * params.softmax_scale);
                __syncthreads();
                QTile::template store<kWarps * 32>(shared, dq, params.dq.row, first_row, rows.owned, params.head_dim,
                                                   params.vector_out, threadIdx.x);
                __syncthreads();
            }
        }
    }

private:
    // Writes the warp's part of a tile to shared memory: the first `count` rows times `factor`, zeros beyond.
    __device__ static __forceinline__ void write_rounded(const float (&x)[kSlabs * kBlocks][4], uint32_t shared, int warp,
                                                         int lane, int count, float factor) {
        using QTile = SharedTile<kBlockM, kHeadDim>;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int n = 0; n < kBlocks; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = (warp % kRowWarps * kSlabs + a) * 16 + r * 8 + lane / 4;
                    const float* const pair = x[a * kBlocks + n] + 2 * r;
                    store_shared(shared + QTile::offset(row, warp / kRowWarps * kBlocks + n) + lane % 4 * 4,
                                 row < count ? pack_pair(pair[0] * factor, pair[1] * factor, T()) : 0);
                }
    }
};

}  // namespace libflash::cuda
