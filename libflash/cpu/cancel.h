// Cancels a call on the CPU: by the caller's interrupt check (flash_set_interrupt), or because another thread of the call
// failed. The loops over tiles call cancellation_point().
#pragma once

#include <atomic>
#include <cstdint>

namespace libflash::cpu {

// The interrupt check of the calling thread; nullptr for none.
void set_interrupt(int32_t (*check)(void* context), void* context);
bool has_interrupt();

// Throws if the call was stopped. On the thread that made the call, it also calls the interrupt check, at most about twenty
// times a second. Otherwise it costs a few nanoseconds.
void cancellation_point();

// While it exists, cancellation_point() of this thread throws once `stopped` is true.
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
