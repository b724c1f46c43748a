// cache_write: fills the kernel parameters from the problem, and launches the kernel.
#include "cuda/host/cache_params.h"
#include "cuda/host/launch.h"
#include "cuda/kernels.h"

namespace libflash::cuda {
namespace {

CacheWriteParams make_params(const CacheWriteProblem& problem) {
    const KvCache& cache = problem.cache;
    CacheWriteParams params{};
    params.k_new = rows_params(problem.k_new);
    params.k = rows_params(cache.k);
    params.channels = static_cast<int32_t>(cache.k.shape[3]);
    if (cache.v.present) {
        params.v_new = rows_params(problem.v_new);
        params.v = rows_params(cache.v);
        params.channels_v = static_cast<int32_t>(cache.v.shape[3]);
    }
    if (cache.k_rope.present) {
        params.rope_new = rows_params(problem.k_rope_new);
        params.rope = rows_params(cache.k_rope);
        params.channels_rope = static_cast<int32_t>(cache.rope_dim());
    }
    params.k_scale = cache_scale_params(cache.k_scale);
    params.v_scale = cache_scale_params(cache.v_scale);
    params.rotary = rotary_params(problem);
    params.slots = problem.slots.data;
    params.wide_slots = problem.slots.dtype == DType::i64;
    params.positions = problem.positions;
    params.rows = problem.rows;
    params.cache_blocks = problem.cache_blocks();
    params.cache_block_rows = problem.cache_block_rows();
    params.heads = static_cast<int32_t>(problem.heads_k);
    params.parts = parts_of(problem);
    params.code = code_type(cache);
    return params;
}

}  // namespace

void cache_write(const Kernel& kernel, const CacheWriteProblem& problem, const CacheWritePlan& plan, void* stream) {
    const DeviceGuard guard(problem.device.id);
    check(kernel.cache_write(plan, make_params(problem), stream), kernel.config.name);
}

}  // namespace libflash::cuda
