// Check of the rows of a cache to which new keys are appended. CPU only.
#pragma once

#include "problem/decode.h"

namespace libflash {

// Refuses a call that would write a row twice, or overwrite a key that a sequence reads. The block table or cache_batch_idx of
// the call must have been checked before.
void check_appended_rows(const DecodeProblem& problem);

}  // namespace libflash
