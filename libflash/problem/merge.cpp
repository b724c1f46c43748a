#include "problem/build.h"
#include "problem/options.h"

namespace libflash {

static_assert(sizeof(flash_merge_options_t) == 32, "version 1 of the merge options");

namespace {

DType lse_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

void check_part(const MergeProblem& problem, const TensorView& out, const Argument& out_name) {
    check_device(out, out_name, problem.device);
    check_float(out, out_name);
    const int64_t* s = problem.outs[0].shape;
    if (problem.outs[0].ndim == 4) {
        check_shape(out, out_name, {s[0], s[1], s[2], s[3]}, "(batch, seqlen, heads, head_dim_v)");
    } else {
        check_shape(out, out_name, {s[0], s[1], s[2]}, "(total, heads, head_dim_v)");
    }
}

void check_part_lse(const MergeProblem& problem, const TensorView& lse, const Argument& lse_name, const TensorView& out) {
    check_device(lse, lse_name, problem.device);
    check_dtype(lse, lse_name, lse_dtype(out.dtype));
    if (out.ndim == 4) {
        check_shape(lse, lse_name, {problem.batch, problem.heads, problem.rows}, "(batch, heads, seqlen)");
    } else {
        check_shape(lse, lse_name, {problem.heads, problem.rows}, "(heads, total)");
    }
}

}  // namespace

MergeProblem make_merge_problem(const flash_tensor_t* outs, const flash_tensor_t* lses, int32_t count, const flash_tensor_t* out,
                                const flash_tensor_t* lse, const flash_merge_options_t* given) {
    MergeProblem problem;
    const flash_merge_options_t options = read_options(given, 32);
    check_flags(options.flags, 0);
    read_request(problem.request, options);
    check_reserved(options.reserved);
    if (count < 1) invalid("count", "must be at least 1", count);
    if (!outs) invalid("outs", "an array of count tensors is required", "NULL");
    if (!lses) invalid("lses", "an array of count tensors is required", "NULL");

    Reader reader(Reading::call);
    problem.count = count;
    problem.outs.reserve(static_cast<size_t>(count));
    problem.lses.reserve(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) problem.outs.push_back(reader.required(&outs[i], Argument("outs", i), kContiguousRows));
    for (int i = 0; i < count; ++i) problem.lses.push_back(reader.required(&lses[i], Argument("lses", i)));
    problem.out = reader.required(out, "out", kContiguousRows | kWritten);
    problem.lse = reader.optional(lse, "lse", kWritten);

    const TensorView& first = problem.outs[0];
    problem.device = first.device;
    if (first.ndim != 3 && first.ndim != 4) {
        invalid(Argument("outs", 0), "shape must be (batch, seqlen, heads, head_dim_v) or (total, heads, head_dim_v)", "it is ",
                Sizes{first.shape, first.ndim});
    }
    problem.batch = first.ndim == 4 ? first.shape[0] : 1;
    problem.rows = first.shape[first.ndim - 3];
    problem.heads = first.shape[first.ndim - 2];
    problem.head_dim_v = first.shape[first.ndim - 1];
    if (problem.head_dim_v == 0) invalid(Argument("outs", 0), "head_dim_v must be at least 1", 0);
    for (int i = 0; i < count; ++i) check_part(problem, problem.outs[i], Argument("outs", i));
    for (int i = 0; i < count; ++i) check_part_lse(problem, problem.lses[i], Argument("lses", i), problem.outs[i]);
    check_part(problem, problem.out, "out");
    if (problem.lse.present) check_part_lse(problem, problem.lse, "lse", problem.out);
    reader.check_overlap();
    return problem;
}

}  // namespace libflash
