#include "cpu/scalar.h"

#include "cpu/isa.h"
#include "cpu/kernels.h"

namespace libflash::cpu {
namespace {

template <class Problem>
Plan plan(const Problem&) {
    return {};  // one thread, no tiles, no workspace
}

template <class Problem, void (*kRun)(const Problem&)>
void run(const Problem& problem, const Plan&, void*) {
    kRun(problem);
}

}  // namespace

extern const Kernels kernels_scalar;
const Kernels kernels_scalar = {
    "scalar",
    usable_always,
    plan<AttentionProblem>,
    run<AttentionProblem, scalar_forward>,
    plan<AttentionProblem>,
    run<AttentionProblem, scalar_backward>,
    plan<DecodeProblem>,
    run<DecodeProblem, scalar_decode>,
    plan<TangentProblem>,
    run<TangentProblem, scalar_forward_tangent>,
    plan<TangentProblem>,
    run<TangentProblem, scalar_backward_tangent>,
};

}  // namespace libflash::cpu
