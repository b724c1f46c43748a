// The entry of sm_90a in the table of architectures: forward, backward, their tangents, decode of wide heads and of many rows,
// and prefill in f16 and bf16. capabilities.cpp, wide_capabilities.cpp, decode_capabilities.cpp, prefill_capabilities.cpp and
// tangent_capabilities.cpp name the options that these kernels do not support.
#include "cuda/architecture.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda {

namespace {

int shared_bytes(const KernelConfig&) { return 0; }  // every GPU of this architecture has enough shared memory

bool supports_decode(const KernelConfig& config, const DecodeProblem& problem, std::string* why) {
    if (config.operation == Operation::prefill) return sm90::supports_prefill(config, problem, why);
    if (config.operation == Operation::decode_prefix) return sm90::supports_prefix(config, problem, why);
    return sm90::supports_decode(config, problem, why);
}

}  // namespace

extern const Architecture architecture_sm90;
const Architecture architecture_sm90 = {
    "sm90",
    true,
    sm90::supports,
    supports_decode,
    sm90::supports_tangent,
    shared_bytes,
    sm90::plan_forward,
    sm90::plan_backward,
    nullptr,
    sm90::plan_decode,
    sm90::plan_prefill,
    sm90::plan_prefix,
    sm90::plan_forward_tangent,
    sm90::plan_backward_tangent,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace libflash::cuda
