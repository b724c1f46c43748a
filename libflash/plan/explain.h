// What would run and why, as text for a person.
#pragma once

#include <string>

#include "problem/build.h"

namespace libflash {

std::string explain(const AttentionProblem& problem);
std::string explain(const DecodeProblem& problem);

}  // namespace libflash
