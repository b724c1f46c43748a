// Additions to global memory by many thread blocks at once, without an answer.
#pragma once

namespace libflash::cuda {

// Four numbers a lane, to be added to 32 * 4 consecutive floats that the whole warp owns a share of. Which lane adds to which is the
// architecture's choice: one instruction where it takes four floats (sm_90), else four that are contiguous over the lanes.
struct WarpQuad {
    __device__ static __forceinline__ void add(float* quads, int lane, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(quads + lane * 4), "f"(x[0]), "f"(x[1]),
                     "f"(x[2]), "f"(x[3])
                     : "memory");
#else
#pragma unroll
        for (int e = 0; e < 4; ++e)
            asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(quads + e * 32 + lane), "f"(x[e]) : "memory");
#endif
    }

    // The sums of this lane, in a later kernel.
    __device__ static __forceinline__ void load(const float* quads, int lane, float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
        const float4 sums = *reinterpret_cast<const float4*>(quads + lane * 4);
        x[0] = sums.x, x[1] = sums.y, x[2] = sums.z, x[3] = sums.w;
#else
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = quads[e * 32 + lane];
#endif
    }
};

}  // namespace libflash::cuda
