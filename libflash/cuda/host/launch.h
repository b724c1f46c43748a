// For every launch: makes the right device current, and turns a CUDA error into an Error.
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

// Makes `device` current during the guard's life, and makes sure that there is a current context: the caller's own if there is
// one, else the device's primary context. If device and context are current already, this costs two queries. Allowed during
// stream capture.
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
