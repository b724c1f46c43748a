// The lines of explain's text that describe a plan.
#pragma once

#include <string>

#include "plan/plan.h"

namespace libflash {

// Append these lines: kernel, template instance, tiles, schedule, splits, launches, workspace.
void add_plan_lines(std::string& text, const ForwardPlan& plan);
void add_plan_lines(std::string& text, const BackwardPlan& plan);
void add_plan_lines(std::string& text, const DecodePlan& plan);
void add_plan_lines(std::string& text, const TangentPlan& plan);

}  // namespace libflash
