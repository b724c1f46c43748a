// The options of decode that the sm_80 kernels lack. plan/selection.cpp checks dtype, head dims and device.
#include "cuda/sm80/plan.h"
#include "problem/check.h"

namespace libflash::cuda::sm80 {
namespace {

// The first requested option that decode lacks, or nullptr.
const char* option_decode_lacks(const DecodeProblem&) { return nullptr; }

}  // namespace

bool supports_decode(const KernelConfig&, const DecodeProblem& problem, std::string* why) {
    const char* option = option_decode_lacks(problem);
    if (option && why) *why = text_of(option, ": the kernel does not know it");
    return !option;
}

}  // namespace libflash::cuda::sm80
