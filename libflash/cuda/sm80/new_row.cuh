// The one new row of a sequence, in a step of decode that needs no kernel ahead: the thread block whose range the new key is in turns and appends it, and
// every thread block turns its own queries. What that needs is loaded first of all and used when the first tile of keys is about to be there.
// Nobody waits for what another sequence appends: that is no key of this one.
#pragma once

#include "cuda/sm80/append.cuh"

namespace libflash::cuda::sm80 {

// A thread has slots of two channels, and all threads together one row or several.
template <class T, int kHeadDim, int kThreads>
struct NewRow {
    using Body = Append<T>;
    static constexpr int kSlots = kHeadDim / 2;
    static constexpr int kHeld = kSlots > kThreads ? kSlots / kThreads : 1;
    static constexpr int kRows = kSlots < kThreads ? kThreads / kSlots : 1;

    const Body body;
    KeyPlace place;  // out of range: there is nothing to append here
    typename Body::Angle angles[kHeld];
    typename Body::Two keys[kHeld], values[kHeld];

    static __device__ __forceinline__ int slot(int held) { return threadIdx.x % kSlots + held * kThreads; }
    __device__ __forceinline__ bool is_here() const {
        return threadIdx.x < kSlots && static_cast<uint32_t>(place.place) < static_cast<uint32_t>(body.params.cache.places);
    }

    // `position` is that of the queries and of the new key; `in_range`: there is one, and it is of this thread block's range.
    __device__ __forceinline__ void load(const KeyPlaces& places, int batch, int head, int position, bool in_range) {
        const AppendParams& append = body.params.append;
        place = in_range ? places.of(position) : KeyPlace{-1, 0};
#pragma unroll
        for (int n = 0; n < kHeld; ++n) {
            if (body.is_pair(slot(n))) angles[n] = body.angle(slot(n), position);
            if (!in_range) continue;
            keys[n] = body.load(Body::row_of(append.k_new, batch, 0, head), slot(n));
            values[n] = body.load_value(Body::row_of(append.v_new, batch, 0, head), slot(n));
        }
    }

    __device__ __forceinline__ void append(int head) {
        if (!is_here()) return;
        const CacheParams& cache = body.params.cache;
#pragma unroll
        for (int n = 0; n < kHeld; ++n) {
            if (body.is_pair(slot(n))) Body::turn(keys[n], angles[n]);
            Body::store(keys[n], Body::row_of(cache.k, place.place, place.row, head), body.params.head_dim);
            Body::store(values[n], Body::row_of(cache.v, place.place, place.row, head), body.params.head_dim_v);
        }
    }

    // Queries in shared memory, where they are. `at(row, channel)`: one value.
    template <class At>
    __device__ __forceinline__ void turn_queries(int rows, const At& at) const {
#pragma unroll 1
        for (int row = kRows == 1 ? 0 : threadIdx.x / kSlots; row < rows; row += kRows) {
#pragma unroll
            for (int n = 0; n < kHeld; ++n) {
                if (!body.is_pair(slot(n))) continue;
                const bool apart = !body.params.append.interleaved;
                T& x = at(row, apart ? slot(n) : 2 * slot(n));
                T& y = at(row, apart ? slot(n) + body.params.append.pairs : 2 * slot(n) + 1);
                typename Body::Two two{0, 0, x, y};
                Body::turn(two, angles[n]);
                x = two.x;
                y = two.y;
            }
        }
    }
};

}  // namespace libflash::cuda::sm80
