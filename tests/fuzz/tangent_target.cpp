// The tangents of forward and backward: the results of a valid call are compared with those of the scalar reference; an invalid
// call must be refused and change nothing.
#include "attention_case.h"
#include "kernels.h"
#include "tangent_bounds.h"
#include "target.h"
#include "tensor_invalidate.h"

namespace fuzz {
namespace {

// A tangent of a tensor of the problem, and the field of flash_tangents_t for it.
using Field = const flash_tensor_t* flash_tangents_t::*;
struct Part {
    Role like;
    Field field;
    const char* name;
};
constexpr Part kInputs[] = {{kQ, &flash_tangents_t::q, "tq"},
                            {kK, &flash_tangents_t::k, "tk"},
                            {kV, &flash_tangents_t::v, "tv"},
                            {kBias, &flash_tangents_t::bias, "tbias"},
                            {kSink, &flash_tangents_t::learnable_sink, "tsink"},
                            {kDout, &flash_tangents_t::dout, "tdout"},
                            {kDlse, &flash_tangents_t::dlse, "tdlse"}};
constexpr Part kForwardOutputs[] = {{kOut, &flash_tangents_t::out, "tout"}, {kLse, &flash_tangents_t::lse, "tlse"}};
constexpr Part kBackwardOutputs[] = {{kDq, &flash_tangents_t::dq, "tdq"},
                                     {kDk, &flash_tangents_t::dk, "tdk"},
                                     {kDv, &flash_tangents_t::dv, "tdv"},
                                     {kDbias, &flash_tangents_t::dbias, "tdbias"},
                                     {kDsink, &flash_tangents_t::dsink, "tdsink"}};

// The direction in which the inputs move: a tensor for each of kInputs, or none.
struct Direction {
    Tensor tensor[sizeof kInputs / sizeof kInputs[0]];

    Direction(const AttentionCase& problem, Bytes& bytes) {
        Random random(bytes.word());
        for (size_t n = 0; n < sizeof kInputs / sizeof kInputs[0]; ++n) {
            if (!problem.tensor[kInputs[n].like].present() || !bytes.chance(190)) continue;
            tensor[n].allocate(problem.tensor[kInputs[n].like].view, bytes.below(4));
            tensor[n].fill(random, 1);
        }
    }
    bool moves(Role role) const {
        for (size_t n = 0; n < sizeof kInputs / sizeof kInputs[0]; ++n)
            if (kInputs[n].like == role) return tensor[n].present();
        return false;
    }
};

// The C call. The tensors that the fields of `tangents` point to are copies, which may be changed.
struct TangentCall {
    AttentionCall primal;
    flash_tangents_t tangents = {};
    flash_tensor_t view[16];
    int views = 0;
    bool gradients = false;  // of backward_tangent: dq, dk and dv too

    TangentCall() = default;
    TangentCall(const TangentCall&) = delete;  // it points to its own members
    TangentCall& operator=(const TangentCall&) = delete;

    const flash_tensor_t* keep(const flash_tensor_t& tensor) { return &(view[views++] = tensor); }

    flash_status_t workspace_size(size_t* bytes) const {
        const AttentionCall& p = primal;
        if (!p.backward)
            return flash_attention_forward_tangent_workspace_size(p.at(kQ), p.at(kK), p.at(kV), p.at(kOut), p.at(kLse), &tangents,
                                                                  &p.options, bytes);
        return flash_attention_backward_tangent_workspace_size(p.at(kDout), p.at(kQ), p.at(kK), p.at(kV), p.at(kOut), p.at(kLse),
                                                               gradients ? p.at(kDq) : nullptr, gradients ? p.at(kDk) : nullptr,
                                                               gradients ? p.at(kDv) : nullptr, &tangents, &p.options, bytes);
    }
    flash_status_t run(void* workspace, size_t bytes) const {
        const AttentionCall& p = primal;
        if (!p.backward)
            return flash_attention_forward_tangent(p.at(kQ), p.at(kK), p.at(kV), p.at(kOut), p.at(kLse), &tangents, &p.options,
                                                   workspace, bytes, nullptr);
        return flash_attention_backward_tangent(
            p.at(kDout), p.at(kQ), p.at(kK), p.at(kV), p.at(kOut), p.at(kLse), gradients ? p.at(kDq) : nullptr,
            gradients ? p.at(kDk) : nullptr, gradients ? p.at(kDv) : nullptr, &tangents, &p.options, workspace, bytes, nullptr);
    }
};

// What a call writes.
struct Results {
    Tensor primal[kRoles], tangent[kRoles], delta, tdelta;

