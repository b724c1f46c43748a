#include "plan/registry.h"

#include <cstdio>

#include "build_info.h"
#include "cuda/machine_code.h"
#include "problem/error.h"

namespace libflash {

namespace {

constexpr int kMaxKernels = 256;
constexpr int kMaxNameBytes = 48;

// Whether the kernels of an instruction set include the operation.
bool has_operation(const cpu::Kernels& kernels, Operation operation) {
    switch (operation) {
        case Operation::forward: return kernels.forward != nullptr;
        case Operation::backward: return kernels.backward != nullptr;
        case Operation::forward_tangent: return kernels.forward_tangent != nullptr;
        case Operation::backward_tangent: return kernels.backward_tangent != nullptr;
        default: return kernels.decode != nullptr;
    }
}

#if LIBFLASH_BUILD_CUDA
const char* type_name(cuda::KernelType type) {
    switch (type) {
        case cuda::KernelType::f16_: return "f16";
        case cuda::KernelType::bf16_: return "bf16";
        case cuda::KernelType::f32_: return "f32";
        case cuda::KernelType::f64_: return "f64";
        default: return "any";
    }
}
#endif

// Trivially destructible, so that threads that outlive main() can still use it.
class Registry {
public:
    Registry() {
        add_cuda_kernels();
        int number = 0;
        const cpu::Kernels* const* kernels = cpu::all_kernels(&number);
        for (const Operation operation : {Operation::forward, Operation::backward, Operation::decode, Operation::forward_tangent,
                                          Operation::backward_tangent}) {
            for (int i = 0; i < number; ++i) add_cpu(operation, kernels[i]);
        }
        add_cpu(Operation::merge, nullptr);
        add_cpu(Operation::compress, nullptr);
        add_cpu(Operation::cache_write, nullptr);
        make_lists();
    }
    Registry(const Registry&) = delete;  // the entries point to names_
    Registry& operator=(const Registry&) = delete;

    int count() const { return count_; }
    const KernelEntry& operator[](int index) const { return kernels_[index]; }
    KernelList list(Operation operation, bool on_gpu) const { return lists_[static_cast<int>(operation)][on_gpu]; }

private:
    KernelEntry& add(Operation operation, const char* backend, const char* dtype) {
        if (count_ == kMaxKernels) throw Error(FLASH_STATUS_INTERNAL, "more kernels than the registry can hold");
        KernelEntry& kernel = kernels_[count_++];
        kernel.operation = operation;
        kernel.info.operation = operation_name(operation);
        kernel.info.backend = backend;
        kernel.info.dtype = dtype;
        return kernel;
    }

    // `kernels` is nullptr for operations that do not depend on the instruction set.
    void add_cpu(Operation operation, const cpu::Kernels* kernels) {
        if (kernels && !has_operation(*kernels, operation)) return;
        char* name = names_[count_];
        KernelEntry& kernel = add(operation, "cpu", "any");
        std::snprintf(name, kMaxNameBytes, "%s_cpu%s%s", operation_name(operation), kernels ? "_" : "",
                      kernels ? kernels->isa : "");
        kernel.info.name = name;
        kernel.cpu = kernels;
        kernel.supported_by_processor = !kernels || kernels->usable();
    }

#if LIBFLASH_BUILD_CUDA
    void add_cuda_kernels() {
        int number = 0;
        const cuda::Kernel* kernels = cuda::compiled_kernels(&number);
        for (int i = 0; i < number; ++i) add_cuda(kernels[i]);
    }
    void add_cuda(const cuda::Kernel& compiled) {
        const cuda::KernelConfig& config = compiled.config;
        KernelEntry& kernel = add(config.operation, config.backend, type_name(config.dtype));
        kernel.info.name = config.name;
        kernel.info.head_dim = config.head_dim;
        kernel.info.head_dim_v = config.head_dim_v;
        kernel.info.tile_q = config.tile_q;
        kernel.info.tile_k = config.tile_k;
        kernel.info.stages = config.stages;
        kernel.cuda = &compiled;
    }
#else
    void add_cuda_kernels() {}
#endif

    void make_lists() {
        const KernelEntry** next = listed_;
        for (int operation = 0; operation < kOperations; ++operation) {
            for (const bool on_gpu : {false, true}) {
                KernelList& list = lists_[operation][on_gpu];
                list = {next, 0};
                for (int i = 0; i < count_; ++i) {
                    const KernelEntry& kernel = kernels_[i];
                    if (static_cast<int>(kernel.operation) != operation || (kernel.cuda != nullptr) != on_gpu) continue;
                    *next++ = &kernel;
                    ++list.count;
                }
            }
        }
    }

    int count_ = 0;
    KernelEntry kernels_[kMaxKernels] = {};
    const KernelEntry* listed_[kMaxKernels] = {};
    KernelList lists_[kOperations][2] = {};
    char names_[kMaxKernels][kMaxNameBytes] = {};  // of CPU kernels
};

const Registry& registry() {
    static const Registry all;
    return all;
}

}  // namespace

KernelList kernels_of(Operation operation, bool on_gpu) { return registry().list(operation, on_gpu); }
int kernel_count() { return registry().count(); }
const KernelEntry& kernel_entry(int index) { return registry()[index]; }

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
