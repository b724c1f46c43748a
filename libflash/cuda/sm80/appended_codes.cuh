// Append and rotary embedding inside the decode kernel over a cache of 8-bit codes, for one new row per sequence: as
// appended_row.cuh, and the new key and value are divided by their scale, rounded and saturated (attention/quantize.cuh). Scales
// that belong to rows are computed and written. Registers are scarce, so the inputs are copied to shared memory, before the first
// tile of keys.
#pragma once

#include "cuda/attention/append.cuh"
#include "cuda/attention/quantize.cuh"
#include "cuda/ptx/cp_async.cuh"

namespace libflash::cuda::sm80 {

// A thread has one slot of two channels, as in AppendedRow.
template <class T, int kHeadDim, int kThreads, int kHeads>
struct AppendedCodes {
    using Body = Append<T>;
    using Two = typename Body::Two;
    static constexpr int kSlots = kHeadDim / 2, kRows = kThreads / kSlots, kWarps = kThreads / 32;
    static_assert(kRows >= kHeads || kHeads == 1);
    // In shared memory: the key and the value of each head, cosines and sines, the scales, the largest magnitude of each warp for
    // keys and for values, and the block table entry.
    static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T)), kRotaryBytes = kSlots * 4;
    static constexpr int kNumbers = 2 * kHeads * kRowBytes + 2 * kRotaryBytes;  // where the numbers after these rows begin
    static constexpr int kBytes = kNumbers + (2 * kHeads + 2 * kWarps + 1) * 4;

    const Body body;
    char* const memory;  // 16-byte aligned

    static __device__ __forceinline__ int slot() { return threadIdx.x % kSlots; }
    static __device__ __forceinline__ int head() { return threadIdx.x / kSlots; }  // relative to the first key head
    // part: 0 for the key and the cosines, 1 for the value and the sines.
    __device__ __forceinline__ T* row(int head, int part) const {
        return reinterpret_cast<T*>(memory + (2 * head + part) * kRowBytes);
    }
    __device__ __forceinline__ char* rotary(int part) const { return memory + 2 * kHeads * kRowBytes + part * kRotaryBytes; }
    __device__ __forceinline__ float& scale(int head, int part) const {
        return reinterpret_cast<float*>(memory + kNumbers)[2 * head + part];
    }
    __device__ __forceinline__ uint32_t& largest(int warp, int part) const {
        return reinterpret_cast<uint32_t*>(memory + kNumbers)[2 * kHeads + 2 * warp + part];
    }
    __device__ __forceinline__ int32_t* entry() const {
        return reinterpret_cast<int32_t*>(memory + kNumbers) + 2 * kHeads + 2 * kWarps;
    }

    // Copies an even number of bytes, without reading past them. All lanes of a warp call it.
    static __device__ __forceinline__ void copy(char* to, const void* from, int bytes) {
        const char* const bytes_of = static_cast<const char*>(from);
        const int lane = threadIdx.x % 32, whole = reinterpret_cast<uintptr_t>(from) % 16 == 0 ? bytes / 16 : 0;
        for (int i = lane; i < whole; i += 32) cp_async_16(shared_address(to + i * 16), bytes_of + i * 16, true);
#pragma unroll 1
        for (int i = whole * 8 + lane; i < bytes / 2; i += 32)
            reinterpret_cast<uint16_t*>(to)[i] = reinterpret_cast<const uint16_t*>(bytes_of)[i];
    }

    // Starts the copies, in a separate cp.async group; the warps copy different rows. `position`: of the queries and of the new
    // key. `in_range`: there is a new key, and it is in this thread block's split.
    __device__ __forceinline__ void load(const KeyLocations& locations, int batch, int first_head, int position,
                                         bool in_range) const {
        const DecodeParams& params = body.params;
        const AppendParams& append = params.append;
        const int warp = threadIdx.x / 32;
        if (append.cos) {
            const int64_t at = min(position, append.positions - 1);  // clamped to the tables of cosines and sines
            const int bytes = append.is_float ? 4 : static_cast<int>(sizeof(T));
#pragma unroll 1
            for (int part = (kWarps - 1 - warp) % kWarps; part < 2; part += kWarps)
                copy(rotary(part),
                     static_cast<const char*>(part ? append.sin : append.cos) +
                         at * (part ? append.sin_row : append.cos_row) * bytes,
                     append.pairs * bytes);
        }
        if (in_range) {
#pragma unroll 1
            for (int i = warp; i < 2 * kHeads; i += kWarps) {
                const int head = i / 2, part = i % 2;
                const RowsParams& rows = part ? append.v_new : append.k_new;
                const CacheScaleParams& scales = part ? params.v_scale : params.k_scale;
                copy(reinterpret_cast<char*>(row(head, part)), Body::row_of(rows, batch, 0, first_head + head),
                     (part ? params.head_dim_v : params.head_dim) * static_cast<int>(sizeof(T)));
                if (threadIdx.x % 32 == 0 && scales.data && !scales.of_rows)
                    cp_async_4(shared_address(&scale(head, part)), scale_address(scales, batch, 0, 0, first_head + head));
            }
            if (threadIdx.x == 0) locations.begin_lookup(entry(), position);
        }
        cp_async_commit();
    }

    // Waits for the copies of load(). all_tiles: kTiles cp.async groups have been committed after that of load(); they need not
    // be complete.
    template <int kTiles>
    static __device__ __forceinline__ void wait(bool all_tiles) {
        if (all_tiles) {
            cp_async_wait<kTiles>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
    }

    __device__ __forceinline__ float rotary_number(int part) const {
        return load_number<T>(rotary(part), slot(), body.params.append.is_float);
    }
    __device__ __forceinline__ Two two_of(const T* from, int first, int second, int channels) const {
        return Body::load(from, first, second, channels);
    }
    // The thread's two channels of the new key, rotated, or of the new value.
    __device__ __forceinline__ Two two(int part) const {
        const DecodeParams& params = body.params;
        const T* const from = row(kHeads > 1 ? min(head(), kHeads - 1) : 0, part);
        if (part) return two_of(from, 2 * slot(), 2 * slot() + 1, params.head_dim_v);
        Two key = two_of(from, body.first(slot()), body.second(slot()), params.head_dim);
        if (body.is_pair(slot())) Body::rotate(key, {rotary_number(0), rotary_number(1)});
        return key;
    }

    // The scale of the head's new row by its largest magnitude, as scale_for() computes it.
    __device__ __forceinline__ float scale_of_row(int part) const {
        constexpr int kOfHead = kSlots / 32;  // warps
        uint32_t most = 0;
#pragma unroll
        for (int warp = 0; warp < kOfHead; ++warp) most = max(most, largest(head() * kOfHead + warp, part));
        return scale_of_magnitude(most, body.params.code);
    }
    __device__ __forceinline__ void find_largest(const Two& two, int part) const {
        const uint32_t most = max(magnitude_bits(two.x, body.params.code), magnitude_bits(two.y, body.params.code));
        const uint32_t of_warp = static_cast<uint32_t>(__reduce_max_sync(0xffffffffu, static_cast<int>(most)));
        if (threadIdx.x % 32 == 0) largest(threadIdx.x / 32, part) = of_warp;
    }

    // Writes the new key and value to the cache. Called after wait(), by all threads. A barrier must follow before the new row is
    // loaded.
    __device__ __forceinline__ void append(const KeyLocations& locations, int batch, int first_head, int position) const {
        const DecodeParams& params = body.params;
        const CacheParams& cache = params.cache;
        const KeyLocation location = locations.finish_lookup(entry(), position);
        if (static_cast<uint32_t>(location.page) >= static_cast<uint32_t>(cache.pages)) return;
        if (params.k_scale.of_rows || params.v_scale.of_rows) {
#pragma unroll 1
            for (int part = 0; part < 2; ++part) find_largest(two(part), part);
            __syncthreads();
        }
        if (head() >= kHeads) return;
#pragma unroll 1
        for (int part = 0; part < 2; ++part) {
            const CacheScaleParams& scales = part ? params.v_scale : params.k_scale;
            const RowsParams& rows = part ? cache.v : cache.k;
            const int channels = part ? params.head_dim_v : params.head_dim, head_k = first_head + head();
            float factor = 1.0f;
            if (scales.data) {
                factor = scales.of_rows ? scale_of_row(part) : scale(head(), part);
                if (scales.of_rows && slot() == 0) *scale_address(scales, batch, location.page, location.row, head_k) = factor;
            }
            const Two own = two(part);
            const int first = part ? 2 * slot() : body.first(slot()), second = part ? 2 * slot() + 1 : body.second(slot());
            uint8_t* const to =
                static_cast<uint8_t*>(rows.data) + location.page * rows.batch + location.row * rows.row + head_k * rows.head;
            if (first < channels) to[first] = code_of(quotient(widen(own.x), factor), params.code);
            if (second < channels) to[second] = code_of(quotient(widen(own.y), factor), params.code);
        }
    }

    // Rotates the queries in place, in shared memory. at(row, channel): reference to one value.
    template <class At>
    __device__ __forceinline__ void rotate_queries(int rows, const At& at) const {
        if (!body.is_pair(slot())) return;
        const typename Body::Angle angle{rotary_number(0), rotary_number(1)};
#pragma unroll 1
        for (int row = threadIdx.x / kSlots; row < rows; row += kRows) {
            T &x = at(row, body.first(slot())), &y = at(row, body.second(slot()));
            Two two{x, y};
            Body::rotate(two, angle);
            x = two.x;
            y = two.y;
        }
    }
};

}  // namespace libflash::cuda::sm80
