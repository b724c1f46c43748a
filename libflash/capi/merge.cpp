#include "capi/guard.h"
#include "plan/plan.h"

using namespace libflash;

extern "C" flash_status_t flash_attention_merge(const flash_tensor_t* outs, const flash_tensor_t* lses, int32_t count,
                                                const flash_tensor_t* out, const flash_tensor_t* lse,
                                                const flash_merge_options_t* options, void* stream) {
    return guard([&] {
        const MergeProblem problem = make_merge_problem(outs, lses, count, out, lse, options);
        launch(problem, plan_merge(problem), stream);
    });
}
