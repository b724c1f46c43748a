// Conversions that the tangent operations share. Host only, no CUDA header.
#pragma once

#include "cuda/host/problem_params.h"
#include "problem/tangent.h"

namespace libflash::cuda {

// Rows of a tensor that may be absent.
inline RowsParams optional_rows(const TensorView& tensor) { return tensor.present ? rows_params(tensor) : RowsParams{}; }

// Whether rows of a tensor can be accessed 16 bytes at a time. An absent one is not accessed.
inline bool optional_fits_vectors(const TangentProblem& problem, const TensorView& tensor, int64_t channels) {
    return !tensor.present || rows_fit_vectors(rows_params(tensor), channels, element_bytes(problem.dtype));
}

// Whether q, k, v and their tangents can be loaded 16 bytes at a time.
inline bool tangents_load_in_vectors(const TangentProblem& problem) {
    const Tangents& tangents = problem.tangents;
    return loads_in_vectors(problem) && optional_fits_vectors(problem, tangents.q, problem.head_dim) &&
           optional_fits_vectors(problem, tangents.k, problem.head_dim) &&
           optional_fits_vectors(problem, tangents.v, problem.head_dim_v);
}

// Whether out, dout and their tangents can be loaded 16 bytes at a time.
inline bool outputs_load_in_vectors(const TangentProblem& problem) {
    const auto fits = [&](const TensorView& rows) { return optional_fits_vectors(problem, rows, problem.head_dim_v); };
    return fits(problem.out) && fits(problem.dout) && fits(problem.tangents.out) && fits(problem.tangents.dout);
}

// Fills what the parameters of both operations have in common.
template <class Params>
void fill_in_tangents(Params& params, const TangentProblem& problem) {
    const Tangents& tangents = problem.tangents;
    fill_in_problem(params, problem);
    params.tq = optional_rows(tangents.q);
    params.tk = optional_rows(tangents.k);
    params.tv = optional_rows(tangents.v);
    params.tout = optional_rows(tangents.out);
    params.dout = optional_rows(problem.dout);
    params.tdout = optional_rows(tangents.dout);
    params.tbias = score_params(tangents.bias);
    params.tsink = head_params(tangents.sink);
    params.tlse = row_statistics_params(tangents.lse);
    params.dlse = row_statistics_params(problem.dlse);
    params.tdlse = row_statistics_params(tangents.dlse);
    params.delta = row_statistics_params(problem.delta);
    params.tdelta = row_statistics_params(tangents.delta);
}

}  // namespace libflash::cuda
