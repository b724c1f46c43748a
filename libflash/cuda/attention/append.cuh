// The append kernel, which runs before decode: writes new keys and values to the cache and applies the rotary embedding to new
// keys and queries. A thread handles two channels of a row. Arithmetic is in double, as on the CPU, so that both write the same
// bits to the cache. If a sequence has one query row and at most one new row, the decode kernel usually does this itself
// (sm80/appended_row.cuh; sm80/decode_plan.cpp has the conditions).
#pragma once

#include "cuda/attention/appended_key.cuh"
#include "cuda/attention/decode_keys.cuh"
#include "cuda/attention/launch_dependent.cuh"
#include "cuda/attention/ragged_keys.cuh"
#include "cuda/attention/rotary.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/plans.h"
#include "cuda/ptx/dependent_launch.cuh"

namespace libflash::cuda {

__device__ __forceinline__ bool rotates(const DecodeParams& params) { return params.append.cos != nullptr; }

template <class T>
struct Append {
    const DecodeParams& params;

    // Two channels of a row.
    struct Two {
        T x, y;
    };
    struct Angle {
        float cos, sin;
    };

    // A row consists of slots of two channels: slot n is rotated pair n or, after the rotated channels, channels 2n and 2n + 1.
    __device__ __forceinline__ bool is_pair(int slot) const { return params.append.cos && slot < params.append.pairs; }
    __device__ __forceinline__ int first(int slot) const { return is_pair(slot) && !params.append.interleaved ? slot : 2 * slot; }
    __device__ __forceinline__ int second(int slot) const {
        return is_pair(slot) && !params.append.interleaved ? slot + params.append.pairs : 2 * slot + 1;
    }

    static __device__ __forceinline__ Two load(const T* from, int first, int second, int channels) {
        const T zero = T(0.0f);
        return {first < channels ? from[first] : zero, second < channels ? from[second] : zero};
    }
    static __device__ __forceinline__ void store(const Two& two, T* to, int first, int second, int channels) {
        if (first < channels) to[first] = two.x;
        if (second < channels) to[second] = two.y;
    }
    // Of a key, which has head_dim channels: sm80/append_codes.cuh writes keys whose last channels are in k_rope_cache.
    __device__ __forceinline__ Two load(const T* from, int slot) const {
        return load(from, first(slot), second(slot), params.head_dim);
    }
    __device__ __forceinline__ void store(const Two& two, T* to, int slot) const {
        store(two, to, first(slot), second(slot), params.head_dim);
    }
    __device__ __forceinline__ Two load_value(const T* from, int slot) const {
        return load(from, 2 * slot, 2 * slot + 1, params.head_dim_v);
    }
    __device__ __forceinline__ void store_value(const Two& two, T* to, int slot) const {
        store(two, to, 2 * slot, 2 * slot + 1, params.head_dim_v);
    }

    __device__ __forceinline__ Angle angle(int slot, int position) const {
        const AppendParams& append = params.append;
        const int at = min(position, append.positions - 1);  // the table ends there
        return {load_number<T>(append.cos, at * append.cos_row + slot, append.is_float),
                load_number<T>(append.sin, at * append.sin_row + slot, append.is_float)};
    }
    static __device__ __forceinline__ void rotate(Two& two, const Angle& angle) {
        const double x = to_float(two.x), y = to_float(two.y), c = angle.cos, s = angle.sin;
        two.x = narrow(x * c - y * s);
        two.y = narrow(x * s + y * c);
    }

    static __device__ __forceinline__ T narrow(double x) { return round_once<T>(x); }

    __device__ __forceinline__ void rotate_row(const T* from, T* to, int channels, int slot, int position) const {
        Two two = load(from, first(slot), second(slot), channels);
        if (is_pair(slot)) rotate(two, angle(slot, position));
        store(two, to, first(slot), second(slot), channels);
    }

    static __device__ __forceinline__ T* row_of(const RowsParams& rows, int batch, int row, int head) {
        return static_cast<T*>(rows.data) + batch * rows.batch + row * rows.row + head * rows.head;
    }

