// Which GPUs this build has machine code for, or PTX that the driver can compile.
#pragma once

namespace libflash::cuda {

// Whether the build has code that runs on `arch` (90 for compute capability 9.0). `built` is CMake's list, "80 90a-real
// 120-real": a number alone means machine code and PTX, -real and -virtual one of them. Machine code runs on the same and later
// minor versions of its major version, PTX on all later architectures, and an "a" architecture only on itself. `only_exact`:
// only "a" architectures count.
bool has_code_for(const char* built, int arch, bool only_exact);

// __CUDA_ARCH__ / 10 of the code that the driver loads on `arch`: machine code before PTX, the latest of either. Machine code
// was compiled with the last of `versions` ("80 90") that is not above its architecture (architectures.cmake), PTX with its
// own. 0: there is no code.
int code_version(const char* built, const char* versions, int arch);

}  // namespace libflash::cuda
