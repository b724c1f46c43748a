// Around every launch: the right device, and an error in words.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/driver.h"
#include "problem/error.h"

namespace libflash::cuda {

inline void check(int code, const char* what) {
    if (code == cudaSuccess) return;
    const auto error = static_cast<cudaError_t>(code);
    throw Error(FLASH_STATUS_CUDA, std::string(what) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// Makes `device` the current one as long as the guard lives, with a context that is current: the caller's own if there is one, else the
// device's primary one. Where both are current already that costs two queries. Allowed while a stream is captured.
class DeviceGuard {
public:
    explicit DeviceGuard(int device) {
        check(cudaGetDevice(&before_), "cudaGetDevice");
        if (before_ == device && has_context()) return;
        check(cudaSetDevice(device), "cudaSetDevice");
        changed_ = before_ != device;
    }
    ~DeviceGuard() {
        if (changed_) cudaSetDevice(before_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

private:
    int before_ = 0;
    bool changed_ = false;
};

}  // namespace libflash::cuda
