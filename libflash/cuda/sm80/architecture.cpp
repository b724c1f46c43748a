// The architecture sm80. Its kernels support every problem of forward and backward except some problems with positions
// (host/shard_options.h). wide_capabilities.cpp, decode_capabilities.cpp and tangent_capabilities.cpp list what the kernels of
// backward with wide heads, of decode and of tangents do not support.
#include "cuda/architecture.h"
#include "cuda/attention/decode_params.h"
#include "cuda/host/shard_options.h"
#include "cuda/host/statistics.h"
#include "cuda/sm80/backward_tangent_tiles.h"
#include "cuda/sm80/backward_tiles.h"
#include "cuda/sm80/forward_instance.h"
#include "cuda/sm80/forward_tangent_tiles.h"
#include "cuda/sm80/plan.h"

namespace libflash::cuda {

namespace {

bool supports(const KernelConfig& config, const AttentionProblem& problem, std::string* why) {
    if (config.operation == Operation::backward && is_wide_backward(config.head_dim))
        return sm80::supports_wide_backward(config, problem, why);
    if (config.operation == Operation::forward && !agrees_on_statistics(config, problem, why)) return false;
    return supports_shard_options(problem, why);
}

// Bytes of shared memory per thread block that a GPU must have for the kernel; 0: the kernel fits every GPU it is compiled for.
int shared_bytes(const KernelConfig& config) {
    const int element = element_bytes(config.dtype);
    if (element == 8) return 0;
    if (config.operation == Operation::forward && is_wide_forward(config)) return wide_forward_shared_bytes(config);
    if (config.operation == Operation::backward && is_wide_backward(config.head_dim))
        return wide_backward_shared_bytes(config.head_dim, config.tile_q, element);
    if (config.operation == Operation::backward)
        return backward_shared_bytes(config.head_dim, config.tile_q, config.tile_k, config.stages, element);
    if (config.operation == Operation::decode)
        return decode_shared_bytes(config.head_dim, config.tile_k, config.stages, element, config.tile_k);
    if (config.operation == Operation::forward_tangent) {
        const int plain = forward_tangent_shared_bytes(config, false), general = forward_tangent_shared_bytes(config, true);
        return plain > general ? plain : general;
    }
    return config.operation == Operation::backward_tangent ? backward_tangent_shared_bytes(config) : 0;
}

}  // namespace

extern const Architecture architecture_sm80;
const Architecture architecture_sm80 = {
    "sm80",
    false,
    supports,
    sm80::supports_decode,
    sm80::supports_tangent,
    shared_bytes,
    sm80::plan_forward,
    sm80::plan_backward,
    sm80::plan_bias_gradient,
    sm80::plan_decode,
    nullptr,
    nullptr,
    sm80::plan_forward_tangent,
    sm80::plan_backward_tangent,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace libflash::cuda
