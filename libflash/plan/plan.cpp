#include "plan/plan.h"

#include "build_info.h"

#if LIBFLASH_BUILD_CUDA
#include "cuda/kernels.h"
#endif

namespace libflash {

Plan make_plan(const AttentionProblem& problem, const KernelRow& row) {
    Plan plan;
    plan.row = &row;
#if LIBFLASH_BUILD_CUDA
    if (row.cuda) {
        cuda::check_sizes(problem);
        const auto bytes = problem.backward ? cuda::backward_workspace_bytes : cuda::forward_workspace_bytes;
        plan.workspace_bytes = bytes(*row.cuda, problem);
        return plan;
    }
#endif
    plan.cpu = problem.backward ? row.cpu->plan_backward(problem) : row.cpu->plan_forward(problem);
    plan.workspace_bytes = plan.cpu.workspace_bytes;
    return plan;
}

Plan make_plan(const DecodeProblem& problem, const KernelRow& row) {
    Plan plan;
    plan.row = &row;
#if LIBFLASH_BUILD_CUDA
    if (row.cuda) {
        cuda::check_sizes(problem);
        const cuda::DecodeCut cut = cuda::decode_cut(*row.cuda, problem);
        plan.cuda_splits = cut.splits;
        plan.cuda_heads = cut.heads;
        plan.workspace_bytes = cuda::decode_workspace_bytes(*row.cuda, problem, cut);
        return plan;
    }
#endif
    plan.cpu = row.cpu->plan_decode(problem);
    plan.workspace_bytes = plan.cpu.workspace_bytes;
    return plan;
}

Plan make_plan(const AttentionProblem& problem) { return make_plan(problem, choose_kernel(subject_of(problem))); }
Plan make_plan(const DecodeProblem& problem) { return make_plan(problem, choose_kernel(subject_of(problem))); }

void launch(const AttentionProblem& problem, const Plan& plan, void* workspace, void* stream) {
#if LIBFLASH_BUILD_CUDA
    if (plan.row->cuda && problem.backward) return cuda::backward(*plan.row->cuda, problem, workspace, stream);
    if (plan.row->cuda) return cuda::forward(*plan.row->cuda, problem, workspace, stream);
#endif
    static_cast<void>(stream);
    const auto function = problem.backward ? plan.row->cpu->backward : plan.row->cpu->forward;
    function(problem, plan.cpu, workspace);
}

void launch(const DecodeProblem& problem, const Plan& plan, void* workspace, void* stream) {
#if LIBFLASH_BUILD_CUDA
    if (plan.row->cuda) return cuda::decode(*plan.row->cuda, problem, {plan.cuda_splits, plan.cuda_heads}, workspace, stream);
#endif
    static_cast<void>(stream);
    plan.row->cpu->decode(problem, plan.cpu, workspace);
}

void run(const MergeProblem& problem, void* stream) {
    const KernelRow& row = choose_kernel(subject_of(problem));
#if LIBFLASH_BUILD_CUDA
    if (row.cuda) return cuda::merge(*row.cuda, problem, stream);
#endif
    static_cast<void>(row), static_cast<void>(stream);
    cpu::merge(problem);
}

void run(const CompressProblem& problem, void* stream) {
    const KernelRow& row = choose_kernel(subject_of(problem));
#if LIBFLASH_BUILD_CUDA
    if (row.cuda) return cuda::compress(*row.cuda, problem, stream);
#endif
    static_cast<void>(row), static_cast<void>(stream);
    cpu::compress_block_mask(problem.mask, problem.matrices, problem.rows, problem.cols, problem.row_counts, problem.row_indices,
                             problem.col_counts, problem.col_indices);
}

}  // namespace libflash
