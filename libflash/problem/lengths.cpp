#include "problem/lengths.h"

#include <algorithm>

namespace libflash {

const int32_t* read_int32_vector(const TensorView& view, const Argument& argument, int64_t size, const Device& device,
                                 const char* names) {
    check_device(view, argument, device);
    check_dtype(view, argument, DType::i32);
    check_shape(view, argument, {size}, names);
    check_contiguous(view, argument);
    return static_cast<const int32_t*>(view.data);
}

Sequences build_sequences(const Side& side, const TensorView& rows, int64_t batch, const TensorView& cu, const TensorView& used,
                          int64_t max_seqlen) {
    Sequences sequences;
    sequences.batch = batch;
    sequences.capacity = cu.present ? rows.shape[0] : rows.shape[1];
    sequences.max_length = sequences.capacity;
    if (cu.present) {
        sequences.cu = read_int32_vector(cu, side.cu, batch + 1, rows.device, "(batch + 1,)");
        if (max_seqlen > 0) sequences.max_length = std::min(max_seqlen, sequences.capacity);
    }
    if (used.present) sequences.used = read_int32_vector(used, side.used, batch, rows.device, "(batch,)");
    return sequences;
}

namespace {

void check_prefix_sums(const Side& side, const Sequences& sequences, int64_t max_seqlen) {
    const int32_t* cu = sequences.cu;
    if (cu[0] != 0) invalid(side.cu, "must start at 0", "entry 0 is ", cu[0]);
    for (int64_t b = 0; b < sequences.batch; ++b) {
        if (cu[b + 1] < cu[b]) {
            invalid(side.cu, "must not decrease", "entries ", b, " and ", b + 1, " are ", cu[b], " and ", cu[b + 1]);
        }
        if (max_seqlen > 0 && int64_t{cu[b + 1]} - cu[b] > max_seqlen) {
            invalid(side.max_seqlen, "must be at least every length", "it is ", max_seqlen, ", sequence ", b, " has ",
                    int64_t{cu[b + 1]} - cu[b]);
        }
    }
    if (cu[sequences.batch] > sequences.capacity) {
        invalid(side.cu, "must not end past the rows of the packed tensor", "the last entry is ", cu[sequences.batch], ", ",
                side.rows, " has ", sequences.capacity, " rows");
    }
}

}  // namespace

int64_t check_lengths(const Side& side, const Sequences& sequences, int64_t max_seqlen) {
    if (sequences.cu) check_prefix_sums(side, sequences, max_seqlen);
    if (!sequences.cu && !sequences.used) return sequences.capacity;
    int64_t largest = 0;
    for (int64_t b = 0; b < sequences.batch; ++b) {
        if (sequences.used && (sequences.used[b] < 0 || sequences.used[b] > sequences.owned(b))) {
            invalid(side.used, "must be at least 0 and at most the rows of its sequence", "entry ", b, " is ", sequences.used[b],
                    " of ", sequences.owned(b));
        }
        largest = std::max(largest, sequences.length(b));
    }
    return largest;
}

}  // namespace libflash
