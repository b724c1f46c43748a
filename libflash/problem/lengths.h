// Checks of cu_seqlens and seqused.
#pragma once

#include "problem/read.h"
#include "problem/sequence.h"

namespace libflash {

// The names of the arguments of one side (queries or keys), for error texts.
struct Side {
    const char* rows;        // "q"
    const char* cu;          // "cu_seqlens_q"
    const char* used;        // "seqused_q"
    const char* max_seqlen;  // "max_seqlen_q"
};

inline constexpr Side kQuerySide = {"q", "cu_seqlens_q", "seqused_q", "max_seqlen_q"};
inline constexpr Side kKeySide = {"k", "cu_seqlens_k", "seqused_k", "max_seqlen_k"};

// Checks that `view` is a contiguous INT32 vector of `size` elements; returns its data. `names`: the shape in words, for errors.
const int32_t* read_int32_vector(const TensorView& view, const Argument& argument, int64_t size, const Device& device,
                                 const char* names);

// `rows`: the tensor whose rows are divided into sequences. Does not read the contents of `cu` and `used`.
Sequences build_sequences(const Side& side, const TensorView& rows, int64_t batch, const TensorView& cu, const TensorView& used,
                          int64_t max_seqlen);

// Checks the contents of the arrays, which must be in host memory. Returns the largest length of a sequence.
int64_t check_lengths(const Side& side, const Sequences& sequences, int64_t max_seqlen);

}  // namespace libflash
