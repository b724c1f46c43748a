#include "cpu/run_items.h"

#include <atomic>
#include <exception>

#include "cpu/cancel.h"
#include "cpu/thread_pool.h"
#include "problem/error.h"

namespace libflash::cpu {
namespace {

constexpr int kPatience = 50;  // milliseconds between interrupt checks while pool threads finish

struct Work {
    Work(int64_t count, void (*function)(const void*, int64_t, int), const void* argument)
        : items(count), body(function), context(argument) {}

    const int64_t items;
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

void work_on(void* context, int thread) {
    Work& work = *static_cast<Work*>(context);
    const StopScope scope(work.stopped);
    try {
        for (int64_t item; (item = work.next.fetch_add(1, std::memory_order_relaxed)) < work.items;) {
            stop_point();
            work.body(work.context, item, thread);
        }
    } catch (...) {
        work.fail();
    }
}

}  // namespace

void run_items(int64_t items, int threads, void (*body)(const void*, int64_t, int), const void* context) {
    if (threads > items) threads = static_cast<int>(items);
    if (threads <= 1) {
        for (int64_t item = 0; item < items; ++item) {
            stop_point();
            body(context, item, 0);
        }
        return;
    }
    Work work(items, body, context);
    Helpers helpers(threads - 1, work_on, &work);
    work_on(&work, 0);
    while (!helpers.finish(has_interrupt() ? kPatience : 0)) {
        try {
            stop_point();
        } catch (...) {
            work.fail();
        }
    }
    if (helpers.lost()) throw Error(FLASH_STATUS_CANCELLED, "this process was forked from within the call, without its threads");
    if (work.stopped.load()) std::rethrow_exception(work.error);
}

}  // namespace libflash::cpu
