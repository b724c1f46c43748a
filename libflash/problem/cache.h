// Checks of the contents of a KV cache's tables: lengths, entries, pages, and the rows to which new keys are appended
// (cache_append.h). CPU only.
#pragma once

#include "problem/decode.h"
#include "problem/sequence_keys.h"

namespace libflash {

// Refuses a call that would read or write outside the cache, write a row twice, or write a row with a key that another sequence
// reads.
void check_cache_contents(const DecodeProblem& problem);

// The keys from the first to the last that the call reads or writes.
SequenceKeys::Range touched_keys(const DecodeProblem& problem, int64_t b);

// The page in a column of a sequence's block table.
int64_t page_of(const DecodeProblem& problem, int64_t b, int64_t column);

}  // namespace libflash
