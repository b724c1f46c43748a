// Section 11 of libflash.h and small functions: version, status names, kernels, devices, build, CPU threads, interrupt check.
#include <algorithm>
#include <cstring>

#include "build_info.h"
#include "capi/guard.h"
#include "plan/registry.h"
#include "problem/options.h"

using namespace libflash;

#define LIBFLASH_TEXT_(x) #x
#define LIBFLASH_TEXT(x) LIBFLASH_TEXT_(x)
#define LIBFLASH_VERSION_TEXT \
    LIBFLASH_TEXT(FLASH_VERSION_MAJOR) "." LIBFLASH_TEXT(FLASH_VERSION_MINOR) "." LIBFLASH_TEXT(FLASH_VERSION_PATCH)

namespace {

// Sizes of the structs in libflash 0.1; later versions append fields.
constexpr size_t kKernelInfo1 = 72;
constexpr size_t kDeviceInfo1 = 280;
static_assert(sizeof(flash_kernel_info_t) == kKernelInfo1 && sizeof(flash_device_info_t) == kDeviceInfo1, "version 1");

// Copies the fields that the caller's struct_size covers; sets fields that this library does not know to 0.
template <class Info>
void copy_info(Info known, Info* info) {
    const uint32_t struct_size = info->struct_size;
    known.struct_size = struct_size;
    auto* bytes = reinterpret_cast<unsigned char*>(info);
    std::memcpy(bytes, &known, std::min<size_t>(struct_size, sizeof(Info)));
    if (struct_size > sizeof(Info)) std::memset(bytes + sizeof(Info), 0, struct_size - sizeof(Info));
}

template <class Info>
void check_info(const Info* info, size_t version_1, int32_t index, int32_t count) {
    if (!info) invalid("info", "is required", "NULL");
    if (info->struct_size < version_1 || info->struct_size > kMaxStructSize) {
        unknown_version("struct_size", "must be sizeof the info struct", info->struct_size, ", version 1 has ", version_1);
    }
    if (index < 0 || index >= count) invalid("index", "must be at least 0 and below the count", index, " of ", count);
}

}  // namespace

extern "C" int32_t flash_version(void) { return FLASH_VERSION; }

extern "C" const char* flash_version_string(void) { return LIBFLASH_VERSION_TEXT; }

extern "C" const char* flash_status_name(flash_status_t status) {
    // Not a switch over the enum: a C caller may pass any number.
    static const char* const names[] = {"OK",        "INVALID", "UNSUPPORTED",   "VERSION",  "WORKSPACE",
                                        "NO_DEVICE", "CUDA",    "OUT_OF_MEMORY", "INTERNAL", "CANCELLED"};
    const auto number = static_cast<int64_t>(status);
    return number >= 0 && number < static_cast<int64_t>(sizeof names / sizeof *names) ? names[number] : "UNKNOWN";
}

extern "C" int32_t flash_kernel_count(void) { return kernel_count(); }

extern "C" flash_status_t flash_kernel_info(int32_t index, flash_kernel_info_t* info) {
    return guard([&] {
        check_info(info, kKernelInfo1, index, kernel_count());
        const KernelEntry& kernel = kernel_entry(index);
        flash_kernel_info_t known = kernel.info;
        known.usable = usable_here(kernel, &known.why_not) ? 1 : 0;
        copy_info(known, info);
    });
}

extern "C" int32_t flash_device_count(void) { return cuda::device_count(); }

extern "C" flash_status_t flash_device_info(int32_t index, flash_device_info_t* info) {
    return guard([&] {
        check_info(info, kDeviceInfo1, index, cuda::device_count());
        const cuda::DeviceProperties& device = cuda::device_properties(index);
        flash_device_info_t known = {};
        known.arch = device.arch;
        known.multiprocessors = device.multiprocessors;
        known.shared_memory_bytes = device.shared_memory_bytes;
        known.memory_bytes = device.memory_bytes;
        std::memcpy(known.name, device.name, sizeof known.name);
        copy_info(known, info);
    });
}

extern "C" const char* flash_cuda_state(void) { return cuda::state_text(); }

extern "C" const char* flash_build_info(void) {
    return "version: " LIBFLASH_VERSION_TEXT "\ncompiler: " LIBFLASH_BUILD_COMPILER "\nbuild type: " LIBFLASH_BUILD_TYPE
           "\ncpu instruction sets: " LIBFLASH_BUILD_ISAS "\ncuda: " LIBFLASH_BUILD_CUDA_VERSION
           "\ncuda architectures: " LIBFLASH_BUILD_CUDA_ARCHITECTURES "\n";
}

extern "C" const char* flash_cpu_isa(void) { return cpu::best_kernels().isa; }

extern "C" int32_t flash_cpu_threads(void) {
    int32_t threads = 0;
    guard([&] { threads = cpu::default_threads(); });
    return threads;
}

extern "C" void flash_set_interrupt(int32_t (*check)(void* context), void* context) { cpu::set_interrupt(check, context); }
