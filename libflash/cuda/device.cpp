#include "cuda/device.h"

#include <cstdio>

#include "build_info.h"
#include "problem/check.h"

#if LIBFLASH_BUILD_CUDA
#include <cuda_runtime_api.h>
#endif

namespace libflash::cuda {

namespace {

constexpr int kMaxDevices = 64;

// Trivially destructible: threads that outlive main() may still read it.
struct Devices {
    int count = 0;
    DeviceProperties properties[kMaxDevices];
    char state[256] = {};
};

#if LIBFLASH_BUILD_CUDA

void describe_failure(Devices& devices, cudaError_t error) {
    int driver = 0;
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) {
        std::snprintf(devices.state, sizeof devices.state, "no NVIDIA driver");
    } else if (error == cudaErrorInsufficientDriver) {
        std::snprintf(devices.state, sizeof devices.state,
                      "the NVIDIA driver is too old: it is for CUDA %d.%d, this library for %d.%d", driver / 1000,
                      driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    } else if (error == cudaErrorNoDevice) {
        std::snprintf(devices.state, sizeof devices.state, "an NVIDIA driver, but no GPU that this process may use");
    } else {
        std::snprintf(devices.state, sizeof devices.state, "CUDA does not start: %s: %s", cudaGetErrorName(error),
                      cudaGetErrorString(error));
    }
}

bool read_properties(int index, DeviceProperties& properties) {
    cudaDeviceProp read;
    if (cudaGetDeviceProperties(&read, index) != cudaSuccess) return false;
    properties.arch = read.major * 10 + read.minor;
    properties.multiprocessors = read.multiProcessorCount;
    properties.shared_memory_bytes = static_cast<int32_t>(read.sharedMemPerBlockOptin);
    properties.memory_bytes = static_cast<int64_t>(read.totalGlobalMem);
    std::snprintf(properties.name, sizeof properties.name, "%s", read.name);
    return true;
}

Devices read_devices() {
    Devices devices;
    int count = 0;  // cudaGetDeviceCount does not set it without a driver
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        describe_failure(devices, error);
    } else {
        for (int i = 0; i < count && i < kMaxDevices; ++i) {
            if (!read_properties(i, devices.properties[i])) break;
            devices.count = i + 1;
        }
        std::snprintf(devices.state, sizeof devices.state, "ready: %d device%s", devices.count, devices.count == 1 ? "" : "s");
        if (devices.count == 0) std::snprintf(devices.state, sizeof devices.state, "an NVIDIA driver, but no GPU");
    }
    cudaGetLastError();  // clears the error, which the next launch would report
    return devices;
}

#else

Devices read_devices() {
    Devices devices;
    std::snprintf(devices.state, sizeof devices.state, "built without CUDA: %s", LIBFLASH_BUILD_CUDA_VERSION);
    return devices;
}

#endif

const Devices& devices() {
    static const Devices all = read_devices();
    return all;
}

}  // namespace

int device_count() { return devices().count; }
const DeviceProperties& device_properties(int index) { return devices().properties[index]; }
const char* state_text() { return devices().state; }

void check_device_exists(const Device& device) {
    if (!device.is_cuda()) return;
    if (device_count() == 0) {
        refuse(FLASH_STATUS_NO_DEVICE, "device_type", "the tensors are on a GPU, but no GPU is usable", state_text());
    }
    if (device.id >= device_count()) {
        invalid("device_id", "must be below the number of devices", device.id, " of ", device_count());
    }
}

}  // namespace libflash::cuda
