// TangentProblem: a call of forward_tangent or backward_tangent in checked, normalised form.
#pragma once

#include "problem/attention.h"
#include "problem/operation.h"

namespace libflash {

// Tangents of the tensors of AttentionProblem. An input that is not present is zero.
struct Tangents {
    TensorView q, k, v;
    ScoreTensor bias;  // shape of bias
    HeadTensor sink;
    TensorView out, lse;    // forward_tangent: outputs; backward_tangent: inputs (out is absent if delta is present)
    TensorView dout, dlse;  // forward_tangent: with delta only
    TensorView delta;       // forward_tangent: output; backward_tangent: input
    TensorView dq, dk, dv;  // backward_tangent: outputs
    ScoreTensor dbias;
    HeadTensor dsink;
};

// `backward` is true for backward_tangent. dq, dk and dv of backward_tangent are absent if the caller requests only the tangents.
// forward_tangent with tangents.delta has the `dout` of the later backward pass. It may also have `delta`, an output, and then
// `dlse`.
struct TangentProblem : AttentionProblem {
    Operation operation = Operation::forward_tangent;
    bool from_lse = false;  // forward_tangent: out and lse are inputs
    Tangents tangents;

    bool with_gradients() const { return dq.present; }
    // Whether scores have tangents. If not, only the tangent of v matters.
    bool moves_scores() const {
        return tangents.q.present || tangents.k.present || tangents.bias.present || tangents.sink.present;
    }
};

}  // namespace libflash
