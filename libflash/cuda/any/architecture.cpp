// The capabilities and plans of the kernels that run on every GPU: merge, compress and cache_write.
#include "cuda/architecture.h"
#include "cuda/any/plan.h"

namespace libflash::cuda {

namespace {

bool supports(const KernelConfig&, const AttentionProblem&, std::string*) { return true; }
int shared_bytes(const KernelConfig&) { return 0; }  // so little that every device has it

}  // namespace

extern const Architecture architecture_any;
const Architecture architecture_any = {
    "any",
    false,
    supports,
    nullptr,
    nullptr,
    shared_bytes,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    any::plan_merge,
    any::plan_compress,
    any::plan_cache_write,
};

}  // namespace libflash::cuda
