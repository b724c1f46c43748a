// The text of the explain functions: the problem, the plan, and why the other kernels would not run.
#pragma once

#include <string>

#include "problem/build.h"

namespace libflash {

std::string explain(const AttentionProblem& problem);
std::string explain(const TangentProblem& problem);
std::string explain(const DecodeProblem& problem);

}  // namespace libflash
