// Values that all lanes of a warp have in common.
#pragma once

#include <cstdint>

namespace libflash::cuda {

// Returns `value`, which all lanes of the warp have in common, in a uniform register: descriptors of wgmma that are computed
// from it need no instructions per lane. (The compiler cannot know it of values that went through shared memory or a loop.)
__device__ __forceinline__ uint32_t uniform(uint32_t value) { return __reduce_or_sync(0xffffffffu, value); }

}  // namespace libflash::cuda
