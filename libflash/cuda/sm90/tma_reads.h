// Whether TMA can read a tensor. Host only, no CUDA header.
#pragma once

#include <cstdint>

#include "cuda/host/problem_params.h"

namespace libflash::cuda::sm90 {

// Whether address and strides are multiples of 16 bytes, and strides at least 0 and less than 2^40 bytes. `element`: bytes of an
// element.
inline bool tma_reads(const TensorView& tensor, int64_t element = 2) {
    constexpr int64_t kLimit = int64_t{1} << 40;
    const RowsParams rows = rows_params(tensor);
    const auto fits = [&](int64_t stride) { return stride >= 0 && stride < kLimit / element && stride * element % 16 == 0; };
    return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && fits(rows.batch) && fits(rows.row) && fits(rows.head);
}

}  // namespace libflash::cuda::sm90
