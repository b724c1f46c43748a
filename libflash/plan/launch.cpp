// Passes a plan to its backend, which executes it without further decisions.
#include "build_info.h"
#include "plan/before_tangent.h"
#include "plan/plan.h"

namespace libflash {

void launch(const AttentionProblem& problem, const ForwardPlan& plan, void* workspace, [[maybe_unused]] void* stream) {
#if LIBFLASH_BUILD_CUDA
    if (plan.kernel->cuda) return cuda::forward(*plan.kernel->cuda, problem, plan.cuda, workspace, stream);
#endif
    plan.kernel->cpu->forward(problem, plan.cpu, workspace);
}

void launch(const AttentionProblem& problem, const BackwardPlan& plan, void* workspace, [[maybe_unused]] void* stream) {
#if LIBFLASH_BUILD_CUDA
    if (plan.kernel->cuda) return cuda::backward(*plan.kernel->cuda, problem, plan.cuda, workspace, stream);
#endif
    plan.kernel->cpu->backward(problem, plan.cpu, workspace);
}

void launch(const DecodeProblem& problem, const DecodePlan& plan, void* workspace, [[maybe_unused]] void* stream) {
#if LIBFLASH_BUILD_CUDA
    if (plan.kernel->cuda) return cuda::decode(*plan.kernel->cuda, problem, plan.cuda, workspace, stream);
#endif
    plan.kernel->cpu->decode(problem, plan.cpu, workspace);
}

void launch_schedule([[maybe_unused]] const DecodeProblem& problem, [[maybe_unused]] const DecodePlan& plan,
                     [[maybe_unused]] void* stream) {
#if LIBFLASH_BUILD_CUDA
    if (plan.cuda.prefill.plan.schedule_bytes > 0) cuda::decode_schedule(problem, plan.cuda, stream);
#endif
}

#if LIBFLASH_BUILD_CUDA
static void launch_on_cuda(const TangentProblem& problem, const TangentPlan& plan, char* workspace, void* stream) {
    const auto region = [&](const char* name) { return workspace + plan.workspace.offset(name); };
    const cuda::Kernel& kernel = *plan.kernel->cuda;
    if (problem.backward) {
        if (plan.backward.kernel) launch(primal_before(problem), plan.backward, region("backward"), stream);
        return cuda::backward_tangent(kernel, problem, plan.backward_tangent, region("tangent"), stream);
    }
    if (plan.forward.kernel) launch(primal_before(problem), plan.forward, region("forward"), stream);
    cuda::forward_tangent(kernel, problem, plan.forward_tangent, stream);
}
#endif

void launch(const TangentProblem& problem, const TangentPlan& plan, void* workspace, [[maybe_unused]] void* stream) {
#if LIBFLASH_BUILD_CUDA
    if (plan.kernel->cuda) {
        char* const memory = static_cast<char*>(workspace);
        if (!needs_lse(problem) || cuda::is_fused(plan.forward_tangent)) return launch_on_cuda(problem, plan, memory, stream);
        return launch_on_cuda(with_lse(problem, memory + plan.workspace.offset("lse")), plan, memory, stream);
    }
#endif
    const cpu::Kernels& kernels = *plan.kernel->cpu;
    (problem.backward ? kernels.backward_tangent : kernels.forward_tangent)(problem, plan.cpu, workspace);
}

void launch(const MergeProblem& problem, [[maybe_unused]] const MergePlan& plan, [[maybe_unused]] void* stream) {
#if LIBFLASH_BUILD_CUDA
    if (plan.kernel->cuda) return cuda::merge(*plan.kernel->cuda, problem, plan.cuda, stream);
#endif
    cpu::merge(problem);
}

void launch(const CompressProblem& problem, [[maybe_unused]] const CompressPlan& plan, [[maybe_unused]] void* stream) {
#if LIBFLASH_BUILD_CUDA
    if (plan.kernel->cuda) return cuda::compress(*plan.kernel->cuda, problem, plan.cuda, stream);
#endif
    cpu::compress_block_mask(problem.mask, problem.matrices, problem.rows, problem.cols, problem.row_counts, problem.row_indices,
                             problem.col_counts, problem.col_indices);
}

void launch(const CacheWriteProblem& problem, [[maybe_unused]] const CacheWritePlan& plan, [[maybe_unused]] void* stream) {
#if LIBFLASH_BUILD_CUDA
    if (plan.kernel->cuda) return cuda::cache_write(*plan.kernel->cuda, problem, plan.cuda, stream);
#endif
    cpu::write_cache(problem);
}

}  // namespace libflash
