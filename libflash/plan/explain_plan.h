// A plan as text for a person.
#pragma once

#include <string>

#include "plan/plan.h"

namespace libflash {

// Append the lines of a plan: kernel, template instance, tiles, schedule, splits, launches, workspace.
void add_plan_lines(std::string& text, const ForwardPlan& plan);
void add_plan_lines(std::string& text, const BackwardPlan& plan);
void add_plan_lines(std::string& text, const DecodePlan& plan);

}  // namespace libflash
