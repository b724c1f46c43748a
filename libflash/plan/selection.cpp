#include "plan/selection.h"

#include <cstring>
#include <vector>

#include "problem/check.h"

namespace libflash {

namespace {

constexpr int64_t kMaxHeadDimCpu = 512;

bool decline(std::string* why, const std::string& reason) {
    *why = reason;
    return false;
}

bool accepts_cpu(const KernelEntry& kernel, const Subject& subject, std::string* why) {
    if (subject.device.is_cuda()) {
        return why && decline(why, text_of("backend: a CPU kernel needs tensors on the CPU (they are on ", subject.device, ")"));
    }
    // Reasons that hold for every processor come first.
    if (kernel.cpu && subject.head_dim > kMaxHeadDimCpu) {
        return why && decline(why, text_of("head_dim: must be at most ", kMaxHeadDimCpu, " on the CPU (", subject.head_dim, ")"));
    }
    if (kernel.cpu && subject.head_dim_v > kMaxHeadDimCpu) {
        return why &&
               decline(why, text_of("head_dim_v: must be at most ", kMaxHeadDimCpu, " on the CPU (", subject.head_dim_v, ")"));
    }
    return kernel.supported_by_processor || (why && decline(why, "kernel: this processor lacks the instructions"));
}

bool any_double(const MergeProblem& problem) {
    bool found = problem.out.dtype == DType::f64;
    for (int n = 0; n < problem.count; ++n) found = found || problem.outs[n].dtype == DType::f64;
    return found;
}

// A kernel with a head_dim in kernels.table takes one dtype and head dimensions up to its own; the others take all.
bool fits_cuda_tile(const KernelEntry& kernel, const Subject& subject, std::string* why) {
    if (kernel.head_dim == 0) return true;
    const bool same_type = subject.dtype == (std::strcmp(kernel.dtype, "f16") == 0    ? DType::f16
                                             : std::strcmp(kernel.dtype, "bf16") == 0 ? DType::bf16
                                                                                      : DType::f32);
    if (!same_type) return why && decline(why, text_of("dtype: the kernel is for ", kernel.dtype, " (", subject.dtype, ")"));
    if (subject.head_dim > kernel.head_dim) {
        return why &&
               decline(why, text_of("head_dim: must be at most ", kernel.head_dim, " for this kernel (", subject.head_dim, ")"));
    }
    if (subject.head_dim_v > kernel.head_dim_v) {
        return why && decline(why, text_of("head_dim_v: must be at most ", kernel.head_dim_v, " for this kernel (",
                                           subject.head_dim_v, ")"));
    }
    return true;
}

bool accepts_cuda(const KernelEntry& kernel, const Subject& subject, std::string* why) {
    if (!subject.device.is_cuda())
        return why && decline(why, "backend: a CUDA kernel needs tensors on a GPU (they are on the CPU)");
    if (subject.device.id >= cuda::device_count())
        return why && decline(why, text_of("device: no usable GPU (", cuda::state_text(), ")"));
    const int arch = cuda::device_properties(subject.device.id).arch;
    if (!has_code(kernel, arch)) {
        return why && decline(why, text_of("device: no code for its architecture in this build (sm_", arch, ")"));
    }
    if (subject.dtype == DType::f64 || (subject.merge && any_double(*subject.merge))) {
        return why && decline(why, "dtype: float64 runs on the CPU only (float64)");
    }
    const int needed = kernel.cuda->architecture->shared_bytes(kernel.cuda->config),
              there = cuda::device_properties(subject.device.id).shared_memory_bytes;
    if (needed > there) {
        return why &&
               decline(why, text_of("device: must have ", needed, " bytes of shared memory for a thread block (", there, ")"));
    }
    if (!fits_cuda_tile(kernel, subject, why)) return false;
    return !subject.attention || kernel.cuda->architecture->supports(kernel.cuda->config, *subject.attention, why);
}

bool asked_for(const KernelEntry& kernel, const Request& request) {
    if (request.kernel && std::strcmp(request.kernel, kernel.name) != 0) return false;
    if (!request.backend || std::strcmp(request.backend, kernel.backend) == 0) return true;
    return kernel.cuda && std::strcmp(kernel.backend, "any") == 0 && std::strcmp(request.backend, "cpu") != 0;
}

// Whether the error text should name this kernel: it has the operation, the kind of device and the requested backend.
bool might_be_meant(const KernelEntry& kernel, const Subject& subject) {
    if (kernel.operation != subject.operation || (kernel.cuda != nullptr) != subject.device.is_cuda()) return false;
    Request any_name = *subject.request;
    any_name.kernel = nullptr;
    return asked_for(kernel, any_name);
}

std::string names_of_kernels(const Subject& subject) {
    std::string names;
    for (int i = 0; i < kernel_count(); ++i) {
        const KernelEntry& kernel = kernel_entry(i);
        if (might_be_meant(kernel, subject)) names += (names.empty() ? "" : ", ") + std::string(kernel.name);
    }
    return names.empty() ? "none" : names;
}

// The error text if no kernel of the operation has the requested name or backend.
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

bool accepts(const KernelEntry& kernel, const Subject& subject, std::string* why) {
    if (kernel.operation != subject.operation) return why && decline(why, "operation: another one");
    if (!asked_for(kernel, *subject.request)) return why && decline(why, "another kernel or backend was requested");
    return kernel.cuda ? accepts_cuda(kernel, subject, why) : accepts_cpu(kernel, subject, why);
}

const KernelEntry* find_kernel(const Subject& subject) {
    for (int i = 0; i < kernel_count(); ++i) {
        if (accepts(kernel_entry(i), subject, nullptr)) return &kernel_entry(i);
    }
    return nullptr;
}

namespace {

// The reason of each requested kernel of the operation; kernels with the same reason are listed together.
// `other_devices`: include kernels for another kind of device; their reason is of interest only if there are no others.
std::string reasons_of(const Subject& subject, bool other_devices) {
    struct Reason {
        std::string text, names;
    };
    std::vector<Reason> reasons;
    for (int i = 0; i < kernel_count(); ++i) {
        const KernelEntry& kernel = kernel_entry(i);
        if (kernel.operation != subject.operation || !asked_for(kernel, *subject.request)) continue;
        if ((kernel.cuda != nullptr) != subject.device.is_cuda() && !other_devices) continue;
        std::string why;
        accepts(kernel, subject, &why);
        size_t at = 0;
        while (at < reasons.size() && reasons[at].text != why) ++at;
        if (at == reasons.size()) reasons.push_back({why, ""});
        reasons[at].names += (reasons[at].names.empty() ? "" : ", ") + std::string(kernel.name);
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

const KernelEntry& choose_kernel(const Subject& subject) {
    cuda::check_device_exists(subject.device);
    if (const KernelEntry* kernel = find_kernel(subject)) return *kernel;
    throw Error(FLASH_STATUS_UNSUPPORTED, why_no_kernel(subject));
}

}  // namespace libflash
