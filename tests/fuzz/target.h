// The operations of the target. Each reads its case from the bytes, and aborts the process when the library does not keep its
// word.
#pragma once

#include "bytes.h"

namespace fuzz {

void attention_target(Bytes& bytes);
void decode_target(Bytes& bytes);
void merge_target(Bytes& bytes);

}  // namespace fuzz
