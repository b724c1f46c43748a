// The contents of a KV cache's tables: lengths, entries, pages, and where new rows go. On the CPU, in a call.
#pragma once

#include "problem/decode.h"

namespace libflash {

// Refuses what would read or write outside the cache, or write one row twice.
void check_cache_contents(const DecodeProblem& problem);

}  // namespace libflash
