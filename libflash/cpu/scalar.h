// The scalar reference: every operation in plain loops and double arithmetic, one row at a time, without tiles or workspace. The
// fuzzer and the C tests compare the engine with it.
#pragma once

#include "problem/attention.h"
#include "problem/decode.h"
#include "problem/tangent.h"

namespace libflash::cpu {

void scalar_forward(const AttentionProblem& problem);
void scalar_backward(const AttentionProblem& problem);
void scalar_decode(const DecodeProblem& problem);
void scalar_forward_tangent(const TangentProblem& problem);
void scalar_backward_tangent(const TangentProblem& problem);

}  // namespace libflash::cpu
