// Which GPUs this build has machine code for, or PTX that the driver can compile.
#pragma once

namespace libflash::cuda {

// Whether the build has code that runs on `arch` (90 for compute capability 9.0). `built` is CMake's list, "80 90a-real
// 120-real": a number alone means machine code and PTX, -real and -virtual one of them. Machine code runs on the same and later
// minor versions of its major version, PTX on all later architectures, and an "a" architecture only on itself. `only_exact`:
// only "a" architectures count.
bool has_code_for(const char* built, int arch, bool only_exact);

// The value of __CUDA_ARCH__ / 10 with which the code that the driver loads on `arch` was compiled; 0: there is no code. The
// driver prefers machine code to PTX, and takes the latest of either. For machine code the value is the last of `versions`
// ("80 90") that is not above its architecture (architectures.cmake); for PTX it is the architecture of the PTX.
int code_version(const char* built, const char* versions, int arch);

}  // namespace libflash::cuda
