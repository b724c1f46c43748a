// Stages of shared memory that one producer fills and several consumers empty, in turn.
#pragma once

#include "cuda/ptx/barrier.cuh"

namespace libflash::cuda::sm90 {

// The barriers of a ring, in shared memory.
template <int kStages>
struct RingBarriers {
    uint64_t full[kStages], empty[kStages];

    __device__ __forceinline__ void init(int consumers) {
        for (int i = 0; i < kStages; ++i) {
            MBarrier{shared_address(full + i)}.init(1);
            MBarrier{shared_address(empty + i)}.init(consumers);
        }
    }
};

// Where one side of it stands.
template <int kStages>
struct Ring {
    uint32_t barriers;  // address of RingBarriers
    int stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ explicit Ring(const RingBarriers<kStages>& of) : barriers(shared_address(&of)) {}
    __device__ __forceinline__ MBarrier full() const { return {barriers + stage * 8}; }
    __device__ __forceinline__ MBarrier empty() const { return {barriers + (kStages + stage) * 8}; }
    __device__ __forceinline__ void wait_full() const { full().wait(phase); }
    __device__ __forceinline__ void wait_empty() const { empty().wait(phase ^ 1); }
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

}  // namespace libflash::cuda::sm90
