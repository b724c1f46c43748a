#include "capi/guard.h"
#include "plan/plan.h"
#include "problem/workspace.h"

using namespace libflash;

namespace {

void run(const TangentProblem& problem, void* workspace, size_t workspace_bytes, void* stream) {
    const TangentPlan plan = plan_tangent(problem);
    check_workspace(plan.workspace_bytes, workspace, workspace_bytes);
    launch(problem, plan, workspace, stream);
}

}  // namespace

extern "C" flash_status_t flash_attention_forward_tangent(const flash_tensor_t* q, const flash_tensor_t* k,
                                                          const flash_tensor_t* v, const flash_tensor_t* out,
                                                          const flash_tensor_t* lse, const flash_tangents_t* tangents,
                                                          const flash_attention_options_t* options, void* workspace,
                                                          size_t workspace_bytes, void* stream) {
    return guard([&] {
        run(make_forward_tangent_problem(q, k, v, out, lse, tangents, options, Reading::call), workspace, workspace_bytes,
            stream);
    });
}

extern "C" flash_status_t flash_attention_forward_tangent_workspace_size(
    const flash_tensor_t* q, const flash_tensor_t* k, const flash_tensor_t* v, const flash_tensor_t* out,
    const flash_tensor_t* lse, const flash_tangents_t* tangents, const flash_attention_options_t* options, size_t* bytes) {
    return guard([&] {
        if (!bytes) invalid("bytes", "is required", "NULL");
        *bytes =
            plan_tangent(make_forward_tangent_problem(q, k, v, out, lse, tangents, options, Reading::shapes)).workspace_bytes;
    });
}

extern "C" flash_status_t flash_attention_backward_tangent(const flash_tensor_t* dout, const flash_tensor_t* q,
                                                           const flash_tensor_t* k, const flash_tensor_t* v,
                                                           const flash_tensor_t* out, const flash_tensor_t* lse,
                                                           const flash_tensor_t* dq, const flash_tensor_t* dk,
                                                           const flash_tensor_t* dv, const flash_tangents_t* tangents,
                                                           const flash_attention_options_t* options, void* workspace,
                                                           size_t workspace_bytes, void* stream) {
    return guard([&] {
        run(make_backward_tangent_problem(dout, q, k, v, out, lse, dq, dk, dv, tangents, options, Reading::call), workspace,
            workspace_bytes, stream);
    });
}

extern "C" flash_status_t flash_attention_backward_tangent_workspace_size(
    const flash_tensor_t* dout, const flash_tensor_t* q, const flash_tensor_t* k, const flash_tensor_t* v,
    const flash_tensor_t* out, const flash_tensor_t* lse, const flash_tensor_t* dq, const flash_tensor_t* dk,
    const flash_tensor_t* dv, const flash_tangents_t* tangents, const flash_attention_options_t* options, size_t* bytes) {
    return guard([&] {
        if (!bytes) invalid("bytes", "is required", "NULL");
        *bytes =
            plan_tangent(make_backward_tangent_problem(dout, q, k, v, out, lse, dq, dk, dv, tangents, options, Reading::shapes))
                .workspace_bytes;
    });
}
