#include "capi/guard.h"
#include "plan/plan.h"
#include "problem/workspace.h"

using namespace libflash;

extern "C" flash_status_t flash_attention_decode(const flash_tensor_t* q, const flash_tensor_t* k_cache,
                                                 const flash_tensor_t* v_cache, const flash_tensor_t* out,
                                                 const flash_tensor_t* lse, const flash_decode_options_t* options,
                                                 void* workspace, size_t workspace_bytes, void* stream) {
    return guard([&] {
        const DecodeProblem problem = make_decode_problem(q, k_cache, v_cache, out, lse, options, Reading::call);
        const DecodePlan plan = plan_decode(problem);
        check_workspace(plan.workspace_bytes, workspace, workspace_bytes);
        launch(problem, plan, workspace, stream);
    });
}

extern "C" flash_status_t flash_attention_decode_workspace_size(const flash_tensor_t* q, const flash_tensor_t* k_cache,
                                                                const flash_tensor_t* v_cache, const flash_tensor_t* out,
                                                                const flash_tensor_t* lse, const flash_decode_options_t* options,
                                                                size_t* bytes) {
    return guard([&] {
        if (!bytes) invalid("bytes", "is required", "NULL");
        *bytes = plan_decode(make_decode_problem(q, k_cache, v_cache, out, lse, options, Reading::shapes)).workspace_bytes;
    });
}

extern "C" flash_status_t flash_attention_decode_schedule_size(const flash_tensor_t* q, const flash_tensor_t* k_cache,
                                                               const flash_tensor_t* v_cache, const flash_tensor_t* out,
                                                               const flash_tensor_t* lse, const flash_decode_options_t* options,
                                                               size_t* bytes) {
    return guard([&] {
        if (!bytes) invalid("bytes", "is required", "NULL");
        DecodeProblem problem = make_decode_problem(q, k_cache, v_cache, out, lse, options, Reading::shapes);
        problem.schedule = {};
        *bytes = plan_decode(problem).cuda.prefill.plan.schedule_bytes;
    });
}

extern "C" flash_status_t flash_attention_decode_schedule(const flash_tensor_t* q, const flash_tensor_t* k_cache,
                                                          const flash_tensor_t* v_cache, const flash_tensor_t* out,
                                                          const flash_tensor_t* lse, const flash_decode_options_t* options,
                                                          const flash_tensor_t* schedule, void* stream) {
    return guard([&] {
        const DecodeProblem problem = make_decode_problem(q, k_cache, v_cache, out, lse, options, Reading::schedule, schedule);
        launch_schedule(problem, plan_decode(problem), stream);
    });
}
