// The fuzz targets of the operations. Each reads its case from the bytes and aborts the process if the library misbehaves.
#pragma once

#include "bytes.h"

namespace fuzz {

void attention_target(Bytes& bytes);
void cache_write_target(Bytes& bytes);
void decode_target(Bytes& bytes);
void merge_target(Bytes& bytes);
void tangent_target(Bytes& bytes);

}  // namespace fuzz
