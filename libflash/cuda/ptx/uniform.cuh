// Values that all lanes of a warp have in common.
#pragma once

#include <cstdint>

namespace libflash::cuda {

// Returns `value`, which must be the same in all lanes of the warp, in a uniform register. Descriptors of wgmma that are computed
// from the result need no instructions per lane. (Of a value that went through shared memory or a loop, the compiler does not
// know that it is the same in all lanes.)
__device__ __forceinline__ uint32_t uniform(uint32_t value) { return __reduce_or_sync(0xffffffffu, value); }

}  // namespace libflash::cuda
