// How many threads a call on the CPU takes when its options do not say.
#pragma once

namespace libflash::cpu {

// LIBFLASH_NUM_THREADS, else OMP_NUM_THREADS, from the environment as it was at the first call; else the processors that the
// calling thread may run on, but no more than the CPU quota of the process's control group allows. Throws Error if
// LIBFLASH_NUM_THREADS is not a number from 1 to kMaxThreads.
int default_threads();

// The number that a call gave, or the default for 0.
int threads_or_default(int given);

}  // namespace libflash::cpu
