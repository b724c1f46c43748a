// The fast reciprocal.
#pragma once

namespace libflash::cuda {

// 1 / x, with a relative error of at most 2^-23 (PTX ISA); 0 for infinity.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace libflash::cuda
