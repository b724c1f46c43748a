// Append and rotary embedding inside the decode kernel, for one new row per sequence: the thread block whose split contains the
// new key rotates and appends it; every thread block rotates its own queries. The inputs are loaded first and used shortly before
// the first tile of keys arrives. Thread blocks need not wait for each other, because a row that is appended to one sequence is
// not a key of another sequence.
#pragma once

#include "cuda/attention/append.cuh"

namespace libflash::cuda::sm80 {

// A thread has one slot: two channels of a row. All threads together have kRows rows, at least one per key head of the thread
// block.
template <class T, int kHeadDim, int kThreads, int kHeads>
struct AppendedRow {
    using Body = Append<T>;
    static constexpr int kSlots = kHeadDim / 2, kRows = kThreads / kSlots;
    static_assert(kRows >= kHeads || kHeads == 1);

    const Body body;
    KeyLocation location;  // invalid if this thread block appends nothing
    typename Body::Angle angle;
    typename Body::Two key, value;

    static __device__ __forceinline__ int slot() { return threadIdx.x % kSlots; }
    static __device__ __forceinline__ int head() { return threadIdx.x / kSlots; }  // relative to the first key head

    // Loads the inputs. `position`: of the queries and of the new key. `in_range`: there is a new key, and it is in this thread
    // block's split.
    __device__ __forceinline__ void load(const KeyLocations& locations, int batch, int first_head, int position, bool in_range) {
        const AppendParams& append = body.params.append;
        location = in_range ? locations.of(position) : KeyLocation{-1, 0};
        if (body.is_pair(slot())) angle = body.angle(slot(), position);
        if (!in_range) return;
        const int own_head = first_head + (kHeads > 1 ? min(head(), kHeads - 1) : 0);
        key = body.load(Body::row_of(append.k_new, batch, 0, own_head), slot());
        value = body.load_value(Body::row_of(append.v_new, batch, 0, own_head), slot());
    }

    __device__ __forceinline__ void append(int first_head) {
        const CacheParams& cache = body.params.cache;
        if (head() >= kHeads || static_cast<uint32_t>(location.page) >= static_cast<uint32_t>(cache.pages)) return;
        if (body.is_pair(slot())) Body::rotate(key, angle);
        body.store(key, Body::row_of(cache.k, location.page, location.row, first_head + head()), slot());
        body.store_value(value, Body::row_of(cache.v, location.page, location.row, first_head + head()), slot());
    }

    // Rotates the queries in place, in shared memory. at(row, channel): reference to one value.
    template <class At>
    __device__ __forceinline__ void rotate_queries(int rows, const At& at) const {
        if (!body.is_pair(slot())) return;
#pragma unroll 1
        for (int row = threadIdx.x / kSlots; row < rows; row += kRows) {
            T &x = at(row, body.first(slot())), &y = at(row, body.second(slot()));
            typename Body::Two two{x, y};
            Body::rotate(two, angle);
            x = two.x;
            y = two.y;
        }
    }
};

}  // namespace libflash::cuda::sm80
