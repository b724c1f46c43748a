// Forward and backward: a valid call is compared with the scalar reference; an invalid call must be refused and change nothing.
#include "attention_case.h"
#include "kernels.h"
#include "target.h"

namespace fuzz {
namespace {

constexpr Role kForwardOutputs[] = {kOut, kLse};
constexpr Role kBackwardOutputs[] = {kDq, kDk, kDv, kDbias, kDsink};

// Separate output tensors for a call.
struct Outputs {
    Tensor tensor[kRoles];

    template <size_t kCount>
    Outputs(const AttentionCase& problem, AttentionCall& call, const Role (&roles)[kCount]) {
        for (const Role role : roles) {
            if (!call.given[role]) continue;
            tensor[role].allocate(problem.tensor[role].view);
            call.view[role] = tensor[role].view;
        }
    }
};

void run(AttentionCall& call, const char* kernel, int fill) {
    call.options.kernel = kernel;
    call.bind();
    size_t bytes = 0;
    check_status(call.workspace_size(&bytes), FLASH_STATUS_OK, "workspace_size");
    const Workspace workspace(bytes, fill);
    check_status(call.run(workspace.data(), bytes), FLASH_STATUS_OK, call.backward ? "backward" : "forward");
}

template <size_t kCount>
void compare(const AttentionCase& problem, AttentionCall call, const Role (&roles)[kCount], const char* kernel, Bytes& bytes) {
    AttentionCall reference_call = call;
    const Outputs got(problem, call, roles), reference(problem, reference_call, roles);
    run(reference_call, call.backward ? "backward_cpu_scalar" : "forward_cpu_scalar", 0);
    run(call, kernel, bytes.byte());

    const Rounding rounding(problem.dtype);
    const ErrorBounds bounds(rounding, problem.magnitudes);
    const double repeats = static_cast<double>(problem.batch * problem.heads_q) * problem.magnitudes.rows;
    const auto check = [&](Role role, double relative, double absolute, const char* name) {
        check_close(got.tensor[role], reference.tensor[role], relative, absolute, name);
    };
    const auto stored = [&](Role role) { return 2 * Rounding(problem.tensor[role].view.dtype).u; };
    check(kOut, rounding.u, bounds.o, "out");
    check(kLse, rounding.sums, bounds.lse, "lse");
    check(kDq, 2 * rounding.u, bounds.dq, "dq");
    check(kDk, 2 * rounding.u, bounds.dk, "dk");
    check(kDv, 2 * rounding.u, bounds.dv, "dv");
    check(kDbias, stored(kDbias), bounds.ds * repeats, "dbias");
    check(kDsink, stored(kDsink), bounds.ds * repeats, "dsink");
}

// Calls explain with a buffer of exactly the needed size, and with one that is too small.
void explain(AttentionCall& call, Bytes& bytes) {
    size_t needed = 0;
    check_status(call.explain(nullptr, 0, &needed), FLASH_STATUS_OK, "explain");
    const size_t capacity = bytes.chance(128) ? needed : static_cast<size_t>(bytes.below(static_cast<int64_t>(needed) + 1));
    const std::unique_ptr<char[]> text(new char[capacity + (capacity == 0)]);
    check_status(call.explain(text.get(), capacity, nullptr), FLASH_STATUS_OK, "explain");
    FUZZ_CHECK(capacity == 0 || memchr(text.get(), 0, capacity), "explain wrote no end into %zu of %zu bytes", capacity, needed);
}

void compress(AttentionCase& problem) {
    const flash_block_lists_t lists = {problem.tensor[kRowCounts].view, problem.tensor[kRowIndices].view,
                                       problem.tensor[kColCounts].view, problem.tensor[kColIndices].view};
    check_status(flash_block_mask_compress(problem.tensor[kBlockMask].pointer(), &lists, nullptr), FLASH_STATUS_OK, "compress");
    const flash_tensor_t& mask = problem.tensor[kBlockMask].view;
    each_element(problem.tensor[kBlockMask].view, [&](int64_t offset) {
        const int64_t column = offset % mask.shape[3], row = offset / mask.shape[3];
        const int32_t* list = problem.tensor[kRowIndices].ints() + row * mask.shape[3];
        bool found = false;
        for (int32_t n = 0; n < problem.tensor[kRowCounts].ints()[row]; ++n) found = found || list[n] == column;
        FUZZ_CHECK(found == (problem.tensor[kBlockMask].bools()[offset] != 0), "row %lld, column %lld",
                   static_cast<long long>(row), static_cast<long long>(column));
    });
}

void refuse(AttentionCase& problem, AttentionCall call, Bytes& bytes) {
    flash_status_t expected = FLASH_STATUS_OK;
    const std::string what = invalidate(problem, call, bytes, &expected);
    if (what.empty()) return;
    const Contents before(problem.tensor);
    call.bind();
    size_t needed = 0;
    call.workspace_size(&needed);  // may accept the call: it reads no data
    const Workspace workspace(size_t{1} << 16);
    check_status(call.run(workspace.data(), size_t{1} << 16), expected, what.c_str());
    before.check_unchanged(what);
}

void refuse_workspace(const AttentionCase& problem, AttentionCall call, Bytes& bytes) {
    call.bind();
    size_t needed = 0;
    check_status(call.workspace_size(&needed), FLASH_STATUS_OK, "workspace_size");
    if (needed == 0) return;
    const Workspace workspace(needed + 256);
    flash_status_t status;
    switch (bytes.below(3)) {
        case 0: status = call.run(nullptr, needed); break;
        case 1: status = call.run(workspace.data(), needed - 1); break;
        default: status = call.run(workspace.data() + 64, needed); break;
    }
    check_status(status, FLASH_STATUS_WORKSPACE, "workspace");
    FUZZ_CHECK(poisoned(problem.tensor[kOut].block(), static_cast<int64_t>(problem.tensor[kOut].size_bytes())) || call.backward,
               "out was written by a refused call");
}

}  // namespace

void attention_target(Bytes& bytes) {
    static const std::vector<std::string> forward_kernels = usable_kernels("forward"),
                                          backward_kernels = usable_kernels("backward");
    AttentionCase problem(bytes);
    if (problem.tensor[kBlockMask].present()) compress(problem);

    AttentionCall forward = problem.call(false), backward = problem.call(true);
    if (forward.given[kBlockMask] && bytes.chance(128))
        for (AttentionCall* call : {&forward, &backward}) {
            call->given[kBlockMask] = false;
            for (const Role role : {kRowCounts, kRowIndices, kColCounts, kColIndices}) call->given[role] = true;
        }
    const bool is_backward = bytes.chance(128);
    AttentionCall& call = is_backward ? backward : forward;
    if (bytes.chance(16)) return refuse_workspace(problem, call, bytes);
    if (bytes.chance(120)) return refuse(problem, call, bytes);

    if (!is_backward && bytes.chance(40)) forward.given[kLse] = false;
    compare(problem, forward, kForwardOutputs, pick_kernel(forward_kernels, bytes), bytes);
    forward.options.kernel = nullptr;
    forward.bind();
    explain(forward, bytes);
    if (!is_backward) return;
    // The backward call gets the reference's out and lse.
    run(forward, "forward_cpu_scalar", 0);
    compare(problem, backward, kBackwardOutputs, pick_kernel(backward_kernels, bytes), bytes);
    backward.bind();
    explain(backward, bytes);
}

}  // namespace fuzz
