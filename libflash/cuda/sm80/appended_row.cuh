// The one new row of a sequence, in a step of decode that needs no kernel ahead: the thread block whose range the new key is in turns and appends it, and
// every thread block turns its own queries. What that needs is loaded first of all and used when the first tile of keys is about to be there.
// Nobody waits for what another sequence appends: that is no key of this one.
#pragma once

#include "cuda/sm80/append.cuh"

namespace libflash::cuda::sm80 {

// A thread has one slot of two channels, and all threads together one row or several, at least one of each key head that the thread block takes.
template <class T, int kHeadDim, int kThreads, int kHeads>
struct AppendedRow {
    using Body = Append<T>;
    static constexpr int kSlots = kHeadDim / 2, kRows = kThreads / kSlots;
    static_assert(kRows >= kHeads || kHeads == 1);

    const Body body;
    KeyLocation place;  // out of range: there is nothing to append here
    typename Body::Angle angle;
    typename Body::Two key, value;

    static __device__ __forceinline__ int slot() { return threadIdx.x % kSlots; }
    static __device__ __forceinline__ int head() { return threadIdx.x / kSlots; }  // beside the first one

    // `position` is that of the queries and of the new key; `in_range`: there is one, and it is of this thread block's range.
    __device__ __forceinline__ void load(const KeyLocations& places, int batch, int first_head, int position, bool in_range) {
        const AppendParams& append = body.params.append;
        place = in_range ? places.of(position) : KeyLocation{-1, 0};
        if (body.is_pair(slot())) angle = body.angle(slot(), position);
        if (!in_range) return;
        const int own_head = first_head + (kHeads > 1 ? min(head(), kHeads - 1) : 0);
        key = body.load(Body::row_of(append.k_new, batch, 0, own_head), slot());
        value = body.load_value(Body::row_of(append.v_new, batch, 0, own_head), slot());
    }

    __device__ __forceinline__ void append(int first_head) {
        const CacheParams& cache = body.params.cache;
        if (head() >= kHeads || static_cast<uint32_t>(place.place) >= static_cast<uint32_t>(cache.places)) return;
        if (body.is_pair(slot())) Body::rotate(key, angle);
        body.store(key, Body::row_of(cache.k, place.place, place.row, first_head + head()), slot());
        body.store_value(value, Body::row_of(cache.v, place.place, place.row, first_head + head()), slot());
    }

    // Queries in shared memory, where they are. `at(row, channel)`: one value.
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
