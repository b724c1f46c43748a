// The number of threads of a CPU call whose options do not give one.
#pragma once

namespace libflash::cpu {

// LIBFLASH_NUM_THREADS, else OMP_NUM_THREADS, as found in the environment by the first call; else the processors in the affinity
// mask of the calling thread, limited by the CPU quota of the process's control group. Throws Error if LIBFLASH_NUM_THREADS is
// invalid.
int default_threads();

// The number that the options give, or the default for 0.
int threads_or_default(int given);

}  // namespace libflash::cpu
