// Where the sm_90a decode kernels store results: the row of the workspace of a split, and the row of the output
// (attention/combine_splits.cuh).
#pragma once

#include "cuda/attention/combine_splits.cuh"
#include "cuda/attention/ragged_keys.cuh"

namespace libflash::cuda::sm90 {

// Query rows of a tile in calls whose long chunks the prefill kernel takes: the workspace has room for that many.
constexpr int kDecodeRowsOfTile = 64;

// The workspace row of a row of the work tile.
__device__ __forceinline__ int64_t partial_row_of(const DecodeParams& params, const RaggedWorkTile& rows, int row) {
    if (params.ragged.most_rows > 0)
        return short_partial_row(params, kDecodeRowsOfTile, rows.batch, rows.head_k, rows.first_row + row);
    const int batch = params.ragged.queries.cu ? 0 : rows.batch;
    return partial_row(params, batch, rows.head_k, rows.sequence.start * params.group_size + rows.first_row + row);
}

// A row of the work tile in the output.
struct DecodeOutputRow {
    int batch, row, head;

    __device__ __forceinline__ DecodeOutputRow(const DecodeParams& params, const RaggedWorkTile& rows, int of_tile) {
        const int packed = rows.first_row + of_tile, query = divide(packed, params.by_group);
        batch = rows.batch, row = rows.sequence.start + query;
        head = rows.head_k * params.group_size + packed - query * params.group_size;
    }
    // Stores the LSE, with the sink. Returns the factor by which the sink reduces the result.
    template <class T>
    __device__ __forceinline__ float finish(const DecodeParams& params, float lse, bool writes) const {
        return finish_row(params, batch, row, head, lse, sink_of<T>(params, batch, head), writes);
    }
    template <class T>
    __device__ __forceinline__ T* address(const DecodeParams& params) const {
        return static_cast<T*>(params.out.data) + batch * params.out.batch + row * params.out.row + head * params.out.head;
    }
};

// The results of a thread block without keys. All its threads call it.
template <class Traits>
__device__ __forceinline__ void store_without_keys(const DecodeParams& params, const RaggedWorkTile& rows) {
    using T = typename Traits::T;
    const int thread = static_cast<int>(threadIdx.x), vectors = params.head_dim_v / 8;
    for (int row = thread; row < rows.rows; row += Traits::kThreads) {
        if (params.splits > 1) {  // combine does not use the partial result
            params.partial_lse[partial_row_of(params, rows, row) * params.splits + rows.split] = -INFINITY;
        } else {
            DecodeOutputRow(params, rows, row).template finish<T>(params, -INFINITY, true);
        }
    }
    if (params.splits > 1) return;
    for (int i = thread; i < rows.rows * vectors; i += Traits::kThreads) {
        T* const to = DecodeOutputRow(params, rows, i / vectors).template address<T>(params);
        *reinterpret_cast<uint4*>(to + i % vectors * 8) = make_uint4(0, 0, 0, 0);
    }
}

}  // namespace libflash::cuda::sm90
