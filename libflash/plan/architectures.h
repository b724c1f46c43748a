// For which GPUs this build holds machine code, or PTX that the driver can translate.
#pragma once

namespace libflash {

// `built` is CMake's list, "80 90a-real 120-real": a number is both machine code and PTX, -real and -virtual are one of them;
// `arch` is 90 for compute capability 9.0. Machine code runs on later minors of its major, PTX on everything later, an "a"
// architecture on itself.
bool has_code_for(const char* built, int arch, bool only_specific);

}  // namespace libflash
