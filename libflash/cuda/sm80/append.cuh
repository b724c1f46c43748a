// Ahead of decode: new keys and values into the cache, in place, and rotary embedding of new keys and queries. A warp a row. Arithmetic in double, as
// on the CPU, so that the cache holds the same bits whatever wrote it.
#pragma once

#include "cuda/attention/decode_keys.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm80/launch_behind.cuh"

namespace libflash::cuda::sm80 {

__host__ __device__ inline bool turns(const DecodeParams& params) { return params.append.cos != nullptr; }
inline bool appends(const DecodeParams& params) { return params.append.k_new.data || turns(params); }

template <class T>
struct Append {
    static constexpr int kWarps = 4, kThreads = kWarps * 32;

    const DecodeParams& params;
    const int lane;

    __device__ __forceinline__ double number(const void* table, int64_t row_stride, int position, int pair) const {
        return load_number<T>(table, position * row_stride + pair, params.append.is_float);
    }

    // Channel `channel` of a row at a position.
    __device__ __forceinline__ T turned(const T* row, int channel, int position) const {
        const AppendParams& append = params.append;
        if (!append.cos || channel >= 2 * append.pairs) return row[channel];
        const int at = min(position, append.positions - 1);  // there is nothing behind the table
        const int pair = append.interleaved ? channel / 2 : channel % append.pairs;
        const bool second = append.interleaved ? channel % 2 : channel >= append.pairs;
        const double x = to_float(row[append.interleaved ? 2 * pair : pair]);
        const double y = to_float(row[append.interleaved ? 2 * pair + 1 : pair + append.pairs]);
        const double c = number(append.cos, append.cos_row, at, pair), s = number(append.sin, append.sin_row, at, pair);
        return narrow(second ? x * s + y * c : x * c - y * s);
    }
    // Rounded once: to odd in float, then to the 16-bit type.
    static __device__ __forceinline__ T narrow(double x) {
        if constexpr (sizeof(T) == 4) {
            return static_cast<float>(x);
        } else {
            const float toward_zero = __double2float_rz(x);
            const uint32_t inexact = static_cast<double>(toward_zero) != x;
            return from_float(__uint_as_float(__float_as_uint(toward_zero) | inexact), T());
        }
    }

    __device__ __forceinline__ const T* row_of(const RowsParams& rows, int batch, int row, int head) const {
        return static_cast<const T*>(rows.data) + batch * rows.batch + row * rows.row + head * rows.head;
    }

    __device__ __forceinline__ void turn_query(int batch, int row, int head) const {
        const AppendParams& append = params.append;
        const int position = cached_keys(params.cache, batch) + (append.query_rows_advance ? row : 0);
        const T* from = row_of(append.q, batch, row, head);
        T* to = const_cast<T*>(row_of(append.turned, batch, row, head));
        for (int c = lane; c < params.head_dim; c += 32) to[c] = turned(from, c, position);
    }

    __device__ __forceinline__ void append_row(int batch, int row, int head) const {
        const CacheParams& cache = params.cache;
        const int key = cached_keys(cache, batch) + row;
        const KeyPlace place = KeyPlaces(cache, batch).of(key);
        if (static_cast<uint32_t>(place.place) >= static_cast<uint32_t>(cache.places)) return;  // an absent page
        const T *k = row_of(params.append.k_new, batch, row, head), *v = row_of(params.append.v_new, batch, row, head);
        T* k_to = const_cast<T*>(row_of(cache.k, 0, place.row, head)) + place.place * cache.k.batch;
        T* v_to = const_cast<T*>(row_of(cache.v, 0, place.row, head)) + place.place * cache.v.batch;
        for (int c = lane; c < params.head_dim; c += 32) k_to[c] = turned(k, c, key);
        for (int c = lane; c < params.head_dim_v; c += 32) v_to[c] = v[c];
    }
};

template <class Row, class T>
__global__ void __launch_bounds__(Append<T>::kThreads, 8)
    append_kernel(const __grid_constant__ DecodeParams params, uint32_t new_rows) {
    let_next_kernel_begin();
    // Each of the two counts is below 2^31.
    const uint32_t index = blockIdx.x * Append<T>::kWarps + threadIdx.x / 32;
    const Append<T> body{params, static_cast<int>(threadIdx.x % 32)};
    const bool is_key = index < new_rows;
    const uint32_t item = is_key ? index : index - new_rows;
    const uint32_t rows = is_key ? params.cache.seqlen_new : params.seqlen_q, heads = is_key ? params.heads_k : params.heads_q;
    const int batch = static_cast<int>(item / heads / rows), row = static_cast<int>(item / heads % rows);
    const int head = static_cast<int>(item % heads);
    if (batch >= params.batch) return;
    if (is_key) {
        body.append_row(batch, row, head);
    } else if (turns(params)) {
        body.turn_query(batch, row, head);
    }
}

template <class Row, class T>
int launch_append(const DecodeParams& params, cudaStream_t stream) {
    if (!appends(params)) return cudaSuccess;
    const int64_t new_rows = params.append.k_new.data ? int64_t{params.batch} * params.cache.seqlen_new * params.heads_k : 0;
    const int64_t rows = new_rows + (turns(params) ? int64_t{params.batch} * params.seqlen_q * params.heads_q : 0);
    if (rows == 0) return cudaSuccess;
    const int64_t blocks = (rows + Append<T>::kWarps - 1) / Append<T>::kWarps;
    return launch_behind(append_kernel<Row, T>, blocks, Append<T>::kThreads, 0, stream, false, params,
                         static_cast<uint32_t>(new_rows));
}

}  // namespace libflash::cuda::sm80
