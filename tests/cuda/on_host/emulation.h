// Runs CUDA kernels on the host: each thread is a fiber that runs until a barrier or an exchange within its warp. One thread
// block runs at a time or, where thread blocks wait for each other, several. This is slow, and finds a race only if a random
// order makes a result wrong, but it runs the kernel sources themselves where there is no GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#undef __align__
#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __launch_bounds__
#undef __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // of all resident blocks: a kernel with such memory runs one block at a time

using std::max;
using std::min;

namespace emulation {

constexpr size_t kStackBytes = 1 << 16;
constexpr int kMaxWarps = 32;
constexpr int kMostResident = 5;                                    // thread blocks that run at the same time
alignas(1024) extern char shared_memory[kMostResident][235 << 10];  // dynamic shared memory of each of them
extern char* dynamic_shared;                                        // of the running thread block

struct Barrier {
    int waiting = 0, passed = 0;
    bool votes[3] = {};  // of three rounds
};

// Where a fiber or the scheduler goes on. The compiler's own setjmp, because swapcontext makes two system calls per switch.
struct Position {
    void* buffer[5];
};
// A function of its own: the compiler drops the return of a __builtin_setjmp whose function jumps away.
[[noreturn]] __attribute__((noipa)) inline void go_on_at(Position& position) { __builtin_longjmp(position.buffer, 1); }
// Saves the present position and goes on at another.
__attribute__((noipa)) inline void switch_to(Position& present, Position& next) {
    if (__builtin_setjmp(present.buffer) == 0) go_on_at(next);
}
// The same, where the next position is the begin of a new stack.
__attribute__((noipa)) inline void start(Position& present, const ucontext_t& context) {
    if (__builtin_setjmp(present.buffer) == 0) setcontext(&context);
}

// A stack begins once. Then the fibers of all launches use it one after another: a new context takes system calls.
struct Stack {
    bool begun = false;
    Position position;
    alignas(64) char bytes[kStackBytes];
    char distance[16 * 64];  // with the members before `bytes`, so that the stacks of a warp do not share sets of the cache
};

struct Fiber {
    // A fiber that waits for a change of a 32-bit word is not resumed before the change.
    const void* watched = nullptr;
    uint32_t seen = 0;     // the word's value when the wait began
    bool counted = false;  // whether each check of the word counts as a poll (count_polls)
    bool done = true;
    Stack* stack = nullptr;
};

// A warp whose threads have ended or all wait for a change of the same word.
struct Idle {
    const void* watched = nullptr;  // nullptr: the warp is not known to be idle
    uint32_t seen = 0;
    int64_t polls = 0;  // that each check counts
};

struct Block {
    unsigned index = 0;
    char* shared = nullptr;
    std::vector<Fiber> fibers;
    Barrier all, warps[kMaxWarps], named[16];
    Idle idle[kMaxWarps];
    Barrier cluster;                 // of its cluster, if this is the first thread block of one
    void* registers[kMaxWarps][32];  // what the lanes of a warp give to in_warp()
    unsigned running = 0;            // threads that have not ended
    std::vector<unsigned> slowness;  // a warp runs in one of this many rounds
};

struct Machine {
    Position scheduler;
    std::vector<Block> resident = std::vector<Block>(1);
    Block* block = nullptr;  // the running one
    unsigned block_index = 0, blocks = 0, threads = 0, thread = 0;
    unsigned end_of_warp = 0;              // the first thread after the running warp
    unsigned cluster = 1;                  // thread blocks of a cluster: neighbours in `resident`, which begin together
    unsigned most_resident = 1;            // for kernels with dynamic shared memory; above 1 they begin in random order
    int64_t polls = 0;                     // waits for other threads since the last arrival at an mbarrier
    std::function<void()> kernel, at_end;  // at_end: what each thread does after the kernel, if anything
    // Random order: warps are delayed at random, and asynchronous operations complete later and in any order. Off: everything
    // runs as soon as it can.
    bool random_order = false;
    std::mt19937 dice{1};
    std::vector<std::function<void()>> later;
};
extern Machine machine;

[[noreturn]] void report_deadlock();
// If no thread makes progress for very long, that is a deadlock.
inline void count_polls(int64_t count) {
    machine.polls += count;
    if (machine.polls > 3000000) report_deadlock();
}

inline uint32_t word_at(const void* address) {
    uint32_t word;
    std::memcpy(&word, address, sizeof word);
    return word;
}
inline bool goes_on_waiting(Fiber& fiber) {
    if (!fiber.watched) return false;
    if (word_at(fiber.watched) != fiber.seen) {
        fiber.watched = nullptr;
        return false;
    }
    count_polls(fiber.counted);
    return true;
}

// Saves the present position and begins a stack.
void begin(Position& present, Stack& stack);
// Goes on in the next thread of the warp, from `thread` on, that can run; if there is none, returns false.
inline bool go_on_from(unsigned thread, Position& present) {
    Fiber* const fibers = machine.block->fibers.data();
    for (; thread < machine.end_of_warp; ++thread) {
        if (fibers[thread].done || goes_on_waiting(fibers[thread])) continue;
        machine.thread = thread;
        Stack& stack = *fibers[thread].stack;
        stack.begun ? switch_to(present, stack.position) : begin(present, stack);
        return true;
    }
    return false;
}
// Lets the other threads run: those of the warp after this one, then the scheduler.
inline void yield() {
    Position& present = machine.block->fibers[machine.thread].stack->position;
    if (!go_on_from(machine.thread + 1, present)) switch_to(present, machine.scheduler);
}
// A thread that waits for another one yields.
inline void poll() {
    count_polls(1);
    yield();
}
inline void yield_until_changed(const void* word, bool counted) {
    Fiber& fiber = machine.block->fibers[machine.thread];
    fiber.watched = word, fiber.seen = word_at(word), fiber.counted = counted;
    yield();
}

// Returns whether that was the last arrival.
inline bool arrive(Barrier& barrier, int count) {
    if (++barrier.waiting < count) return false;
    barrier.waiting = 0;
    ++barrier.passed;
    return true;
}
inline void wait(Barrier& barrier, int count) {
    const int round = barrier.passed;
    if (arrive(barrier, count)) return;
    while (barrier.passed == round) yield_until_changed(&barrier.passed, false);
}

// The number of the running thread among all resident ones.
inline int resident_thread() {
    return static_cast<int>(machine.block - machine.resident.data()) * kMaxWarps * 32 + machine.thread;
}
inline int warp() { return machine.thread / 32; }
inline int lane() { return machine.thread % 32; }
inline void wait_for_warp() { wait(machine.block->warps[warp()], 32); }

// Whether no other lane waits in in_warp() or for the warp.
inline bool is_first_of_warp() { return machine.block->warps[warp()].waiting == 0; }

// An instruction of the whole warp: the last lane that calls this runs `what` for all lanes, the others wait for it. `mine`: what
// this lane gives and takes; what(lanes) gets a function of a lane's number that returns what that lane gave. It must not yield.
template <class Registers, class What>
void in_warp(Registers& mine, const What& what) {
    void*(&given)[32] = machine.block->registers[warp()];
    Barrier& barrier = machine.block->warps[warp()];
    given[lane()] = &mine;
    if (barrier.waiting == 31) what([&](int lane) -> Registers& { return *static_cast<Registers*>(given[lane]); });
    wait(barrier, 32);
}

// Sets the seed of the random order; 0: everything runs as soon as it can.
void set_random_order(int number);
unsigned roll(unsigned sides);
// In random order, delays a lane against the others of its warp, as long as nothing synchronises them.
void delay_at_random();

// Lets `block` be the running one.
inline void go_to(Block* block) {
    machine.block = block;
    if (!block) return;
    machine.block_index = block->index;
    dynamic_shared = block->shared;
}

// The thread block with this rank in the cluster of the running one.
inline Block& block_of_cluster(unsigned rank) {
    const size_t own = static_cast<size_t>(machine.block - machine.resident.data());
    return machine.resident[own / machine.cluster * machine.cluster + rank];
}
// Runs `what`, which must not yield, as if that thread block were the running one.
template <class What>
void in_block_of_cluster(unsigned rank, const What& what) {
    Block* const own = machine.block;
    go_to(&block_of_cluster(rank));
    what();
    go_to(own);
}

// Runs `what` now or, in random order, at a random later time. Then the block that runs now is again the running one.
void do_later(std::function<void()> what);

// `resident`: thread blocks that run at the same time, at least those of a cluster.
void launch(unsigned blocks, unsigned threads, std::function<void()> kernel, unsigned resident = 1, unsigned cluster = 1);

// The value of lane `from`.
template <class T>
T exchange(T x, int from) {
    struct Lane {
        T x;
        int from;
        T taken;
    } mine{x, from & 31, x};
    in_warp(mine, [](const auto& lanes) {
        for (int i = 0; i < 32; ++i) lanes(i).taken = lanes(lanes(i).from).x;
    });
    return mine.taken;
}

// Combines the numbers of all lanes, in the order of the lanes. Every lane gets the result.
template <class T, class Combine>
T reduce(T x, const Combine& combine) {
    in_warp(x, [&](const auto& lanes) {
        T all = lanes(0);
        for (int i = 1; i < 32; ++i) all = combine(all, lanes(i));
        for (int i = 0; i < 32; ++i) lanes(i) = all;
    });
    return x;
}

}  // namespace emulation

