// Checks of the contents of the arrays that describe a KV cache: lengths, entries, pages, and the rows to which new keys are
// appended (cache_append.h). CPU only.
#pragma once

#include "problem/decode.h"
#include "problem/sequence_keys.h"

namespace libflash {

// Refuses a call that would read or write outside the cache, write a row twice, or overwrite a key that a sequence reads.
void check_cache_contents(const DecodeProblem& problem);

// The range from the first to the last key of sequence `b` that the call reads or writes.
SequenceKeys::Range touched_keys(const DecodeProblem& problem, int64_t b);

// The page in column `column` of the block table of sequence `b`.
int64_t page_of(const DecodeProblem& problem, int64_t b, int64_t column);

}  // namespace libflash
