#include "cuda/host/statistics.h"

#include "problem/check.h"

namespace libflash::cuda {

bool agrees_on_statistics(const KernelConfig& config, const AttentionProblem& problem, std::string* why) {
    if (config.statistics == wants_statistics(problem)) return true;
    if (config.statistics) return reject(why, "max_logit: the kernel is for calls with statistics of rows (none is wanted)");
    return reject(why, problem.max_logit.present ? "max_logit" : "entropy", ": the kernel does not support it");
}

void plan_head_maxima(ForwardPlan& plan, const Kernel& kernel, const AttentionProblem& problem) {
    if (!wants_head_maxima(problem) || problem.heads_q == 0) return;
    const KernelResources resources = kernel.resources(static_cast<int>(ForwardStep::head_maxima), plan.instance.number);
    plan.head_maxima = launch_shape((problem.heads_q + resources.threads - 1) / resources.threads, resources);
}

}  // namespace libflash::cuda
