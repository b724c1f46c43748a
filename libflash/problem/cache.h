// Checks of the contents of a KV cache's tables: lengths, entries, pages, and the rows to which new keys are appended. CPU only.
#pragma once

#include "problem/decode.h"

namespace libflash {

// Refuses a call that would read or write outside the cache, or write a row twice.
void check_cache_contents(const DecodeProblem& problem);

}  // namespace libflash
