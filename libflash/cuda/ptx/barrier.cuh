// Barriers of sm_90: mbarriers in shared memory, which count arrivals and bytes, and the sixteen named barriers of a thread
// block.
//
// A phase of an mbarrier ends when all expected arrivals and all announced bytes have come. wait(parity) returns once the phase
// of that parity has ended: on a new barrier, parity 1 passes at once, and parity 0 after the first phase.
#pragma once

#include <cstdint>

#include "cuda/ptx/cp_async.cuh"

namespace libflash::cuda {

struct MBarrier {
    uint32_t address;  // of 8 bytes in shared memory, aligned to 8

    // Called by one thread, before fence_barrier_init() and a barrier of the thread block.
    __device__ __forceinline__ void init(uint32_t arrivals) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
    }
    __device__ __forceinline__ void arrive() const {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
    }
    // Arrives at the barrier with the same address in a thread block of the cluster.
    __device__ __forceinline__ void arrive_in_cluster(uint32_t rank) const {
        asm volatile(
            "{\n"
            ".reg .b32 there;\n"
            "mapa.shared::cluster.u32 there, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
            "}" ::"r"(address),
            "r"(rank)
            : "memory");
    }
    // One arrival that also announces the bytes that asynchronous copies will bring.
    __device__ __forceinline__ void arrive_and_expect(uint32_t bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
    }
    // Whether the phase has ended. May suspend the thread for a while.
    __device__ __forceinline__ bool try_wait(uint32_t parity) const {
        uint32_t ended;
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(ended)
            : "r"(address), "r"(parity)
            : "memory");
        return ended != 0;
    }
    // The same without suspending the thread: for a test whose result is used later.
    __device__ __forceinline__ bool test_wait(uint32_t parity) const {
        uint32_t ended;
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(ended)
            : "r"(address), "r"(parity)
            : "memory");
        return ended != 0;
    }
    // With LIBFLASH_BOUNDED_WAITS a wait gives up after about 100 ms, for debugging deadlocks. (A trap instead would make the
    // compiler wait after every wgmma.)
    __device__ __forceinline__ void wait(uint32_t parity) const {
#ifdef LIBFLASH_BOUNDED_WAITS
        const long long start = clock64();
        while (!try_wait(parity) && clock64() - start < (1ll << 28)) {
        }
#else
        while (!try_wait(parity)) {
        }
#endif
    }
};

// Waits until all threads of the cluster have called this.
__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

// Makes initialised mbarriers visible to asynchronous copies and to the cluster.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Makes this thread's writes to shared memory visible to TMA and wgmma that start after a following barrier.
__device__ __forceinline__ void fence_shared_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Named barriers 1 to 15 (0 is __syncthreads). `threads` counts the threads that wait and those that only arrive, in whole
// warps.
__device__ __forceinline__ void named_barrier_wait(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same with a vote: whether the condition holds in any of the threads, all of which wait.
__device__ __forceinline__ bool named_barrier_or(int id, int threads, bool condition) {
    uint32_t any;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.u32 q, %3, 0;\n"
        "bar.red.or.pred p, %1, %2, q;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(condition))
        : "memory");
    return any != 0;
}

// Change the number of registers per thread; all warps of the warpgroup call them. Only in kernels with a register limit at
// compile time.
template <int kRegisters>
__device__ __forceinline__ void decrease_registers() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "what setmaxnreg knows");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void increase_registers() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "what setmaxnreg knows");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// True in one lane of a full warp, always the same lane.
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(elected));
    return elected != 0;
}

}  // namespace libflash::cuda
