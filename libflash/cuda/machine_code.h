// For which GPUs this build holds machine code, or PTX that the driver can translate.
#pragma once

namespace libflash::cuda {

// `built` is CMake's list, "80 90a-real 120-real": a number is both machine code and PTX, -real and -virtual are one of them;
// `arch` is 90 for compute capability 9.0. Machine code runs on later minors of its major, PTX on everything later, an "a"
// architecture on itself.
bool has_code_for(const char* built, int arch, bool only_exact);

// __CUDA_ARCH__ / 10 of the code that the driver loads on `arch`: machine code before PTX, each the latest there is. Machine code
// was compiled with the last of `versions` ("80 90") that is not above its architecture (architectures.cmake), PTX with its own.
// 0: there is no code.
int code_version(const char* built, const char* versions, int arch);

}  // namespace libflash::cuda
