// Replaces the library's header.
#pragma once

#include "emulation.h"

namespace libflash::cuda {

inline int count_down(int* counter) { return (*counter)--; }
inline void acquire_counted() {}
inline void wait_for_count(const int* counter, int value) {
    emulation::fall_behind();
    while (*counter != value) emulation::poll();
}
inline void set_count(int* counter, int value) {
    emulation::machine.polls = 0;
    *counter = value;
}
inline float4 load_counted(const float* four) { return make_float4(four[0], four[1], four[2], four[3]); }

}  // namespace libflash::cuda
