// Sequences: where each sequence of a batch starts and how many rows it has, for one side (queries or keys).
#pragma once

#include <cstdint>

namespace libflash {

struct Sequences {
    int64_t batch = 0;
    int64_t capacity = 0;           // dense: rows of each batch entry; packed: rows of the whole tensor
    int64_t max_length = 0;         // upper bound of the lengths: the caller's if given, else capacity
    const int32_t* cu = nullptr;    // packed: batch + 1 prefix sums; nullptr: dense
    const int32_t* used = nullptr;  // optional, seqused: number of rows that exist

    bool packed() const { return cu != nullptr; }

    // The functions below read the arrays. Call them for host tensors only: in CUDA calls the arrays are in device memory.
    // First row of sequence b, from the start of its batch entry (dense) or of the tensor (packed).
    int64_t start(int64_t b) const { return cu ? cu[b] : 0; }
    // Number of rows that belong to the sequence, used or not.
    int64_t owned(int64_t b) const { return cu ? int64_t{cu[b + 1]} - cu[b] : capacity; }
    // Rows of all sequences.
    int64_t total() const { return cu ? cu[batch] : batch * capacity; }
    // The sequence that has row `row`, where rows are counted over all sequences.
    int64_t sequence_of(int64_t row) const {
        if (!cu) return row / capacity;
        int64_t low = 0, high = batch;  // binary search for the last sequence that starts at or before the row
        while (low + 1 < high) {
            const int64_t middle = (low + high) / 2;
            (cu[middle] <= row ? low : high) = middle;
        }
        return low;
    }
    // Rows of all sequences before sequence b.
    int64_t before(int64_t b) const { return cu ? cu[b] : b * capacity; }
    // Number of rows that exist.
    int64_t length(int64_t b) const { return used ? used[b] : owned(b); }
};

}  // namespace libflash
