// What the plan and the sm_90a kernel for keys that sequences share agree on: the rows of a thread block. No CUDA header.
#pragma once

namespace libflash::cuda::sm90 {

// A consumer warpgroup for each 64 rows, and a producer.
constexpr int kPrefixGroupRows = 64;
constexpr int decode_prefix_threads(int rows) { return 128 + rows / kPrefixGroupRows * 128; }

}  // namespace libflash::cuda::sm90
