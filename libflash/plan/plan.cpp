#include "plan/plan.h"

#include <algorithm>

#include "plan/before_tangent.h"
#include "plan/selection.h"
#include "problem/schedule.h"

namespace libflash {

namespace {

const cuda::DeviceProperties& device_of(const Device& device) { return cuda::device_properties(device.id); }

// The device, less the multiprocessors that the call leaves to other kernels (sm_margin).
cuda::DeviceProperties device_of(const AttentionProblem& problem) {
    cuda::DeviceProperties device = device_of(problem.device);
    device.multiprocessors = std::max(1, device.multiprocessors - problem.request.sm_margin);
    return device;
}

// The kernel for the long chunks of a decode call on a GPU.
cuda::DecodePrefill prefill_of(const DecodeProblem& problem) {
    const KernelEntry* entry = find_kernel(prefill_query(problem));
    if (!entry) return {};
    const cuda::PrefillPlan plan = entry->cuda->architecture->plan_prefill(*entry->cuda, problem, device_of(problem.device));
    if (plan.attention.blocks == 0) return {};
    return {entry->info.name, entry->cuda->prefill, plan};
}

// Selects the separate kernel for shared keys, if there is one. It gives the same bits.
void take_prefix_kernel(cuda::DecodePlan& plan, const DecodeProblem& problem, const cuda::Kernel& kernel) {
    if (plan.prefix.blocks == 0) return;
    const KernelEntry* entry = find_kernel(prefix_query(problem));
    if (!entry || entry->cuda->config.head_dim != kernel.config.head_dim) return;
    entry->cuda->architecture->plan_prefix(plan, *entry->cuda, problem, device_of(problem.device));
}

// Selects the kernel that computes the gradient of the bias, if the architecture of `kernel` has no code for it.
void take_bias_gradient_kernel(cuda::BackwardPlan& plan, const AttentionProblem& problem, const cuda::Kernel& kernel) {
    if (!problem.dbias.present || kernel.architecture->plan_bias_gradient) return;
    plan.dbias_kernel = find_bias_gradient_kernel(problem)->cuda;
    plan.dbias = plan.dbias_kernel->architecture->plan_bias_gradient(*plan.dbias_kernel, problem);
}

// Calls the backend's planner and copies the workspace size.
template <class Plan, class MakeCpu, class MakeCuda>
Plan make_plan(const KernelEntry& kernel, const MakeCpu& make_cpu, const MakeCuda& make_cuda) {
    Plan plan;
    plan.kernel = &kernel;
    if (kernel.cuda) {
        plan.cuda = make_cuda(*kernel.cuda->architecture);
        plan.workspace_bytes = plan.cuda.workspace.bytes();
    } else {
        plan.cpu = make_cpu(*kernel.cpu);
        plan.workspace_bytes = plan.cpu.workspace_bytes;
    }
    return plan;
}

}  // namespace

ForwardPlan plan_forward(const AttentionProblem& problem, const KernelEntry& kernel) {
    return make_plan<ForwardPlan>(
        kernel, [&](const cpu::Kernels& kernels) { return kernels.plan_forward(problem); },
        [&](const cuda::Architecture& architecture) {
            return architecture.plan_forward(*kernel.cuda, problem, device_of(problem));
        });
}

BackwardPlan plan_backward(const AttentionProblem& problem, const KernelEntry& kernel) {
    return make_plan<BackwardPlan>(
        kernel, [&](const cpu::Kernels& kernels) { return kernels.plan_backward(problem); },
        [&](const cuda::Architecture& architecture) {
            cuda::BackwardPlan plan = architecture.plan_backward(*kernel.cuda, problem, device_of(problem));
            take_bias_gradient_kernel(plan, problem, *kernel.cuda);
            return plan;
        });
}

DecodePlan plan_decode(const DecodeProblem& problem, const KernelEntry& kernel) {
    return make_plan<DecodePlan>(
        kernel, [&](const cpu::Kernels& kernels) { return kernels.plan_decode(problem); },
        [&](const cuda::Architecture& architecture) {
            cuda::DecodePlan plan =
                architecture.plan_decode(*kernel.cuda, problem, device_of(problem.device), prefill_of(problem));
            take_prefix_kernel(plan, problem, *kernel.cuda);
            check_schedule(problem.schedule, plan.prefill.plan.schedule_bytes);
            return plan;
        });
}

namespace {

void plan_forward_tangent(TangentPlan& plan, const TangentProblem& problem) {
    const cuda::Kernel& kernel = *plan.kernel->cuda;
    plan.forward_tangent = kernel.architecture->plan_forward_tangent(kernel, problem, device_of(problem));
    if (problem.from_lse || cuda::is_fused(plan.forward_tangent)) return;
    plan.forward = plan_forward(primal_before(needs_lse(problem) ? with_lse(problem, nullptr) : problem));
    plan.workspace.add("forward", plan.forward.workspace_bytes);
    if (needs_lse(problem)) plan.workspace.add("lse", lse_bytes(problem));
}

void plan_backward_tangent(TangentPlan& plan, const TangentProblem& problem) {
    const cuda::Kernel& kernel = *plan.kernel->cuda;
    plan.backward_tangent = kernel.architecture->plan_backward_tangent(kernel, problem, device_of(problem));
    plan.workspace.add("tangent", plan.backward_tangent.workspace.bytes());
    if (!problem.with_gradients()) return;
    plan.backward = plan_backward(primal_before(problem));
    plan.workspace.add("backward", plan.backward.workspace_bytes);
}

TangentPlan plan_tangent_on_cuda(const TangentProblem& problem, const KernelEntry& kernel) {
    TangentPlan plan;
    plan.kernel = &kernel;
    if (problem.backward) {
        plan_backward_tangent(plan, problem);
    } else {
        plan_forward_tangent(plan, problem);
    }
    plan.workspace_bytes = plan.workspace.bytes();
    return plan;
}

}  // namespace

TangentPlan plan_tangent(const TangentProblem& problem, const KernelEntry& kernel) {
    if (kernel.cuda) return plan_tangent_on_cuda(problem, kernel);
    TangentPlan plan;
    plan.kernel = &kernel;
    plan.cpu = problem.backward ? kernel.cpu->plan_backward_tangent(problem) : kernel.cpu->plan_forward_tangent(problem);
    plan.workspace_bytes = plan.cpu.workspace_bytes;
    return plan;
}

ForwardPlan plan_forward(const AttentionProblem& problem) { return plan_forward(problem, choose_kernel(kernel_query(problem))); }
BackwardPlan plan_backward(const AttentionProblem& problem) {
    return plan_backward(problem, choose_kernel(kernel_query(problem)));
}
DecodePlan plan_decode(const DecodeProblem& problem) { return plan_decode(problem, choose_kernel(kernel_query(problem))); }

TangentPlan plan_tangent(const TangentProblem& problem) { return plan_tangent(problem, choose_kernel(kernel_query(problem))); }

// Plans an operation with kernels for the CPU and for every GPU, whose CPU kernel needs no plan. make_plan: a member of the
// architecture.
template <class Plan, class Problem, class MakePlan>
Plan plan_for_any_gpu(const Problem& problem, MakePlan cuda::Architecture::* make_plan) {
    Plan plan;
    plan.kernel = &choose_kernel(kernel_query(problem));
    if (const cuda::Kernel* kernel = plan.kernel->cuda)
        plan.cuda = (kernel->architecture->*make_plan)(*kernel, problem, device_of(problem.device));
    return plan;
}

MergePlan plan_merge(const MergeProblem& problem) {
    return plan_for_any_gpu<MergePlan>(problem, &cuda::Architecture::plan_merge);
}

CompressPlan plan_compress(const CompressProblem& problem) {
    return plan_for_any_gpu<CompressPlan>(problem, &cuda::Architecture::plan_compress);
}

CacheWritePlan plan_cache_write(const CacheWriteProblem& problem) {
    return plan_for_any_gpu<CacheWritePlan>(problem, &cuda::Architecture::plan_cache_write);
}

}  // namespace libflash
