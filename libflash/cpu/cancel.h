// How a call on the CPU is ended before it is done: by the caller's interrupt check (flash_set_interrupt), or because another of
// its threads failed. The loops over tiles call stop_point().
#pragma once

#include <atomic>
#include <cstdint>

namespace libflash::cpu {

// Of the calling thread; nullptr: none.
void set_interrupt(int32_t (*check)(void* context), void* context);
bool has_interrupt();

// Ends this thread's part of the call with an exception if the work is stopped. On the thread that made the call it asks the
// interrupt check, no more than some twenty times a second. Costs a few nanoseconds.
void stop_point();

// Within a scope, the work of this thread ends once `stopped` is true.
class StopScope {
public:
    explicit StopScope(const std::atomic<bool>& stopped);
    ~StopScope();
    StopScope(const StopScope&) = delete;
    StopScope& operator=(const StopScope&) = delete;

private:
    const std::atomic<bool>* outer_;
};

}  // namespace libflash::cpu
