#include "capi/guard.h"
#include "plan/plan.h"

using namespace libflash;

extern "C" flash_status_t flash_block_mask_compress(const flash_tensor_t* block_mask, const flash_block_lists_t* lists,
                                                    void* stream) {
    return guard([&] {
        const CompressProblem problem = make_compress_problem(block_mask, lists);
        launch(problem, plan_compress(problem), stream);
    });
}
