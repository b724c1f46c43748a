#include "plan/selection.h"

#include <cstring>

#include "problem/check.h"

namespace libflash {

namespace {

bool accepts_cpu(const KernelEntry& kernel, const KernelQuery& query, std::string* why) {
    if (query.device.is_cuda())
        return reject(why, "backend: a CPU kernel needs tensors on the CPU (they are on ", query.device, ")");
    // Reasons that hold for every processor come first.
    const int64_t most = query.decode || query.cache_write ? kMostDecodeChannels : 512;
    if ((kernel.cpu || query.cache_write) && query.head_dim > most)
        return reject(why, "head_dim: must be at most ", most, " on the CPU (", query.head_dim, ")");
    if ((kernel.cpu || query.cache_write) && query.head_dim_v > most)
        return reject(why, "head_dim_v: must be at most ", most, " on the CPU (", query.head_dim_v, ")");
    return kernel.supported_by_processor || reject(why, "kernel: this processor lacks the instructions");
}

// Whether there are fewer new rows than query rows. Packed rows are compared when the lengths are read.
bool appends_less_than_it_asks(const DecodeProblem& problem) {
    return !problem.packed() && problem.seqlen_new < problem.seqlen_q;
}

// Combinations of options that no kernel supports.
bool supports_combination(const DecodeProblem& problem, std::string* why) {
    if (problem.tree.data && !problem.positions && problem.window.bounded())
        return reject(why, "tree_mask: needs q_positions where a window is given (there are none)");
    if (!problem.shard.whole() && problem.k_new.present && appends_less_than_it_asks(problem))
        return reject(why, "k_new: must have at least as many rows as q with shard_count: those of all shards (",
                      problem.seqlen_new, " of ", problem.seqlen_q, ")");
    return true;
}

bool any_double(const MergeProblem& problem) {
    bool found = problem.out.dtype == DType::f64;
    for (int n = 0; n < problem.count; ++n) found = found || problem.outs[n].dtype == DType::f64;
    return found;
}

// Whether CUDA kernels of the operation may support float64.
bool has_double_on_cuda(Operation operation) {
    return operation == Operation::forward || operation == Operation::backward || operation == Operation::forward_tangent ||
           operation == Operation::backward_tangent;
}

// DType::none for a kernel of several types.
DType dtype_of(cuda::KernelType type) {
    switch (type) {
        case cuda::KernelType::f16_: return DType::f16;
        case cuda::KernelType::bf16_: return DType::bf16;
        case cuda::KernelType::f32_: return DType::f32;
        case cuda::KernelType::f64_: return DType::f64;
        default: return DType::none;
    }
}

// A kernel with a head_dim in kernels.table supports one dtype and head dims up to this head_dim; the other kernels support all.
bool accepts_dtype_and_head_dims(const KernelEntry& kernel, const KernelQuery& query, std::string* why) {
    const flash_kernel_info_t& info = kernel.info;
    if (info.head_dim == 0) return true;
    if (query.dtype != dtype_of(kernel.cuda->config.dtype))
        return reject(why, "dtype: the kernel is for ", info.dtype, " (", query.dtype, ")");
    if (query.head_dim > info.head_dim)
        return reject(why, "head_dim: must be at most ", info.head_dim, " for this kernel (", query.head_dim, ")");
    if (query.head_dim_v > info.head_dim_v)
        return reject(why, "head_dim_v: must be at most ", info.head_dim_v, " for this kernel (", query.head_dim_v, ")");
    return true;
}

// Whether the build has code for the gradient of the bias, if the problem requests it: in the kernel or in another one.
bool has_bias_gradient(const KernelEntry& kernel, const AttentionProblem& problem, std::string* why) {
    if (!problem.dbias.present || kernel.cuda->architecture->plan_bias_gradient || find_bias_gradient_kernel(problem))
        return true;
    return reject(why, "dbias: a backward kernel of sm80 computes it, and this build has none for the problem (", problem.dtype,
                  ", head_dim ", problem.head_dim, ")");
}

bool accepts_cuda(const KernelEntry& kernel, const KernelQuery& query, std::string* why) {
    if (!query.device.is_cuda()) return reject(why, "backend: a CUDA kernel needs tensors on a GPU (they are on the CPU)");
    if (query.device.id >= cuda::device_count()) return reject(why, "device: no usable GPU (", cuda::state_text(), ")");
    const cuda::DeviceProperties& device = cuda::device_properties(query.device.id);
    if (!has_code(kernel, device.arch))
        return reject(why, "device: no code for its architecture in this build (sm_", device.arch, ")");
    const bool is_double = query.dtype == DType::f64 || (query.merge && any_double(*query.merge));
    if (is_double && !has_double_on_cuda(query.operation))
        return reject(why, "dtype: ", operation_name(query.operation), " of float64 runs on the CPU only (float64)");
    const cuda::Architecture& architecture = *kernel.cuda->architecture;
    const int needed = architecture.shared_bytes(kernel.cuda->config);
    if (needed > device.shared_memory_bytes) {
        return reject(why, "device: must have ", needed, " bytes of shared memory for a thread block (",
                      device.shared_memory_bytes, ")");
    }
    if (!accepts_dtype_and_head_dims(kernel, query, why)) return false;
    if (query.decode) return architecture.supports_decode(kernel.cuda->config, *query.decode, why);
    if (query.tangent) return architecture.supports_tangent(kernel.cuda->config, *query.tangent, why);
    if (!query.attention) return true;
    return architecture.supports(kernel.cuda->config, *query.attention, why) && has_bias_gradient(kernel, *query.attention, why);
}

bool is_requested(const KernelEntry& kernel, const Request& request) {
    if (request.kernel && std::strcmp(request.kernel, kernel.info.name) != 0) return false;
    if (!request.backend || std::strcmp(request.backend, kernel.info.backend) == 0) return true;
    return kernel.cuda && std::strcmp(kernel.info.backend, "any") == 0 && std::strcmp(request.backend, "cpu") != 0;
}

// The kernels of the operation, the kind of device and the requested backend.
std::string names_of_kernels(const KernelQuery& query) {
    Request any_name = *query.request;
    any_name.kernel = nullptr;
    std::string names;
    for (const KernelEntry* kernel : kernels_of(query.operation, query.device.is_cuda()))
        if (is_requested(*kernel, any_name)) names += (names.empty() ? "" : ", ") + std::string(kernel->info.name);
    return names.empty() ? "none" : names;
}

// The error text if no kernel of the operation has the requested name or backend.
std::string why_none_requested(const KernelQuery& query) {
    const char* operation = operation_name(query.operation);
    const char* device = query.device.is_cuda() ? "CUDA" : "the CPU";
    if (!query.request->kernel) {
        return text_of("backend: must have a kernel for ", operation, " in this build (", query.request->backend, ")");
    }
    std::string text = text_of("kernel: must be one of the kernels for ", operation, " on ", device);
    if (query.request->backend) text += text_of(" of backend ", query.request->backend);
    const std::string start(query.request->kernel, strnlen(query.request->kernel, 60));
    return text + text_of(" in this build: ", names_of_kernels(query), " (\"", start, "\")");
}

}  // namespace

KernelQuery kernel_query(const AttentionProblem& p) {
    const Operation operation = p.backward ? Operation::backward : Operation::forward;
    return {operation, p.device, p.dtype, p.head_dim, p.head_dim_v, &p.request, nullptr, &p};
}

KernelQuery kernel_query(const TangentProblem& p) {
    KernelQuery query{p.operation, p.device, p.dtype, p.head_dim, p.head_dim_v, &p.request};
    query.tangent = &p;
    return query;
}

KernelQuery kernel_query(const DecodeProblem& p) {
    return {Operation::decode, p.device, p.dtype, p.head_dim, p.head_dim_v, &p.request, nullptr, nullptr, &p};
}

KernelQuery prefill_query(const DecodeProblem& p) {
    KernelQuery query = kernel_query(p);
    query.operation = Operation::prefill;
    return query;
}

KernelQuery prefix_query(const DecodeProblem& p) {
    KernelQuery query = kernel_query(p);
    query.operation = Operation::decode_prefix;
    return query;
}

KernelQuery kernel_query(const MergeProblem& p) {
    return {Operation::merge, p.device, p.out.dtype, p.head_dim_v, p.head_dim_v, &p.request, &p};
}

KernelQuery kernel_query(const CacheWriteProblem& p) {
    const int64_t channels = p.cache.k.shape[3] + p.cache.rope_dim(), channels_v = p.cache.v.present ? p.cache.v.shape[3] : 0;
    KernelQuery query{Operation::cache_write, p.device, p.dtype, channels, channels_v, &p.request};
    query.cache_write = &p;
    return query;
}

KernelQuery kernel_query(const CompressProblem& p) { return {Operation::compress, p.device, DType::boolean, 0, 0, &p.request}; }

bool accepts(const KernelEntry& kernel, const KernelQuery& query, std::string* why) {
    if (kernel.operation != query.operation) return reject(why, "operation: the kernel is for ", kernel.info.operation);
    if (!is_requested(kernel, *query.request)) return reject(why, "another kernel or backend was requested");
    if (query.decode && !supports_combination(*query.decode, why)) return false;
    return kernel.cuda ? accepts_cuda(kernel, query, why) : accepts_cpu(kernel, query, why);
}

void add_reason(std::vector<KernelReason>& reasons, const std::string& text, const KernelEntry& kernel) {
    size_t at = 0;
    while (at < reasons.size() && reasons[at].text != text) ++at;
    if (at == reasons.size()) reasons.push_back({text, ""});
    reasons[at].names += (reasons[at].names.empty() ? "" : ", ") + std::string(kernel.info.name);
}

const KernelEntry* find_kernel(const KernelQuery& query) {
    for (const KernelEntry* kernel : kernels_of(query.operation, query.device.is_cuda()))
        if (accepts(*kernel, query, nullptr)) return kernel;
    return nullptr;
}

const KernelEntry* find_bias_gradient_kernel(const AttentionProblem& problem) {
    const Request any_kernel;
    KernelQuery query = kernel_query(problem);
    query.request = &any_kernel;
    for (const KernelEntry* kernel : kernels_of(query.operation, query.device.is_cuda()))
        if (kernel->cuda && kernel->cuda->architecture->plan_bias_gradient && accepts(*kernel, query, nullptr)) return kernel;
    return nullptr;
}

namespace {

// The reason of each requested kernel of the operation for GPUs or for the CPU.
std::string reasons_of(const KernelQuery& query, bool on_gpu) {
    std::vector<KernelReason> reasons;
    for (const KernelEntry* kernel : kernels_of(query.operation, on_gpu)) {
        if (!is_requested(*kernel, *query.request)) continue;
        std::string why;
        accepts(*kernel, query, &why);
        add_reason(reasons, why, *kernel);
    }
    std::string text;
    for (const KernelReason& reason : reasons) text += (text.empty() ? "" : "; ") + reason.text + " [" + reason.names + "]";
    return text;
}

bool is_tangent(Operation operation) {
    return operation == Operation::forward_tangent || operation == Operation::backward_tangent;
}

bool any_cuda_kernel(Operation operation) { return kernels_of(operation, true).count > 0; }

}  // namespace

std::string why_no_kernel(const KernelQuery& query) {
    if (query.device.is_cuda() && is_tangent(query.operation) && !any_cuda_kernel(query.operation)) {
        return text_of("operation: runs on the CPU only in this build (", operation_name(query.operation), " of tensors on ",
                       query.device, ")");
    }
    // The reasons of kernels for the other kind of device matter only if there are no others.
    for (const bool on_gpu : {query.device.is_cuda(), !query.device.is_cuda()}) {
        const std::string text = reasons_of(query, on_gpu);
        if (!text.empty()) return text;
    }
    return why_none_requested(query);
}

const KernelEntry& choose_kernel(const KernelQuery& query) {
    cuda::check_device_exists(query.device);
    if (const KernelEntry* kernel = find_kernel(query)) return *kernel;
    throw Error(FLASH_STATUS_UNSUPPORTED, why_no_kernel(query));
}

}  // namespace libflash
