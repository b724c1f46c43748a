// Atomic additions to global memory without a return value (red).
#pragma once

namespace libflash::cuda {

// Adds four numbers per lane to the warp's 32 * 4 consecutive floats. The assignment of floats to lanes depends on the
// architecture: one instruction where it can add four floats (sm_90), else four instructions that are contiguous over the
// lanes.
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

    // Loads the sums that belong to this lane, in a later kernel.
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
