#include "capi/guard.h"
#include "plan/plan.h"
#include "problem/workspace.h"

using namespace libflash;

extern "C" flash_status_t flash_attention_backward(const flash_tensor_t* dout, const flash_tensor_t* q, const flash_tensor_t* k,
                                                   const flash_tensor_t* v, const flash_tensor_t* out, const flash_tensor_t* lse,
                                                   const flash_tensor_t* dq, const flash_tensor_t* dk, const flash_tensor_t* dv,
                                                   const flash_attention_options_t* options, void* workspace,
                                                   size_t workspace_bytes, void* stream) {
    return guard([&] {
        const AttentionProblem problem = make_backward_problem(dout, q, k, v, out, lse, dq, dk, dv, options, Reading::call);
        const BackwardPlan plan = plan_backward(problem);
        check_workspace(plan.workspace_bytes, workspace, workspace_bytes);
        launch(problem, plan, workspace, stream);
    });
}

extern "C" flash_status_t flash_attention_backward_workspace_size(const flash_tensor_t* dout, const flash_tensor_t* q,
                                                                  const flash_tensor_t* k, const flash_tensor_t* v,
                                                                  const flash_tensor_t* out, const flash_tensor_t* lse,
                                                                  const flash_tensor_t* dq, const flash_tensor_t* dk,
                                                                  const flash_tensor_t* dv,
                                                                  const flash_attention_options_t* options, size_t* bytes) {
    return guard([&] {
        if (!bytes) invalid("bytes", "is required", "NULL");
        *bytes =
            plan_backward(make_backward_problem(dout, q, k, v, out, lse, dq, dk, dv, options, Reading::shapes)).workspace_bytes;
    });
}