struct EmulatedIndex {
    unsigned emulation::Machine::* x_is;
    struct Value {
        unsigned emulation::Machine::* is;
        operator unsigned() const { return emulation::machine.*is; }
    } x{x_is};
};
inline EmulatedIndex threadIdx{&emulation::Machine::thread}, blockIdx{&emulation::Machine::block_index},
    gridDim{&emulation::Machine::blocks}, blockDim{&emulation::Machine::threads};

inline void __syncthreads() { emulation::wait(emulation::machine.block->all, static_cast<int>(emulation::machine.threads)); }
inline void __syncwarp() { emulation::wait_for_warp(); }
template <class T>
T __shfl_sync(unsigned, T x, int from) {
    return emulation::exchange(x, from);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
    return emulation::exchange(x, emulation::lane() ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T x, int by) {
    return emulation::exchange(x, max(emulation::lane() - by, by > emulation::lane() ? emulation::lane() : 0));
}
inline unsigned __ballot_sync(unsigned, bool vote) {
    return emulation::reduce(vote ? 1u << emulation::lane() : 0u, [](unsigned x, unsigned y) { return x | y; });
}
inline int __reduce_max_sync(unsigned, int x) {
    return emulation::reduce(x, [](int a, int b) { return max(a, b); });
}
inline int __reduce_add_sync(unsigned, int x) {
    return emulation::reduce(x, [](int a, int b) { return a + b; });
}
inline int __reduce_min_sync(unsigned, int x) {
    return emulation::reduce(x, [](int a, int b) { return min(a, b); });
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline int __syncthreads_or(int vote) {
    static int votes;
    __syncthreads();
    votes = 0;
    __syncthreads();
    votes |= vote;
    __syncthreads();
    return votes;
}
inline uint32_t __vmaxs2(uint32_t x, uint32_t y) {
    const auto larger = [&](int shift) { return static_cast<uint16_t>(max(int16_t(x >> shift), int16_t(y >> shift))); };
    return static_cast<uint32_t>(larger(16)) << 16 | larger(0);
}
inline int __vimax3_s32(int x, int y, int z) { return std::max(std::max(x, y), z); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
inline float __log2f(float x) { return std::log2(x); }
inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<uint32_t>(bits)); }
inline long long __double_as_longlong(double x) {
    long long bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline double __hiloint2double(int high, int low) {
    const uint64_t bits = uint64_t{static_cast<uint32_t>(high)} << 32 | static_cast<uint32_t>(low);
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline int __double2loint(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<int>(static_cast<uint32_t>(bits));
}
inline float __double2float_rz(double x) {
    const float nearest = static_cast<float>(x);
    return std::fabs(nearest) > std::fabs(x) ? std::nextafter(nearest, 0.0f) : nearest;
}
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
template <class Number>
Number atomicAdd(Number* address, Number x) {
    return std::exchange(*address, *address + x);
}
template <class Integer>
Integer atomicMin(Integer* address, Integer x) {
    return std::exchange(*address, std::min(*address, x));
}
template <class Integer>
Integer atomicMax(Integer* address, Integer x) {
    return std::exchange(*address, std::max(*address, x));
}
#define cudaFuncSetAttribute(...) cudaSuccess
#define cudaGetLastError() cudaSuccess
