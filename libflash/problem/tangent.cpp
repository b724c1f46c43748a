#include "problem/tangent.h"

#include "problem/attention_parts.h"
#include "problem/options.h"
#include "problem/score.h"

namespace libflash {

namespace {

// Size of the struct in its first version; later versions append fields.
constexpr size_t kVersion1 = 136;
static_assert(sizeof(flash_tangents_t) == kVersion1, "the tangents");

constexpr unsigned kOutput = kContiguousRows | kWritten;

void check_tangent_flags(const flash_tangents_t& tangents, uint32_t known) {
    if (tangents.flags & ~known) {
        invalid("tangents.flags", "an unknown bit, or one that this operation does not have", "unknown bits ",
                tangents.flags & ~known);
    }
}

// Tangents of bias and sink as views.
struct InputTangents {
    TensorView bias, sink;
};

// The options of a call on a part of a problem are not supported with tangents.
flash_attention_options_t read_tangent_options(TangentProblem& p, const flash_attention_options_t* given) {
    const flash_attention_options_t options = read_attention_options(p, given, 0);
    if (options.sequence_numbers) invalid("sequence_numbers", "is for forward and backward, not for tangents", "given");
    if (options.heads_total != 0) invalid("heads_total", "is for forward and backward, not for tangents", options.heads_total);
    if (options.max_logit) invalid("max_logit", "is for forward, not for tangents", "given");
    if (options.entropy) invalid("entropy", "is for forward, not for tangents", "given");
    return options;
}

InputTangents read_inputs(Reader& reader, TangentProblem& p, const flash_tangents_t& given) {
    InputTangents views;
    p.tangents.q = reader.optional(given.q, "tangents.q", kContiguousRows);
    p.tangents.k = reader.optional(given.k, "tangents.k", kContiguousRows);
    p.tangents.v = reader.optional(given.v, "tangents.v", kContiguousRows);
    views.bias = reader.optional(given.bias, "tangents.bias");
    views.sink = reader.optional(given.learnable_sink, "tangents.learnable_sink");
    return views;
}

// A tangent of bias or dbias: device, type and shape of bias.
ScoreTensor build_like_bias(const TangentProblem& p, const TensorView& view, const Argument& argument) {
    if (!p.bias.present) invalid(argument, "needs bias", "there is no bias");
    check_device(view, argument, p.device);
    check_dtype(view, argument, p.bias.dtype);
    ScoreTensor tensor;
    tensor.present = true;
    tensor.data = view.data;
    tensor.dtype = view.dtype;
    const int missing = 4 - view.ndim;
    for (int i = 0; i < 4; ++i) {
        const int64_t size = i < missing ? 1 : view.shape[i - missing];
        if (size != p.bias.shape[i]) {
            invalid(argument, "shape must be that of bias", "it is ", Sizes{view.shape, view.ndim}, ", bias ",
                    Sizes{p.bias.shape, 4});
        }
        tensor.shape[i] = size;
        tensor.stride[i] = size > 1 ? view.stride[i - missing] : 0;
    }
    return tensor;
}

HeadTensor build_like_sink(const TangentProblem& p, const TensorView& view, const Argument& argument) {
    if (!p.sink.present) invalid(argument, "needs learnable_sink", "there is no learnable_sink");
    check_dtype(view, argument, p.sink.dtype);
    return build_head_vector(view, argument, p.heads_q, p.dtype, p.device);
}

void check_inputs(TangentProblem& p, const InputTangents& views) {
    if (p.tangents.q.present) check_same(p.tangents.q, "tangents.q", p.q, "that of q");
    if (p.tangents.k.present) check_same(p.tangents.k, "tangents.k", p.k, "that of k");
    if (p.tangents.v.present) check_same(p.tangents.v, "tangents.v", p.v, "that of v");
    if (views.bias.present) p.tangents.bias = build_like_bias(p, views.bias, "tangents.bias");
    if (views.sink.present) p.tangents.sink = build_like_sink(p, views.sink, "tangents.learnable_sink");
}

void check_cotangents(const TangentProblem& p) {
    if (p.tangents.dout.present) check_like_out(p, p.tangents.dout, "tangents.dout");
    if (p.tangents.dlse.present) check_like_lse(p, p.tangents.dlse, "tangents.dlse");
    if (p.tangents.delta.present) check_like_lse(p, p.tangents.delta, "tangents.delta");
}

void check_forward_members(const flash_tangents_t& given, const flash_attention_options_t& options) {
    if (given.dq) invalid("tangents.dq", "is for backward_tangent, not for forward_tangent", "given");
    if (given.dk) invalid("tangents.dk", "is for backward_tangent, not for forward_tangent", "given");
    if (given.dv) invalid("tangents.dv", "is for backward_tangent, not for forward_tangent", "given");
    if (given.dbias) invalid("tangents.dbias", "is for backward_tangent, not for forward_tangent", "given");
    if (given.dsink) invalid("tangents.dsink", "is for backward_tangent, not for forward_tangent", "given");
    if (given.delta) {
        if (!given.cotangent) invalid("tangents.cotangent", "is required with delta", "NULL");
    } else {
        if (given.cotangent) invalid("tangents.cotangent", "needs delta", "there is no delta");
        if (given.dout) invalid("tangents.dout", "needs delta", "there is no delta");
        if (given.dlse) invalid("tangents.dlse", "needs delta", "there is no delta");
        if (options.delta) invalid("delta", "needs tangents.delta in forward_tangent", "there is no tangents.delta");
        if (!given.out && !given.lse) invalid("tangents.out", "out, lse or delta is required", "all are NULL");
    }
    if (options.dlse && !options.delta) invalid("dlse", "needs delta in forward_tangent", "there is no delta");
}

// Reads the tensors of the options that forward_tangent has in common with forward.
OptionTensors read_forward_option_tensors(Reader& reader, flash_attention_options_t options, const TangentProblem& p) {
    options.delta = options.dlse = nullptr;
    return read_option_tensors(reader, options, p);
}

}  // namespace

flash_tangents_t read_tangents(const flash_tangents_t* given) {
    if (!given) invalid("tangents", "is required", "NULL");
    return read_options(given, kVersion1);
}

TangentProblem make_forward_tangent_problem(const flash_tensor_t* q, const flash_tensor_t* k, const flash_tensor_t* v,
                                            const flash_tensor_t* out, const flash_tensor_t* lse,
                                            const flash_tangents_t* tangents, const flash_attention_options_t* given,
                                            Reading reading) {
    TangentProblem p;
    const flash_attention_options_t options = read_tangent_options(p, given);
    const flash_tangents_t t = read_tangents(tangents);
    check_tangent_flags(t, FLASH_FLAG_FROM_LSE);
    check_forward_members(t, options);
    p.from_lse = (t.flags & FLASH_FLAG_FROM_LSE) != 0;
    Reader reader(reading);
    p.q = reader.required(q, "q", kContiguousRows);
    p.k = reader.required(k, "k", kContiguousRows);
    p.v = reader.required(v, "v", kContiguousRows);
    p.out = reader.required(out, "out", p.from_lse ? kContiguousRows : kOutput);
    p.lse = p.from_lse ? reader.required(lse, "lse") : reader.optional(lse, "lse", kWritten);
    const InputTangents inputs = read_inputs(reader, p, t);
    p.tangents.out = reader.optional(t.out, "tangents.out", kOutput);
    p.tangents.lse = reader.optional(t.lse, "tangents.lse", kWritten);
    p.tangents.dout = reader.optional(t.dout, "tangents.dout", kContiguousRows);
    p.tangents.dlse = reader.optional(t.dlse, "tangents.dlse");
    p.tangents.delta = reader.optional(t.delta, "tangents.delta", kWritten);
    p.dout = reader.optional(t.cotangent, "tangents.cotangent", kContiguousRows);
    p.dlse = reader.optional(options.dlse, "dlse");
    p.delta = reader.optional(options.delta, "delta", kWritten);
    const OptionTensors option_tensors = read_forward_option_tensors(reader, options, p);

    build_attention_sizes(p, option_tensors, options);
    check_like_out(p, p.out, "out");
    if (p.lse.present) check_like_lse(p, p.lse, "lse");
    build_option_tensors(p, option_tensors, options);
    check_inputs(p, inputs);
    if (p.tangents.out.present) check_like_out(p, p.tangents.out, "tangents.out");
    if (p.tangents.lse.present) check_like_lse(p, p.tangents.lse, "tangents.lse");
    check_cotangents(p);
    if (p.dout.present) check_like_out(p, p.dout, "tangents.cotangent");
    if (p.dlse.present) check_like_lse(p, p.dlse, "dlse");
    if (p.delta.present) check_like_lse(p, p.delta, "delta");
    check_contents(p, option_tensors, options, reader);
    return p;
}

namespace {

void check_backward_members(const flash_tangents_t& given) {
    if (given.cotangent) invalid("tangents.cotangent", "is for forward_tangent, not for backward_tangent", "given");
    if (given.delta && given.out) invalid("tangents.delta", "cannot be given together with out", "both are");
    if (given.delta && given.dlse) invalid("tangents.dlse", "cannot be given together with delta, which contains it", "both are");
    if (!given.delta && !given.out) invalid("tangents.out", "out or delta is required", "both are NULL");
}

// dq, dk and dv: all or none.
void read_gradients(Reader& reader, TangentProblem& p, const flash_tensor_t* dq, const flash_tensor_t* dk,
                    const flash_tensor_t* dv, const flash_attention_options_t& options) {
    if (!dq && !dk && !dv) {
        if (options.dbias) invalid("dbias", "needs dq, dk and dv in backward_tangent", "they are NULL");
        if (options.dsink) invalid("dsink", "needs dq, dk and dv in backward_tangent", "they are NULL");
        return;
    }
    if (options.delta) invalid("delta", "cannot be given together with dq, dk and dv in backward_tangent", "all are");
    p.dq = reader.required(dq, "dq", kOutput);
    p.dk = reader.required(dk, "dk", kOutput);
    p.dv = reader.required(dv, "dv", kOutput);
}

}  // namespace

TangentProblem make_backward_tangent_problem(const flash_tensor_t* dout, const flash_tensor_t* q, const flash_tensor_t* k,
                                             const flash_tensor_t* v, const flash_tensor_t* out, const flash_tensor_t* lse,
                                             const flash_tensor_t* dq, const flash_tensor_t* dk, const flash_tensor_t* dv,
                                             const flash_tangents_t* tangents, const flash_attention_options_t* given,
                                             Reading reading) {
    TangentProblem p;
    p.backward = p.reads_delta = true;
    p.operation = Operation::backward_tangent;
    const flash_attention_options_t options = read_tangent_options(p, given);
    const flash_tangents_t t = read_tangents(tangents);
    check_tangent_flags(t, 0);
    check_backward_members(t);
    Reader reader(reading);
    p.dout = reader.required(dout, "dout", kContiguousRows);
    p.q = reader.required(q, "q", kContiguousRows);
    p.k = reader.required(k, "k", kContiguousRows);
    p.v = reader.required(v, "v", kContiguousRows);
    p.out = reader.required(out, "out", kContiguousRows);
    p.lse = reader.required(lse, "lse");
    read_gradients(reader, p, dq, dk, dv, options);
    const InputTangents inputs = read_inputs(reader, p, t);
    p.tangents.out = reader.optional(t.out, "tangents.out", kContiguousRows);
    p.tangents.lse = reader.required(t.lse, "tangents.lse");
    p.tangents.dout = reader.optional(t.dout, "tangents.dout", kContiguousRows);
    p.tangents.dlse = reader.optional(t.dlse, "tangents.dlse");
    p.tangents.delta = reader.optional(t.delta, "tangents.delta");
    p.tangents.dq = reader.required(t.dq, "tangents.dq", kOutput);
    p.tangents.dk = reader.required(t.dk, "tangents.dk", kOutput);
    p.tangents.dv = reader.required(t.dv, "tangents.dv", kOutput);
    const TensorView dbias = reader.optional(t.dbias, "tangents.dbias", kWritten);
    const TensorView dsink = reader.optional(t.dsink, "tangents.dsink", kWritten);
    const OptionTensors option_tensors = read_option_tensors(reader, options, p);

    build_attention_sizes(p, option_tensors, options);
    check_like_out(p, p.dout, "dout");
    check_like_out(p, p.out, "out");
    check_like_lse(p, p.lse, "lse");
    if (p.with_gradients()) {
        check_same(p.dq, "dq", p.q, "that of q");
        check_same(p.dk, "dk", p.k, "that of k");
        check_same(p.dv, "dv", p.v, "that of v");
    }
    build_option_tensors(p, option_tensors, options);
    check_inputs(p, inputs);
    if (p.tangents.out.present) check_like_out(p, p.tangents.out, "tangents.out");
    check_like_lse(p, p.tangents.lse, "tangents.lse");
    check_cotangents(p);
    check_same(p.tangents.dq, "tangents.dq", p.q, "that of q");
    check_same(p.tangents.dk, "tangents.dk", p.k, "that of k");
    check_same(p.tangents.dv, "tangents.dv", p.v, "that of v");
    if (dbias.present) p.tangents.dbias = build_like_bias(p, dbias, "tangents.dbias");
    if (dsink.present) p.tangents.dsink = build_like_sink(p, dsink, "tangents.dsink");
    check_contents(p, option_tensors, options, reader);
    return p;
}

}  // namespace libflash
