// How long each sequence of a batch is, and where its rows start: fixed, ragged, or partly used. One side (query or key).
#pragma once

#include <cstdint>

namespace libflash {

struct Sequences {
    int64_t batch = 0;
    int64_t capacity = 0;              // dense: rows of each batch entry; packed: rows of the whole tensor
    int64_t max_length = 0;            // no sequence is longer: the caller's bound if given, else capacity
    const int32_t* cu = nullptr;       // packed: batch + 1 prefix sums; nullptr: dense
    const int32_t* used = nullptr;     // optional: rows that exist
    const int32_t* leftpad = nullptr;  // optional, decode: the first rows that do not exist

    bool packed() const { return cu != nullptr; }

    // The functions below read the arrays, so on CUDA problems only the device may call their like.
    // First row of sequence b, counted from the start of its batch entry (dense) or of the tensor (packed).
    int64_t start(int64_t b) const { return cu ? cu[b] : 0; }
    // Rows that the sequence owns, used or not.
    int64_t owned(int64_t b) const { return cu ? int64_t{cu[b + 1]} - cu[b] : capacity; }
    // Rows that take part.
    int64_t length(int64_t b) const { return used ? used[b] : owned(b); }
};

}  // namespace libflash
