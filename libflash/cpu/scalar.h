// The scalar truth: every operation in plain loops, double arithmetic, one row at a time, no tile and no workspace. It is what
// the fast engine is compared with where float64 Python is too far away: in the fuzzer and in C tests.
#pragma once

#include "problem/attention.h"
#include "problem/decode.h"

namespace libflash::cpu {

void scalar_forward(const AttentionProblem& problem);
void scalar_backward(const AttentionProblem& problem);
void scalar_decode(const DecodeProblem& problem);

}  // namespace libflash::cpu
