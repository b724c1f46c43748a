// Ahead of decode: new keys and values into the cache, in place, and rotary embedding of new keys and queries. A thread has two channels of a row,
// and all it needs on the way at once. Arithmetic in double, as on the CPU, so that the cache holds the same bits whatever wrote it.
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
    const DecodeParams& params;

    __device__ __forceinline__ double number(const void* table, int64_t row_stride, int position, int pair) const {
        return load_number<T>(table, position * row_stride + pair, params.append.is_float);
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

    // Two channels number `slot` of a row: a pair that is turned, or two neighbours behind the turned ones.
    __device__ __forceinline__ void turn(const T* from, T* to, int slot, int position) const {
        const AppendParams& append = params.append;
        const int pairs = append.cos ? append.pairs : 0;
        if (slot >= pairs) return copy(from, to, slot, params.head_dim);
        const int at = min(position, append.positions - 1);  // there is nothing behind the table
        const int first = append.interleaved ? 2 * slot : slot, second = append.interleaved ? first + 1 : slot + pairs;
        const double x = to_float(from[first]), y = to_float(from[second]);
        const double c = number(append.cos, append.cos_row, at, slot), s = number(append.sin, append.sin_row, at, slot);
        to[first] = narrow(x * c - y * s);
        to[second] = narrow(x * s + y * c);
    }
    __device__ __forceinline__ void copy(const T* from, T* to, int slot, int channels) const {
        const T zero = T(0.0f);
        const T x = 2 * slot < channels ? from[2 * slot] : zero, y = 2 * slot + 1 < channels ? from[2 * slot + 1] : zero;
        if (2 * slot < channels) to[2 * slot] = x;
        if (2 * slot + 1 < channels) to[2 * slot + 1] = y;
    }

    static __device__ __forceinline__ T* row_of(const RowsParams& rows, int batch, int row, int head) {
        return static_cast<T*>(rows.data) + batch * rows.batch + row * rows.row + head * rows.head;
    }

    __device__ __forceinline__ void turn_query(int batch, int row, int head, int slot) const {
        const AppendParams& append = params.append;
        const int position = cached_keys(params.cache, batch) + (append.query_rows_advance ? row : 0);
        turn(row_of(append.q, batch, row, head), row_of(append.turned, batch, row, head), slot, position);
    }

    __device__ __forceinline__ void append_row(int batch, int row, int head, int slot) const {
        const CacheParams& cache = params.cache;
        const int key = cached_keys(cache, batch) + row;
        const KeyPlace place = KeyPlaces(cache, batch).of(key);
        if (static_cast<uint32_t>(place.place) >= static_cast<uint32_t>(cache.places)) return;  // an absent page
        turn(row_of(params.append.k_new, batch, row, head), row_of(cache.k, place.place, place.row, head), slot, key);
        copy(row_of(params.append.v_new, batch, row, head), row_of(cache.v, place.place, place.row, head), slot,
             params.head_dim_v);
    }
};

constexpr int kAppendThreads = 128;  // as many as a row of 256 channels has pairs

template <class Row, class T>
__global__ void __launch_bounds__(kAppendThreads, 8)
    append_kernel(const __grid_constant__ DecodeParams params, uint32_t new_rows, uint32_t slots) {
    let_next_kernel_begin();
    const uint32_t index = blockIdx.x * (kAppendThreads / slots) + threadIdx.x / slots, slot = threadIdx.x % slots;
    const Append<T> body{params};
    const bool is_key = index < new_rows;
    const uint32_t item = is_key ? index : index - new_rows;
    const uint32_t rows = is_key ? params.cache.seqlen_new : params.seqlen_q, heads = is_key ? params.heads_k : params.heads_q;
    const int batch = static_cast<int>(item / heads / rows), row = static_cast<int>(item / heads % rows);
    const int head = static_cast<int>(item % heads);
    if (batch >= params.batch) return;
    if (is_key) {
        body.append_row(batch, row, head, slot);
    } else if (turns(params)) {
        body.turn_query(batch, row, head, slot);
    }
}

template <class Row, class T>
int launch_append(const DecodeParams& params, cudaStream_t stream) {
    if (!appends(params)) return cudaSuccess;
    const int64_t new_rows = params.append.k_new.data ? int64_t{params.batch} * params.cache.seqlen_new * params.heads_k : 0;
    const int64_t rows = new_rows + (turns(params) ? int64_t{params.batch} * params.seqlen_q * params.heads_q : 0);
    if (rows == 0) return cudaSuccess;
    int64_t slots = 1;  // two channels each
    while (2 * slots < params.head_dim || 2 * slots < params.head_dim_v) slots *= 2;
    const int64_t rows_of_block = kAppendThreads / slots, blocks = (rows + rows_of_block - 1) / rows_of_block;
    return launch_behind(append_kernel<Row, T>, blocks, kAppendThreads, 0, stream, false, params, static_cast<uint32_t>(new_rows),
                         static_cast<uint32_t>(slots));
}

}  // namespace libflash::cuda::sm80
