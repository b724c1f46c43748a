#include "capi/guard.h"
#include "plan/plan.h"

using namespace libflash;

extern "C" flash_status_t flash_cache_write(const flash_tensor_t* k_new, const flash_tensor_t* v_new,
                                            const flash_tensor_t* k_cache, const flash_tensor_t* v_cache,
                                            const flash_tensor_t* slots, const flash_cache_write_options_t* options,
                                            void* stream) {
    return guard([&] {
        const CacheWriteProblem problem = make_cache_write_problem(k_new, v_new, k_cache, v_cache, slots, options, Reading::call);
        launch(problem, plan_cache_write(problem), stream);
    });
}

extern "C" flash_status_t flash_cache_write_workspace_size(const flash_tensor_t* k_new, const flash_tensor_t* v_new,
                                                           const flash_tensor_t* k_cache, const flash_tensor_t* v_cache,
                                                           const flash_tensor_t* slots,
                                                           const flash_cache_write_options_t* options, size_t* bytes) {
    return guard([&] {
        if (!bytes) invalid("bytes", "is required", "NULL");
        static_cast<void>(
            plan_cache_write(make_cache_write_problem(k_new, v_new, k_cache, v_cache, slots, options, Reading::shapes)));
        *bytes = 0;
    });
}
