// Replaces the library's header.
#pragma once

#include "emulation.h"

namespace libflash::cuda {

inline void wait_for_count(const int* counter, int value) {
    emulation::delay_at_random();
    while (*counter != value) emulation::poll();
}
inline void set_count(int* counter, int value) {
    emulation::machine.polls = 0;
    *counter = value;
}
inline int add_to_count(int* counter) {
    emulation::machine.polls = 0;
    return (*counter)++;
}

}  // namespace libflash::cuda
