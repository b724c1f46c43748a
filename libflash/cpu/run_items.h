// parallel_for() behind an ordinary function, for the engine: it is compiled once for each instruction set, and whatever it
// instantiates of the standard library could be the copy that the linker keeps for everybody.
#pragma once

#include <cstdint>

namespace libflash::cpu {

void run_items(int64_t items, int threads, void (*body)(const void* context, int64_t item, int thread), const void* context);

}  // namespace libflash::cpu
