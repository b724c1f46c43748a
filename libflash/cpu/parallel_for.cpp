#include "cpu/parallel_for.h"

#include <atomic>
#include <exception>

#include "cpu/cancel.h"
#include "cpu/thread_pool.h"
#include "problem/error.h"

namespace libflash::cpu {
namespace {

constexpr int kInterruptInterval = 50;  // milliseconds between interrupt checks while pool threads finish

struct ParallelLoop {
    ParallelLoop(int64_t count, void (*function)(const void*, int64_t, int), const void* argument)
        : tasks(count), body(function), context(argument) {}

    const int64_t tasks;
    void (*const body)(const void*, int64_t, int);
    const void* const context;
    std::atomic<int64_t> next{0};
    std::atomic<bool> stopped{false};
    std::exception_ptr error;  // the first exception

    // Called within a catch clause. The first failure stops all threads.
    void fail() {
        if (!stopped.exchange(true)) error = std::current_exception();
    }
};

void run_loop(void* context, int thread) {
    ParallelLoop& loop = *static_cast<ParallelLoop*>(context);
    const StopScope scope(loop.stopped);
    try {
        for (int64_t task; (task = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.tasks;) {
            cancellation_point();
            loop.body(loop.context, task, thread);
        }
    } catch (...) {
        loop.fail();
    }
}

}  // namespace

void run_tasks(int64_t tasks, int threads, void (*body)(const void*, int64_t, int), const void* context) {
    if (threads > tasks) threads = static_cast<int>(tasks);
    if (threads <= 1) {
        for (int64_t task = 0; task < tasks; ++task) {
            cancellation_point();
            body(context, task, 0);
        }
        return;
    }
    ParallelLoop loop(tasks, body, context);
    Job job(threads - 1, run_loop, &loop);
    run_loop(&loop, 0);
    while (!job.finish(has_interrupt() ? kInterruptInterval : 0)) {
        try {
            cancellation_point();
        } catch (...) {
            loop.fail();
        }
    }
    if (job.lost_in_fork())
        throw Error(FLASH_STATUS_CANCELLED, "this process was forked from within the call, without its threads");
    if (loop.stopped.load()) std::rethrow_exception(loop.error);
}

}  // namespace libflash::cpu
