#include "problem/attention_parts.h"

namespace libflash {

AttentionProblem make_forward_problem(const flash_tensor_t* q, const flash_tensor_t* k, const flash_tensor_t* v,
                                      const flash_tensor_t* out, const flash_tensor_t* lse,
                                      const flash_attention_options_t* given, Reading reading) {
    AttentionProblem problem;
    const flash_attention_options_t options = read_attention_options(problem, given, FLASH_FLAG_POSITIONS | FLASH_FLAG_CONTINUE);
    Reader reader(reading);
    problem.q = reader.required(q, "q", kContiguousRows);
    problem.k = reader.required(k, "k", kContiguousRows);
    problem.v = reader.required(v, "v", kContiguousRows);
    problem.out = reader.required(out, "out", kContiguousRows | kWritten);
    problem.lse = reader.optional(lse, "lse", kWritten);
    const OptionTensors tensors = read_option_tensors(reader, options, problem);

    build_attention_sizes(problem, tensors, options);
    check_like_out(problem, problem.out, "out", true);
    if (problem.lse.present) check_like_lse(problem, problem.lse, "lse");
    check_continuation(problem);
    build_option_tensors(problem, tensors, options);
    check_contents(problem, tensors, options, reader);
    return problem;
}

}  // namespace libflash
