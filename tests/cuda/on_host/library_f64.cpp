// What the library needs besides its sources to run on the host with kernels_f64.cpp: the description of a GPU, and empty
// versions of operations that are not called.
#include "cuda/device.h"
#include "plan/plan.h"

namespace libflash {

namespace cpu {

const Kernels* const* all_kernels(int* count) { return *count = 0, nullptr; }
void merge(const MergeProblem&) {}
void compress_block_mask(const uint8_t*, int64_t, int64_t, int64_t, int32_t*, int32_t*, int32_t*, int32_t*) {}
void write_cache(const CacheWriteProblem&) {}

}  // namespace cpu

namespace cuda {

int device_count() { return 1; }
const DeviceProperties& device_properties(int) {
    static const DeviceProperties a100 = [] {
        DeviceProperties device;
        device.arch = 80, device.multiprocessors = 108, device.shared_memory_bytes = 99 << 10;
        return device;
    }();
    return a100;
}
const char* state_text() { return "described"; }
void check_device_exists(const Device&) {}
void decode(const Kernel&, const DecodeProblem&, const DecodePlan&, void*, void*) {}
void decode_schedule(const DecodeProblem&, const DecodePlan&, void*) {}
void merge(const Kernel&, const MergeProblem&, const MergePlan&, void*) {}
void compress(const Kernel&, const CompressProblem&, const CompressPlan&, void*) {}
void cache_write(const Kernel&, const CacheWriteProblem&, const CacheWritePlan&, void*) {}

}  // namespace cuda

}  // namespace libflash
