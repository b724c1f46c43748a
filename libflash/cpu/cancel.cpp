#include "cpu/cancel.h"

#include <ctime>

#include "problem/error.h"

namespace libflash::cpu {
namespace {

constexpr int64_t kCheckInterval = 50'000'000;  // nanoseconds between two calls of the interrupt check

// Trivially destructible: nothing runs at the end of a thread or when the library is unloaded.
struct Thread {
    int32_t (*check)(void*) = nullptr;
    void* context = nullptr;
    int64_t last_check = 0;  // time of the last call of `check`
    const std::atomic<bool>* stopped = nullptr;
};
thread_local Thread thread;

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
    return static_cast<int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

void set_interrupt(int32_t (*check)(void* context), void* context) {
    thread.check = check;
    thread.context = context;
    if (check) thread.last_check = now();
}

bool has_interrupt() { return thread.check != nullptr; }

void cancellation_point() {
    if (thread.stopped && thread.stopped->load(std::memory_order_relaxed))
        throw Error(FLASH_STATUS_CANCELLED, "another thread ended it");
    if (!thread.check) return;
    const int64_t time = now();
    if (time - thread.last_check < kCheckInterval) return;
    int32_t (*const check)(void*) = thread.check;
    thread.check = nullptr;  // a libflash call made by the check itself must not call the check again
    const int32_t answer = check(thread.context);
    thread.check = check;
    thread.last_check = now();
    if (answer != 0)
        throw Error(FLASH_STATUS_CANCELLED, "the interrupt check of this thread ended the call; its outputs are incomplete");
}

StopScope::StopScope(const std::atomic<bool>& stopped) : outer_(thread.stopped) { thread.stopped = &stopped; }
StopScope::~StopScope() { thread.stopped = outer_; }

}  // namespace libflash::cpu
