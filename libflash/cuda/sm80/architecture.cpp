// The architecture sm80: its kernels support every problem of forward and backward but a few with positions, and statistics of
// rows (host/shard_options.h).
// decode_capabilities.cpp names the options of decode that they lack.
#include "cuda/architecture.h"
#include "cuda/attention/decode_params.h"
#include "cuda/host/shard_options.h"
#include "cuda/sm80/backward_tiles.h"
#include "cuda/sm80/plan.h"

namespace libflash::cuda {

namespace {

bool supports(const KernelConfig&, const AttentionProblem& problem, std::string* why) {
    return supports_shard_options(problem, why);
}

// Shared memory that a GPU must have for a kernel; 0: fits every GPU.
int shared_bytes(const KernelConfig& config) {
    const int element = element_bytes(config.dtype);
    if (config.operation == Operation::backward)
        return backward_shared_bytes(config.head_dim, config.tile_q, config.tile_k, config.stages, element);
    if (config.operation == Operation::decode)
        return decode_shared_bytes(config.head_dim, config.tile_k, config.stages, element, config.tile_k);
    return 0;
}

}  // namespace

extern const Architecture architecture_sm80;
const Architecture architecture_sm80 = {
    "sm80",  false,   supports, sm80::supports_decode, shared_bytes, sm80::plan_forward, sm80::plan_backward, sm80::plan_decode,
    nullptr, nullptr, nullptr,
};

}  // namespace libflash::cuda
