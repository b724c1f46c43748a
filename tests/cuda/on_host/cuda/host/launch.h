// Replaces the library's header: there is no device.
#pragma once

#include "problem/error.h"

namespace libflash::cuda {

inline void check(int code, const char* what) {
    if (code != 0) throw Error(FLASH_STATUS_CUDA, what);
}

struct DeviceGuard {
    explicit DeviceGuard(int) {}
};

}  // namespace libflash::cuda
