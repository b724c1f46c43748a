#include "plan/registry.h"

#include <cstdio>

#include "build_info.h"
#include "cuda/machine_code.h"
#include "problem/error.h"

namespace libflash {

namespace {

constexpr int kMaxKernels = 256;

// Trivially destructible, so that threads that outlive main() can still use it.
struct Registry {
    int count = 0;
    KernelEntry kernels[kMaxKernels];
};

KernelEntry& add(Registry& registry) {
    if (registry.count == kMaxKernels) throw Error(FLASH_STATUS_INTERNAL, "more kernels than the registry has room for");
    KernelEntry& kernel = registry.kernels[registry.count++];
    kernel = KernelEntry();
    kernel.dtype = "any";
    return kernel;
}

// The kernels of an instruction set may lack an operation.
bool has_operation(const cpu::Kernels& kernels, Operation operation) {
    if (operation == Operation::forward) return kernels.forward != nullptr;
    return operation == Operation::backward ? kernels.backward != nullptr : kernels.decode != nullptr;
}

void add_cpu(Registry& registry, Operation operation, const cpu::Kernels* kernels) {
    if (kernels && !has_operation(*kernels, operation)) return;
    KernelEntry& kernel = add(registry);
    kernel.operation = operation;
    kernel.backend = "cpu";
    kernel.cpu = kernels;
    kernel.supported_by_processor = !kernels || kernels->usable();
    std::snprintf(kernel.name, sizeof kernel.name, "%s_cpu%s%s", operation_name(operation), kernels ? "_" : "",
                  kernels ? kernels->isa : "");
}

#if LIBFLASH_BUILD_CUDA

const char* type_name(cuda::KernelType type) {
    switch (type) {
        case cuda::KernelType::f16_: return "f16";
        case cuda::KernelType::bf16_: return "bf16";
        case cuda::KernelType::f32_: return "f32";
        default: return "any";
    }
}

void add_cuda(Registry& registry, const cuda::Kernel& compiled) {
    const cuda::KernelConfig& config = compiled.config;
    KernelEntry& kernel = add(registry);
    std::snprintf(kernel.name, sizeof kernel.name, "%s", config.name);
    kernel.operation = config.operation;
    kernel.backend = config.backend;
    kernel.dtype = type_name(config.dtype);
    kernel.head_dim = config.head_dim;
    kernel.head_dim_v = config.head_dim_v;
    kernel.tile_q = config.tile_q;
    kernel.tile_k = config.tile_k;
    kernel.stages = config.stages;
    kernel.cuda = &compiled;
}

void add_cuda_kernels(Registry& registry) {
    int count = 0;
    const cuda::Kernel* kernels = cuda::compiled_kernels(&count);
    for (int i = 0; i < count; ++i) add_cuda(registry, kernels[i]);
}

#else

void add_cuda_kernels(Registry&) {}

#endif

Registry read_registry() {
    Registry registry;
    add_cuda_kernels(registry);
    int count = 0;
    const cpu::Kernels* const* kernels = cpu::all_kernels(&count);
    for (const Operation operation : {Operation::forward, Operation::backward, Operation::decode}) {
        for (int i = 0; i < count; ++i) add_cpu(registry, operation, kernels[i]);
    }
    add_cpu(registry, Operation::merge, nullptr);
    add_cpu(registry, Operation::compress, nullptr);
    return registry;
}

const Registry& registry() {
    static const Registry all = read_registry();
    return all;
}

}  // namespace

int kernel_count() { return registry().count; }
const KernelEntry& kernel_entry(int index) { return registry().kernels[index]; }

bool has_code(const KernelEntry& kernel, int arch) {
    return cuda::has_code_for(kernel.cuda->config.compiled_for, arch, kernel.cuda->architecture->exact);
}

bool usable_here(const KernelEntry& kernel, const char** why_not) {
    *why_not = "";
    if (!kernel.cuda) {
        if (!kernel.supported_by_processor) *why_not = "this processor lacks the instructions";
        return kernel.supported_by_processor;
    }
    for (int i = 0; i < cuda::device_count(); ++i) {
        if (has_code(kernel, cuda::device_properties(i).arch)) return true;
    }
    *why_not = cuda::device_count() == 0 ? cuda::state_text() : "no code for the architecture of this machine's GPUs";
    return false;
}

}  // namespace libflash
