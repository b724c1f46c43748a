// Ragged and partly used sequences: cu_seqlens, seqused, and what they say about the largest length.
#pragma once

#include "problem/read.h"
#include "problem/sequence.h"

namespace libflash {

// One side, query or key, of a call: which tensors describe its lengths and what they are called.
struct Side {
    const char* rows;        // "q"
    const char* cu;          // "cu_seqlens_q"
    const char* used;        // "seqused_q"
    const char* max_seqlen;  // "max_seqlen_q"
};

inline constexpr Side kQuerySide = {"q", "cu_seqlens_q", "seqused_q", "max_seqlen_q"};
inline constexpr Side kKeySide = {"k", "cu_seqlens_k", "seqused_k", "max_seqlen_k"};

// An INT32 vector without gaps.
const int32_t* read_int32_vector(const TensorView& view, const Argument& argument, int64_t size, const Device& device,
                                 const char* names);

// `rows` is q or k. Contents are not looked at.
Sequences build_sequences(const Side& side, const TensorView& rows, int64_t batch, const TensorView& cu, const TensorView& used,
                          int64_t max_seqlen);

// Reads the arrays: on the CPU, in a call. Returns the largest number of rows that take part in any sequence.
int64_t check_lengths(const Side& side, const Sequences& sequences, int64_t max_seqlen);

}  // namespace libflash