    void allocate(const AttentionCase& problem, Role role, bool with_primal) {
        if (!problem.tensor[role].present()) return;
        tangent[role].allocate(problem.tensor[role].view);
        if (with_primal) primal[role].allocate(problem.tensor[role].view);
    }
};

struct Choice {
    bool from_lse, delta, gradients;

    explicit Choice(Bytes& bytes) : from_lse(bytes.chance(128)), delta(bytes.chance(100)), gradients(bytes.chance(100)) {}
};

AttentionCall primal_call(const AttentionCase& problem, bool backward, const char* kernel) {
    AttentionCall call = problem.call(backward);
    call.options.kernel = kernel;
    // A part of a problem has no tangent.
    call.options.flags &= ~static_cast<uint32_t>(FLASH_FLAG_DETERMINISTIC | FLASH_FLAG_POSITIONS);
    call.given[kRowPositions] = call.given[kColumnPositions] = false;
    call.options.row_begin = call.options.row_step = call.options.column_begin = call.options.column_step = 0;
    call.options.head_begin = call.options.heads_total = 0;
    return call;
}

void set_inputs(TangentCall& call, const Direction& direction, bool dout, bool dlse) {
    for (size_t n = 0; n < sizeof kInputs / sizeof kInputs[0]; ++n) {
        const bool wanted = kInputs[n].like == kDout ? dout : kInputs[n].like == kDlse ? dlse : true;
        if (direction.tensor[n].present() && wanted) call.tangents.*(kInputs[n].field) = call.keep(direction.tensor[n].view);
    }
}

// With `from`, out and lse are inputs; else they are results.
void make_forward(TangentCall& call, const AttentionCase& problem, const Direction& direction, bool delta, const Results* from,
                  Results& results, const char* kernel) {
    call.primal = primal_call(problem, false, kernel);
    call.primal.given[kDlse] = delta && problem.tensor[kDlse].present();
    call.tangents.struct_size = sizeof call.tangents;
    set_inputs(call, direction, delta, delta);
    for (const Part& part : kForwardOutputs) {
        results.allocate(problem, part.like, from == nullptr);
        call.tangents.*(part.field) = call.keep(results.tangent[part.like].view);
        call.primal.view[part.like] = (from ? from : &results)->primal[part.like].view;
    }
    if (from) call.tangents.flags = FLASH_FLAG_FROM_LSE;
    if (delta) {
        results.delta.allocate(problem.tensor[kLse].view), results.tdelta.allocate(problem.tensor[kLse].view);
        call.primal.options.delta = call.keep(results.delta.view);
        call.tangents.delta = call.keep(results.tdelta.view);
        call.tangents.cotangent = call.keep(problem.tensor[kDout].view);
    }
    call.primal.bind();
}

void make_backward(TangentCall& call, const AttentionCase& problem, const Direction& direction, const Choice& choice,
                   const Results& forward, Results& results, const char* kernel) {
    call.primal = primal_call(problem, true, kernel);
    call.gradients = choice.gradients;
    call.tangents.struct_size = sizeof call.tangents;
    set_inputs(call, direction, true, !choice.delta);  // tdelta contains tdlse
    for (const Part& part : kForwardOutputs) call.primal.view[part.like] = forward.primal[part.like].view;
    call.tangents.lse = call.keep(forward.tangent[kLse].view);
    if (choice.delta) {
        call.tangents.delta = call.keep(forward.tdelta.view);
        if (!choice.gradients) {
            call.primal.options.delta = call.keep(forward.delta.view);
            call.primal.given[kDlse] = false;  // delta contains it
        }
    } else {
        call.tangents.out = call.keep(forward.tangent[kOut].view);
    }
    for (const Part& part : kBackwardOutputs) {
        results.allocate(problem, part.like, choice.gradients);
        if (!results.tangent[part.like].present()) continue;
        call.tangents.*(part.field) = call.keep(results.tangent[part.like].view);
        if (choice.gradients) call.primal.view[part.like] = results.primal[part.like].view;
    }
    if (!choice.gradients) call.primal.given[kDbias] = call.primal.given[kDsink] = false;
    call.primal.bind();
}

void run(const TangentCall& call, int fill) {
    size_t bytes = 0;
    const char* what = call.primal.backward ? "backward_tangent" : "forward_tangent";
    check_status(call.workspace_size(&bytes), FLASH_STATUS_OK, what);
    const Workspace workspace(bytes, fill);
    check_status(call.run(workspace.data(), bytes), FLASH_STATUS_OK, what);
}

TangentMagnitudes magnitudes(const Direction& direction) {
    const auto of = [&](Role role) { return direction.moves(role) ? 1.0 : 0.0; };
    return {of(kQ), of(kK), of(kV), of(kBias), of(kSink), of(kDout), of(kDlse)};
}

void compare_forward(const Results& got, const Results& reference, const Rounding& r, const ErrorBounds& primal,
                     const TangentBounds& bounds) {
    check_close(got.primal[kOut], reference.primal[kOut], r.u, primal.o, "out");
    check_close(got.primal[kLse], reference.primal[kLse], r.sums, primal.lse, "lse");
    check_close(got.tangent[kOut], reference.tangent[kOut], r.u, bounds.tout, "tout");
    check_close(got.tangent[kLse], reference.tangent[kLse], r.sums, bounds.tlse, "tlse");
    check_close(got.delta, reference.delta, r.sums, bounds.delta, "delta");
    check_close(got.tdelta, reference.tdelta, r.sums, bounds.tdelta, "tdelta");
}

void compare_backward(const AttentionCase& problem, const Results& got, const Results& reference, const Rounding& r,
                      const ErrorBounds& primal, const TangentBounds& bounds) {
    const double repeats = static_cast<double>(problem.batch * problem.heads_q) * problem.magnitudes.rows;
    const auto stored = [&](Role role) { return 2 * Rounding(problem.tensor[role].view.dtype).u; };
    check_close(got.primal[kDq], reference.primal[kDq], 2 * r.u, primal.dq, "dq");
    check_close(got.primal[kDk], reference.primal[kDk], 2 * r.u, primal.dk, "dk");
    check_close(got.primal[kDv], reference.primal[kDv], 2 * r.u, primal.dv, "dv");
    check_close(got.primal[kDbias], reference.primal[kDbias], stored(kDbias), primal.ds * repeats, "dbias");
    check_close(got.primal[kDsink], reference.primal[kDsink], stored(kDsink), primal.ds * repeats, "dsink");
    check_close(got.tangent[kDq], reference.tangent[kDq], 2 * r.u, bounds.tdq, "tdq");
    check_close(got.tangent[kDk], reference.tangent[kDk], 2 * r.u, bounds.tdk, "tdk");
    check_close(got.tangent[kDv], reference.tangent[kDv], 2 * r.u, bounds.tdv, "tdv");
    check_close(got.tangent[kDbias], reference.tangent[kDbias], stored(kDbias), bounds.tds * repeats, "tdbias");
    check_close(got.tangent[kDsink], reference.tangent[kDsink], stored(kDsink), bounds.tds * repeats, "tdsink");
}

// Makes the call invalid and returns what was changed; empty if nothing could be changed.
std::string invalidate(TangentCall& call, Bytes& bytes, flash_status_t* expected) {
    flash_tangents_t& t = call.tangents;
    *expected = FLASH_STATUS_INVALID;
    switch (bytes.below(8)) {
        case 0:
            t.struct_size = bytes.one_of<uint32_t>({0, 8, 0xffffffffu}), *expected = FLASH_STATUS_VERSION;
            return "struct_size";
        case 1: t.flags |= bytes.one_of<uint32_t>({1, 0x80000000u, FLASH_FLAG_CAUSAL}); return "a flag that tangents do not have";
        case 2:
            if (call.primal.backward) return {};
            t.dq = call.keep(call.primal.view[kDq]);
            return "dq in forward_tangent";
        case 3:
            if (call.primal.given[kBias]) return {};
            t.bias = call.keep(call.primal.view[kQ]);
            return "tbias without bias";
        case 4:
            if (call.primal.backward ? t.delta != nullptr : t.delta == nullptr) {
                t.cotangent = nullptr;
                if (call.primal.backward) t.out = call.keep(call.primal.view[kOut]);
                if (!call.primal.backward) t.dlse = call.keep(call.primal.view[kLse]);
                return "delta and out, or tdlse without delta";
            }
            return {};
        case 5:
            if (call.primal.backward) t.lse = nullptr;
            if (!call.primal.backward) t.out = t.lse = t.delta = t.cotangent = t.dout = t.dlse = nullptr;
            return "what is required is NULL";
        default: {
            const int n = static_cast<int>(bytes.below(call.views));
            const bool output = &call.view[n] == t.dq || &call.view[n] == t.dk || &call.view[n] == t.dv;
            TensorTraits traits;
            traits.output = output;
            traits.exact = true;
            return invalidate_tensor(call.view[n], call.primal.view[kQ], traits, bytes);
        }
    }
}

void refuse(TangentCall& call, const Results& results, Bytes& bytes) {
    flash_status_t expected = FLASH_STATUS_OK;
    const std::string what = invalidate(call, bytes, &expected);
    if (what.empty()) return;
    size_t needed = 0;
    call.workspace_size(&needed);  // may accept the call: it reads no data
    const Workspace workspace(size_t{1} << 16);
    check_status(call.run(workspace.data(), size_t{1} << 16), expected, what.c_str());
    for (int role = 0; role < kRoles; ++role)
        for (const Tensor* tensor : {&results.primal[role], &results.tangent[role]})
            FUZZ_CHECK(!tensor->present() || poisoned(tensor->block(), static_cast<int64_t>(tensor->size_bytes())),
                       "result %d was written by a refused call: %s", role, what.c_str());
}

}  // namespace

void tangent_target(Bytes& bytes) {
    static const std::vector<std::string> forward_kernels = usable_kernels("forward_tangent"),
                                          backward_kernels = usable_kernels("backward_tangent");
    const AttentionCase problem(bytes);
    const Direction direction(problem, bytes);
    const Choice choice(bytes);
    const bool is_backward = bytes.chance(128);
    const Rounding rounding(problem.dtype);
    const ErrorBounds primal(rounding, problem.magnitudes);
    const TangentBounds bounds(rounding, problem.magnitudes, primal, magnitudes(direction));

    Results reference, got;
    TangentCall first, call;
    make_forward(first, problem, direction, choice.delta, nullptr, reference, "forward_tangent_cpu_scalar");
    run(first, 0);
    if (!is_backward) {
        const Results* from = choice.from_lse ? &reference : nullptr;
        const char* kernel = pick_kernel(forward_kernels, bytes);
        make_forward(call, problem, direction, choice.delta, from, got, kernel);
        if (bytes.chance(80)) return refuse(call, got, bytes);
        run(call, bytes.byte());
        if (from)
            for (const Part& part : kForwardOutputs) {
                got.primal[part.like].allocate(reference.primal[part.like].view);
                got.primal[part.like].copy_bytes(reference.primal[part.like]);
            }
        return compare_forward(got, reference, rounding, primal, bounds);
    }
    Results gradients;
    make_backward(call, problem, direction, choice, reference, got, pick_kernel(backward_kernels, bytes));
    if (bytes.chance(80)) return refuse(call, got, bytes);
    TangentCall second;
    make_backward(second, problem, direction, choice, reference, gradients, "backward_tangent_cpu_scalar");
    run(second, 0);
    run(call, bytes.byte());
    compare_backward(problem, got, gradients, rounding, primal, bounds);
}

}  // namespace fuzz
