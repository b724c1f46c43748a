// The plan of the sm_90a decode kernel: that of rows of any lengths for sm80, with the tiles of this kernel.
#include "cuda/kernels.h"
#include "cuda/sm80/plan.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda::sm90 {

DecodePlan plan_decode(const Kernel& kernel, const DecodeProblem& problem, const DeviceProperties& device,
                       const DecodePrefill& prefill) {
    DecodePlan plan = sm80::plan_decode(kernel, problem, device, prefill);
    plan.instance = {0, "values in the keys"};
    plan.stages = kernel.config.stages;
    return plan;
}

}  // namespace libflash::cuda::sm90
