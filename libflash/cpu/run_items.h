// Work spread over threads: the thread of the caller and some of a pool that the library keeps. An ordinary function, not a
// template: the engine is compiled once for each instruction set, and whatever it instantiates of the standard library could be
// the copy that the linker keeps for everybody.
#pragma once

#include <cstdint>

namespace libflash::cpu {

// Calls body(context, item, thread) for every item in [0, items), in order of item but on whichever thread is free next. `thread`
// is in [0, threads), 0 is the caller's, and no two calls with the same `thread` overlap. If the pool gives fewer threads, the
// work is done all the same. An exception of a body ends the work and is thrown again here.
void run_items(int64_t items, int threads, void (*body)(const void* context, int64_t item, int thread), const void* context);

// The same for any callable body(item, thread).
template <class Body>
void parallel_for(int64_t items, int threads, const Body& body) {
    run_items(
        items, threads, [](const void* context, int64_t item, int thread) { (*static_cast<const Body*>(context))(item, thread); },
        &body);
}

}  // namespace libflash::cpu
