#include "plan/registry.h"

#include <cstdio>
#include <cstring>
#include <vector>

#include "build_info.h"
#include "plan/architectures.h"
#include "plan/device.h"

#if LIBFLASH_BUILD_CUDA
#include "cuda/kernels.h"
#endif

namespace libflash {

namespace {

constexpr int kMaxRows = 256;
constexpr int64_t kMaxHeadDimCpu = 512;

// Trivially destructible, so that threads which outlive main() may still ask.
struct Registry {
    int count = 0;
    KernelRow rows[kMaxRows];
};

KernelRow& add(Registry& registry) {
    if (registry.count == kMaxRows) throw Error(FLASH_STATUS_INTERNAL, "more kernels than the registry has room for");
    KernelRow& row = registry.rows[registry.count++];
    row = KernelRow();
    row.dtype = "any";
    return row;
}

// An instruction set need not have every operation.
bool has_operation(const cpu::Kernels& kernels, Operation operation) {
    if (operation == Operation::forward) return kernels.forward != nullptr;
    return operation == Operation::backward ? kernels.backward != nullptr : kernels.decode != nullptr;
}

void add_cpu(Registry& registry, Operation operation, const cpu::Kernels* kernels) {
    if (kernels && !has_operation(*kernels, operation)) return;
    KernelRow& row = add(registry);
    row.operation = operation;
    row.backend = "cpu";
    row.cpu = kernels;
    row.processor_has_it = !kernels || kernels->usable();
    std::snprintf(row.name, sizeof row.name, "%s_cpu%s%s", operation_name(operation), kernels ? "_" : "",
                  kernels ? kernels->isa : "");
}

#if LIBFLASH_BUILD_CUDA

const char* type_name(cuda::RowType type) {
    switch (type) {
        case cuda::RowType::f16_: return "f16";
        case cuda::RowType::bf16_: return "bf16";
        case cuda::RowType::f32_: return "f32";
        default: return "any";
    }
}

Operation operation_of(const char* name) {
    for (const Operation operation : {Operation::forward, Operation::backward, Operation::decode, Operation::compress}) {
        if (std::strcmp(name, operation_name(operation)) == 0) return operation;
    }
    return Operation::merge;
}

void add_cuda(Registry& registry, const cuda::Row& kernel) {
    const cuda::KernelConfig& config = kernel.config;
    KernelRow& row = add(registry);
    std::snprintf(row.name, sizeof row.name, "%s", config.name);
    row.operation = operation_of(config.operation);
    row.specific = std::strcmp(config.room, "sm90") == 0;
    row.backend = config.room;
    row.dtype = type_name(config.dtype);
    row.head_dim = config.head_dim;
    row.head_dim_v = config.head_dim_v;
    row.tile_q = config.tile_q;
    row.tile_k = config.tile_k;
    row.stages = config.stages;
    row.architectures = config.architectures;
    row.cuda = &kernel;
}

int shared_bytes(const KernelRow& row) { return cuda::shared_bytes(row.cuda->config); }

bool knows_options(const KernelRow& row, const AttentionProblem& problem, std::string* why) {
    return cuda::knows_options(row.cuda->config, problem, why);
}

void add_cuda_rows(Registry& registry) {
    int count = 0;
    const cuda::Row* rows = cuda::all_rows(&count);
    for (int i = 0; i < count; ++i) add_cuda(registry, rows[i]);
}

#else

void add_cuda_rows(Registry&) {}
int shared_bytes(const KernelRow&) { return 0; }
bool knows_options(const KernelRow&, const AttentionProblem&, std::string*) { return true; }

#endif

Registry read_registry() {
    Registry registry;
    add_cuda_rows(registry);
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

bool decline(std::string* why, const std::string& reason) {
    *why = reason;
    return false;
}

bool accepts_cpu(const KernelRow& row, const Subject& subject, std::string* why) {
    if (subject.device.is_cuda()) {
        return why && decline(why, text_of("backend: a CPU kernel needs tensors on the CPU (they are on ", subject.device, ")"));
    }
    // First what no processor would change.
    if (row.cpu && subject.head_dim > kMaxHeadDimCpu) {
        return why && decline(why, text_of("head_dim: must be at most ", kMaxHeadDimCpu, " on the CPU (", subject.head_dim, ")"));
    }
    if (row.cpu && subject.head_dim_v > kMaxHeadDimCpu) {
        return why &&
               decline(why, text_of("head_dim_v: must be at most ", kMaxHeadDimCpu, " on the CPU (", subject.head_dim_v, ")"));
    }
    return row.processor_has_it || (why && decline(why, "kernel: this processor lacks the instructions"));
}

bool has_code(const KernelRow& row, int arch) { return has_code_for(row.architectures, arch, row.specific); }

bool any_double(const MergeProblem& problem) {
    bool found = problem.out.dtype == DType::f64;
    for (int n = 0; n < problem.count; ++n) found = found || problem.outs[n].dtype == DType::f64;
    return found;
}

// Kernels with tiles are for one type and for head dims up to their own.
bool fits_cuda_tile(const KernelRow& row, const Subject& subject, std::string* why) {
    if (row.head_dim == 0) return true;
    const bool same_type = subject.dtype == (std::strcmp(row.dtype, "f16") == 0    ? DType::f16
                                             : std::strcmp(row.dtype, "bf16") == 0 ? DType::bf16
                                                                                   : DType::f32);
    if (!same_type) return why && decline(why, text_of("dtype: the kernel is for ", row.dtype, " (", subject.dtype, ")"));
    if (subject.head_dim > row.head_dim) {
        return why && decline(why, text_of("head_dim: must be at most ", row.head_dim, " for it (", subject.head_dim, ")"));
    }
    if (subject.head_dim_v > row.head_dim_v) {
        return why && decline(why, text_of("head_dim_v: must be at most ", row.head_dim_v, " for it (", subject.head_dim_v, ")"));
    }
    return true;
}

bool accepts_cuda(const KernelRow& row, const Subject& subject, std::string* why) {
    if (!subject.device.is_cuda())
        return why && decline(why, "backend: a CUDA kernel needs tensors on a GPU (they are on the CPU)");
    if (subject.device.id >= device_count()) return why && decline(why, text_of("device: no usable GPU (", cuda_state(), ")"));
    const int arch = device_facts(subject.device.id).arch;
    if (!has_code(row, arch)) {
        return why && decline(why, text_of("device: no code for its architecture in this build (sm_", arch, ")"));
    }
    if (subject.dtype == DType::f64 || (subject.merge && any_double(*subject.merge))) {
        return why && decline(why, "dtype: float64 runs on the CPU only (float64)");
    }
    const int needed = shared_bytes(row), there = device_facts(subject.device.id).shared_memory_bytes;
    if (needed > there) {
        return why && decline(why, text_of("device: its thread blocks take ", needed, " bytes of shared memory (", there, ")"));
    }
    if (!fits_cuda_tile(row, subject, why)) return false;
    return !subject.attention || knows_options(row, *subject.attention, why);
}

bool asked_for(const KernelRow& row, const Request& request) {
    if (request.kernel && std::strcmp(request.kernel, row.name) != 0) return false;
    if (!request.backend || std::strcmp(request.backend, row.backend) == 0) return true;
    return row.cuda && std::strcmp(row.backend, "any") == 0 && std::strcmp(request.backend, "cpu") != 0;
}

// Whether a kernel might have been meant: of this operation, for tensors on this kind of device, of the backend that was asked for.
bool might_be_meant(const KernelRow& row, const Subject& subject) {
    if (row.operation != subject.operation || (row.cuda != nullptr) != subject.device.is_cuda()) return false;
    Request any_name = *subject.request;
    any_name.kernel = nullptr;
    return asked_for(row, any_name);
}

std::string names_of_kernels(const Subject& subject) {
    std::string names;
    const Registry& all = registry();
    for (int i = 0; i < all.count; ++i) {
        if (might_be_meant(all.rows[i], subject)) names += (names.empty() ? "" : ", ") + std::string(all.rows[i].name);
    }
    return names.empty() ? "none" : names;
}

// No kernel of the operation has the name or is of the backend that was asked for.
std::string why_none_asked_for(const Subject& subject) {
    const char* operation = operation_name(subject.operation);
    const char* place = subject.device.is_cuda() ? "CUDA" : "the CPU";
    if (!subject.request->kernel) {
        return text_of("backend: must have a kernel for ", operation, " in this build (", subject.request->backend, ")");
    }
    std::string text = text_of("kernel: must be one of the kernels for ", operation, " on ", place);
    if (subject.request->backend) text += text_of(" of backend ", subject.request->backend);
    const std::string start(subject.request->kernel, strnlen(subject.request->kernel, 60));
    return text + text_of(" in this build: ", names_of_kernels(subject), " (\"", start, "\")");
}

}  // namespace

const char* operation_name(Operation operation) {
    switch (operation) {
        case Operation::forward: return "forward";
        case Operation::backward: return "backward";
        case Operation::decode: return "decode";
        case Operation::merge: return "merge";
        default: return "compress";
    }
}

int kernel_count() { return registry().count; }
const KernelRow& kernel_row(int index) { return registry().rows[index]; }

bool usable_here(const KernelRow& row, const char** why_not) {
    *why_not = "";
    if (!row.cuda) {
        if (!row.processor_has_it) *why_not = "this processor lacks the instructions";
        return row.processor_has_it;
    }
    for (int i = 0; i < device_count(); ++i) {
        if (has_code(row, device_facts(i).arch)) return true;
    }
    *why_not = device_count() == 0 ? cuda_state() : "no code for the architecture of this machine's GPUs";
    return false;
}

Subject subject_of(const AttentionProblem& p) {
    const Operation operation = p.backward ? Operation::backward : Operation::forward;
    return {operation, p.device, p.dtype, p.head_dim, p.head_dim_v, &p.request, nullptr, &p};
}

Subject subject_of(const DecodeProblem& p) {
    return {Operation::decode, p.device, p.dtype, p.head_dim, p.head_dim_v, &p.request};
}

Subject subject_of(const MergeProblem& p) {
    return {Operation::merge, p.device, p.out.dtype, p.head_dim_v, p.head_dim_v, &p.request, &p};
}

Subject subject_of(const CompressProblem& p) { return {Operation::compress, p.device, DType::boolean, 0, 0, &p.request}; }

bool accepts(const KernelRow& row, const Subject& subject, std::string* why) {
    if (row.operation != subject.operation) return why && decline(why, "operation: another one");
    if (!asked_for(row, *subject.request)) return why && decline(why, "another kernel or backend was asked for");
    return row.cuda ? accepts_cuda(row, subject, why) : accepts_cpu(row, subject, why);
}

const KernelRow* find_kernel(const Subject& subject) {
    const Registry& all = registry();
    for (int i = 0; i < all.count; ++i) {
        if (accepts(all.rows[i], subject, nullptr)) return &all.rows[i];
    }
    return nullptr;
}

namespace {

// Why each row of the operation that was asked for declined, rows with the same reason together. `other_devices` are the rows for tensors
// somewhere else: that they decline is no news unless there is nothing else to say.
std::string reasons_of(const Subject& subject, bool other_devices) {
    struct Reason {
        std::string text, names;
    };
    std::vector<Reason> reasons;
    const Registry& all = registry();
    for (int i = 0; i < all.count; ++i) {
        const KernelRow& row = all.rows[i];
        if (row.operation != subject.operation || !asked_for(row, *subject.request)) continue;
        if ((row.cuda != nullptr) != subject.device.is_cuda() && !other_devices) continue;
        std::string why;
        accepts(row, subject, &why);
        size_t at = 0;
        while (at < reasons.size() && reasons[at].text != why) ++at;
        if (at == reasons.size()) reasons.push_back({why, ""});
        reasons[at].names += (reasons[at].names.empty() ? "" : ", ") + std::string(row.name);
    }
    std::string text;
    for (const Reason& reason : reasons) text += (text.empty() ? "" : "; ") + reason.text + " [" + reason.names + "]";
    return text;
}

}  // namespace

std::string why_no_kernel(const Subject& subject) {
    for (const bool other_devices : {false, true}) {
        const std::string text = reasons_of(subject, other_devices);
        if (!text.empty()) return text;
    }
    return why_none_asked_for(subject);
}

const KernelRow& choose_kernel(const Subject& subject) {
    check_device_exists(subject.device);
    if (const KernelRow* row = find_kernel(subject)) return *row;
    throw Error(FLASH_STATUS_UNSUPPORTED, why_no_kernel(subject));
}

}  // namespace libflash
