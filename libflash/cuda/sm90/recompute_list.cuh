// The work tiles that must be recomputed with the exact maximum of every tile, because rows of them overflowed under a kept
// maximum. The list is in shared memory: consumer warps add to it; all warps read it after the first pass over the work tiles.
#pragma once

#include <climits>
#include <cstdint>

namespace libflash::cuda::sm90 {

struct RecomputeList {
    static constexpr int kCapacity = 128;
    int begin, end;          // every index in the list lies in [begin, end)
    int count;               // beyond kCapacity: all warps of all work tiles are recomputed
    int entries[kCapacity];  // index of the work tile * 16 + consumer warp

    __device__ __forceinline__ void clear() {
        begin = INT_MAX;
        end = count = 0;
    }
    // One lane calls it for its warp, which has overflowed rows in the work tile of this index.
    __device__ __forceinline__ void add(int index, int warp) {
        atomicMin(&begin, index);
        atomicMax(&end, index + 1);
        const int entry = atomicAdd(&count, 1);
        if (entry < kCapacity) entries[entry] = index * 16 + warp;
    }
    __device__ __forceinline__ int first_index() const { return *const_cast<const volatile int*>(&begin); }
    __device__ __forceinline__ int end_index() const { return *const_cast<const volatile int*>(&end); }
    // The consumer warps that must recompute the work tile of this index, a bit each.
    __device__ __forceinline__ uint32_t warps_of(int index) const {
        const int entry_count = *const_cast<const volatile int*>(&count);
        if (entry_count > kCapacity) return 0xffffffffu;
        uint32_t warps = 0;
        for (int i = 0; i < entry_count; ++i) {
            const int entry = *const_cast<const volatile int*>(entries + i);
            if (entry / 16 == index) warps |= 1u << entry % 16;
        }
        return warps;
    }
};

}  // namespace libflash::cuda::sm90
