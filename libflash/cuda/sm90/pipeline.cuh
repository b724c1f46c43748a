// A pipeline of shared memory stages: producers, usually one, fill the stages in turn; consumers read and release them.
#pragma once

#include "cuda/ptx/barrier.cuh"

namespace libflash::cuda::sm90 {

// The full and empty mbarriers of a pipeline, in shared memory. The arrival counts are those of consumers and producers.
template <int kStages>
struct PipelineBarriers {
    uint64_t full[kStages], empty[kStages];

    __device__ __forceinline__ void init(int consumers, int producers = 1) {
        for (int i = 0; i < kStages; ++i) {
            MBarrier{shared_address(full + i)}.init(producers);
            MBarrier{shared_address(empty + i)}.init(consumers);
        }
    }
};

// The current stage and phase of one producer or consumer. `phase` is the parity of the phase in which the stage becomes full.
// The stage is empty for a producer when the previous phase of the empty barrier has ended, so the first wait passes at once.
template <int kStages>
struct PipelineState {
    uint32_t barriers;  // address of PipelineBarriers
    int stage;
    uint32_t phase;

    __device__ __forceinline__ explicit PipelineState(const PipelineBarriers<kStages>& pipeline, int first_stage = 0,
                                                      uint32_t first_phase = 0)
        : barriers(shared_address(&pipeline)), stage(first_stage), phase(first_phase) {}
    __device__ __forceinline__ MBarrier full() const { return {barriers + stage * 8}; }
    __device__ __forceinline__ MBarrier empty() const { return empty_of(stage); }
    __device__ __forceinline__ MBarrier empty_of(int a_stage) const { return {barriers + (kStages + a_stage) * 8}; }
    __device__ __forceinline__ void wait_full() const { full().wait(phase); }
    __device__ __forceinline__ void wait_empty() const { empty().wait(phase ^ 1); }
    // For a producer: waits until all stages that it has filled are released.
    __device__ __forceinline__ void wait_all_empty() const {
#pragma unroll
        for (int i = 0; i < kStages; ++i) empty_of(i).wait(i < stage ? phase : phase ^ 1);
    }
    // Test without waiting.
    __device__ __forceinline__ bool is_full() const { return full().test_wait(phase); }
    __device__ __forceinline__ bool is_empty() const { return empty().test_wait(phase ^ 1); }
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// A consumer warp releases a stage by one arrival. The matrix products of the warp order this arrival after the reads of all its
// lanes. racecheck sees only the order of an arriving and a waiting thread, so in a build for racecheck every lane arrives.
#ifdef LIBFLASH_RACECHECK
constexpr bool kAllLanesArrive = true;
#else
constexpr bool kAllLanesArrive = false;
#endif
constexpr int kArrivalsOfWarp = kAllLanesArrive ? 32 : 1;
__device__ __forceinline__ bool arrives_for_warp(int lane) { return kAllLanesArrive || lane == 0; }

}  // namespace libflash::cuda::sm90
