// Decode with few query rows of a key head over codes of 8 bits (sm80/decode_few_rows.cuh), for the plan and the kernel. No CUDA
// header.
#pragma once

#include <cstdint>

namespace libflash::cuda {

constexpr int kMaxFewRows = 8;  // query rows that are the columns of one product, at most
constexpr bool are_few_rows(int64_t rows) { return rows <= kMaxFewRows; }
// Threads per multiprocessor for which there are enough registers.
constexpr int kDecodeThreadsOfFewRows = 512;

}  // namespace libflash::cuda
