// What the kernels for sm_90a can do: forward and backward in 16 bits, without some options (capabilities.cpp).
#include "cuda/architecture.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda {

namespace {

int shared_bytes(const KernelConfig&) { return 0; }  // every GPU of this architecture has enough

}  // namespace

extern const Architecture architecture_sm90;
const Architecture architecture_sm90 = {
    "sm90", true, sm90::supports, shared_bytes, sm90::plan_forward, sm90::plan_backward, nullptr, nullptr, nullptr,
};

}  // namespace libflash::cuda
