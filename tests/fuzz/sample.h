// A small fixed problem for every operation, for the tests that call from many threads or make allocations fail.
#pragma once

#include <vector>

#include "check.h"

namespace fuzz {

enum class Operation { forward, backward, decode, merge, compress, explain };
constexpr Operation kOperations[] = {Operation::forward, Operation::backward, Operation::decode,
                                     Operation::merge,   Operation::compress, Operation::explain};

// Shapes and values depend only on the seed.
class Sample {
public:
    // `large`: enough work for several threads.
    Sample(Operation operation, int32_t dtype, uint64_t seed, bool large = false);

    // Makes one call with its own output tensors and appends their bytes to `results`. `threads`: num_threads of the call.
    flash_status_t run(int32_t threads, std::vector<char>* results) const;

private:
    flash_status_t forward(const flash_attention_options_t& options, Tensor& out, Tensor& lse) const;

    Operation operation_;
    int64_t batch_, heads_q_, heads_k_, seqlen_q_, seqlen_k_, head_dim_;
    Tensor q_, k_, v_, dout_, out_, lse_, block_mask_;
};

}  // namespace fuzz
