// Check of the rows of a cache to which new keys are appended. CPU only.
#pragma once

#include "problem/decode.h"

namespace libflash {

// Refuses a call that would write a row twice, or a row with a key that another sequence reads. Its block table or
// cache_batch_idx must have been checked.
void check_appended_rows(const DecodeProblem& problem);

}  // namespace libflash
