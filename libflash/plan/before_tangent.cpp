#include "plan/before_tangent.h"

#include <algorithm>

namespace libflash {

namespace {

TensorView lse_view(const TangentProblem& problem, void* data) {
    TensorView view;
    view.present = true;
    view.data = data;
    view.dtype = problem.dtype == DType::f64 ? DType::f64 : DType::f32;
    view.device = problem.device;
    const int64_t dense[] = {problem.batch, problem.heads_q, problem.q_rows.capacity};
    view.ndim = problem.q_rows.packed() ? 2 : 3;
    std::copy(dense + 3 - view.ndim, dense + 3, view.shape);
    for (int64_t i = view.ndim - 1, step = 1; i >= 0; step *= view.shape[i--]) view.stride[i] = step;
    return view;
}

}  // namespace

size_t lse_bytes(const TangentProblem& problem) {
    const TensorView view = lse_view(problem, nullptr);
    return static_cast<size_t>(view.elements() * element_bytes(view.dtype));
}

TangentProblem with_lse(TangentProblem problem, void* lse) {
    problem.lse = lse_view(problem, lse);
    return problem;
}

AttentionProblem primal_before(const TangentProblem& problem) {
    AttentionProblem primal = problem;
    if (!problem.backward) primal.dout = primal.dlse = primal.delta = {};
    primal.request.kernel = nullptr;
    return primal;
}

}  // namespace libflash
