#include "problem/schedule.h"

#include "problem/read.h"

namespace libflash {

void check_schedule_type(const TensorView& schedule, const Device& device) {
    check_device(schedule, "schedule", device);
    check_dtype(schedule, "schedule", DType::i32);
    check_ndim(schedule, "schedule", 1, "(n,)");
    check_contiguous(schedule, "schedule");
}

void check_schedule(const TensorView& schedule, size_t needed) {
    if (!schedule.present || needed == 0) return;
    const size_t bytes = static_cast<size_t>(schedule.shape[0]) * sizeof(int32_t);
    if (bytes < needed)
        invalid("schedule", "must have at least the bytes that flash_attention_decode_schedule_size returns", bytes, " of ",
                needed);
    const size_t beyond = reinterpret_cast<uintptr_t>(schedule.data) % kScheduleAlignment;
    if (beyond != 0)
        invalid("schedule", "data must be aligned to 16 bytes", "address modulo ", kScheduleAlignment, " is ", beyond);
}

}  // namespace libflash
