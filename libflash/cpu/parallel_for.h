// Parallel loops over tasks, on the calling thread and threads of the pool. run_tasks is an ordinary function, not a template:
// the engine is compiled once for each instruction set, and the linker could keep an AVX-512 copy of a shared template instance
// for all callers.
#pragma once

#include <cstdint>

namespace libflash::cpu {

// Calls body(context, task, thread) for every task in [0, tasks). Tasks start in ascending order, each on the next free thread.
// `thread` is in [0, threads), 0 is the calling thread, and no two calls with the same `thread` overlap. All tasks are done even
// if the pool provides fewer threads. The first exception of a body stops the loop and is rethrown here.
void run_tasks(int64_t tasks, int threads, void (*body)(const void* context, int64_t task, int thread), const void* context);

// The same for any callable body(task, thread).
template <class Body>
void parallel_for(int64_t tasks, int threads, const Body& body) {
    run_tasks(
        tasks, threads, [](const void* context, int64_t task, int thread) { (*static_cast<const Body*>(context))(task, thread); },
        &body);
}

}  // namespace libflash::cpu
