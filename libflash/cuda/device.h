// The CUDA devices of this machine, read once at the first query. No CUDA header; a build without CUDA has no devices, and
// state_text() says so.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/tensor.h"

namespace libflash::cuda {

struct DeviceProperties {
    int32_t arch = 0;  // 90 for compute capability 9.0
    int32_t multiprocessors = 0;
    int32_t shared_memory_bytes = 0;  // the most that a thread block may use
    int64_t memory_bytes = 0;
    char name[256] = {};
};

int device_count();
const DeviceProperties& device_properties(int index);  // 0 <= index < device_count()

// One line: "ready: 1 device", "no NVIDIA driver", "built without CUDA: ...".
const char* state_text();

// Refuses tensors on a device that is not there.
void check_device_exists(const Device& device);

}  // namespace libflash::cuda
