// The checks of a schedule of decode: the order of the work of its long chunks, which an earlier call has computed.
#pragma once

#include <cstddef>

#include "problem/tensor.h"

namespace libflash {

constexpr size_t kScheduleAlignment = 16;

void check_schedule_type(const TensorView& schedule, const Device& device);

// Called when the plan is known. Refuses a schedule that has fewer than `needed` bytes or is misaligned. If `needed` is 0, the
// call does not use it, and any is accepted.
void check_schedule(const TensorView& schedule, size_t needed);

}  // namespace libflash