    // Position of a query row without q_positions.
    __device__ __forceinline__ int query_position(int batch, int row) const {
        return cached_keys(params, batch) + (params.append.query_rows_advance ? row : 0);
    }
    // `row`: the row in the batch entry or the packed tensor.
    __device__ __forceinline__ void rotate_query(int batch, int row, int head, int slot, int position) const {
        const T* const from = row_of(params.append.q, batch, row, head);
        T* const to = row_of(params.append.rotated_q, batch, row, head);
        // With k_rope_cache the rotated channels begin after those of k_cache, an even number.
        const int begin = params.rope.channels > 0 ? params.k_channels : 0;
        if (2 * slot < begin) return store(load(from, 2 * slot, 2 * slot + 1, begin), to, 2 * slot, 2 * slot + 1, begin);
        rotate_row(from + begin, to + begin, params.head_dim - begin, slot - begin / 2, position);
    }

    // Where the values are a view of the keys, v_new has no data: writing the keys writes the values.
    __device__ __forceinline__ void append_row(const AppendedKey& row, int head, int slot) const {
        const CacheParams& cache = params.cache;
        const KeyLocation location = row.location(params);
        if (static_cast<uint32_t>(location.page) >= static_cast<uint32_t>(cache.pages)) return;
        rotate_row(row_of(params.append.k_new, row.batch, row.in_tensor, head),
                   row_of(cache.k, location.page, location.row, head), params.head_dim, slot, row.position);
        if (params.append.v_new.data)
            store_value(load_value(row_of(params.append.v_new, row.batch, row.in_tensor, head), slot),
                        row_of(cache.v, location.page, location.row, head), slot);
    }

    // Rotates a query row of sequences of any lengths. `row`: counted over all sequences.
    __device__ __forceinline__ void rotate_ragged_query(int row, int head, int slot) const {
        const RaggedParams& ragged = params.ragged;
        const RaggedRow own = RaggedRow::of(ragged.queries, params.batch, row);
        if (own.batch < 0 || own.batch >= params.batch) return;
        const int position = ragged.positions ? ragged_position(ragged.positions, row) : query_position(own.batch, own.row);
        rotate_query(own.batch, ragged.queries.cu ? row : own.row, head, slot, position);
    }
};

template <class Kernel>
struct AppendBlock {
    static constexpr int kThreads = append_threads(Kernel::config.head_dim);
};

template <class Kernel, class T>
__global__ void __launch_bounds__(AppendBlock<Kernel>::kThreads, 1024 / AppendBlock<Kernel>::kThreads)
    append_kernel(const __grid_constant__ DecodeParams params, uint32_t new_rows, uint32_t slots) {
    allow_next_kernel();
    wait_for_previous_kernel();
    constexpr uint32_t kThreads = AppendBlock<Kernel>::kThreads;
    const uint32_t index = blockIdx.x * (kThreads / slots) + threadIdx.x / slots, slot = threadIdx.x % slots;
    const Append<T> body{params};
    const bool is_key = index < new_rows;
    const uint32_t item = is_key ? index : index - new_rows;
    const uint32_t rows = is_key ? params.cache.seqlen_new : params.seqlen_q, heads = is_key ? params.heads_k : params.heads_q;
    if (heads == 0) return;
    const uint32_t of_all = item / heads;
    const int head = static_cast<int>(item % heads);
    if (is_key) {
        const AppendedKey row = AppendedKey::of(params, static_cast<int>(of_all));
        if (row.batch >= 0) body.append_row(row, head, slot);
        return;
    }
    const LengthsParams& queries = params.ragged.queries;
    if (!rotates(params) || of_all >= (queries.cu ? static_cast<uint32_t>(queries.capacity) : params.batch * params.seqlen_q))
        return;
    if (params.ragged.active) return body.rotate_ragged_query(static_cast<int>(of_all), head, slot);
    const int batch = static_cast<int>(of_all / rows), row = static_cast<int>(of_all % rows);
    body.rotate_query(batch, row, head, slot, body.query_position(batch, row));
}

template <class Kernel, class T>
int launch_append(const DecodePlan& plan, const DecodeParams& params, cudaStream_t stream) {
    if (plan.append.blocks == 0) return cudaSuccess;
    return launch_dependent(append_kernel<Kernel, T>, plan.append.blocks, plan.append.threads, plan.append.shared_bytes, stream,
                            plan.dependent_launch, params, plan.append_rows, plan.append_threads_per_row);
}

}  // namespace libflash::cuda
