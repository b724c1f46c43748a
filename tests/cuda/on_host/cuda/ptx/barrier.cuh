// Replaces the library's header. A waiting thread yields to the others.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "cuda/ptx/cp_async.cuh"
#include "emulation.h"

namespace libflash::cuda {

struct MBarrier {
    uint32_t address;
    struct State {
        uint16_t needed, pending : 15, phase : 1;
        int32_t bytes;
    };
    static_assert(sizeof(State) == 8, "as on the device");

    State& state() const { return *reinterpret_cast<State*>(shared_pointer(address)); }
    void init(uint32_t arrivals) const {
        const uint16_t count = static_cast<uint16_t>(arrivals);
        state() = {count, count, 0, 0};
    }
    void finish_phase() const {
        if (state().pending > 0 || state().bytes != 0) return;
        state().phase ^= 1;
        state().pending = state().needed;
    }
    void arrive() const {
        count_arrival();
        emulation::delay_at_random();  // reveals a thread that still reads memory that it has released
    }
    void arrive_in_cluster(uint32_t rank) const {
        emulation::in_block_of_cluster(rank, [this] { count_arrival(); });
        emulation::delay_at_random();
    }
    void count_arrival() const {
        emulation::machine.polls = 0;
        if (state().pending == 0) {
            std::puts("WRONG: more arrivals at a barrier than it was made for");
            std::fflush(stdout);
            std::_Exit(3);
        }
        --state().pending;
        finish_phase();
    }
    void arrive_and_expect(uint32_t bytes) const {
        state().bytes += static_cast<int32_t>(bytes);
        arrive();
    }
    void have_come(uint32_t bytes) const {
        state().bytes -= static_cast<int32_t>(bytes);
        finish_phase();
    }
    bool try_wait(uint32_t parity) const { return state().phase != parity; }
    bool test_wait(uint32_t parity) const { return try_wait(parity); }
    void wait(uint32_t parity) const {
        emulation::delay_at_random();
        while (!try_wait(parity)) emulation::yield_until_changed(&state(), true);
    }
};

inline void wait_for_cluster() {
    emulation::wait(emulation::block_of_cluster(0).cluster,
                    static_cast<int>(emulation::machine.cluster * emulation::machine.threads));
}
inline void fence_barrier_init() {}
inline void fence_shared_for_async() {}
inline void named_barrier_wait(int id, int threads) { emulation::wait(emulation::machine.block->named[id], threads); }
inline void named_barrier_arrive(int id, int threads) { emulation::arrive(emulation::machine.block->named[id], threads); }
// The votes of a round are kept until all threads have arrived in the next round, so that every thread can read them.
inline bool named_barrier_or(int id, int threads, bool condition) {
    emulation::Barrier& barrier = emulation::machine.block->named[id];
    const int round = barrier.passed;
    barrier.votes[round % 3] |= condition;
    barrier.votes[(round + 1) % 3] = false;
    emulation::wait(barrier, threads);
    return barrier.votes[round % 3];
}
template <int>
void decrease_registers() {}
template <int>
void increase_registers() {}
inline bool elect_one() { return emulation::lane() == 0; }

}  // namespace libflash::cuda
