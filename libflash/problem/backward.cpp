#include "problem/attention_parts.h"

namespace libflash {

AttentionProblem make_backward_problem(const flash_tensor_t* dout, const flash_tensor_t* q, const flash_tensor_t* k,
                                       const flash_tensor_t* v, const flash_tensor_t* out, const flash_tensor_t* lse,
                                       const flash_tensor_t* dq, const flash_tensor_t* dk, const flash_tensor_t* dv,
                                       const flash_attention_options_t* given, Reading reading) {
    AttentionProblem problem;
    problem.backward = true;
    const flash_attention_options_t options = read_attention_options(problem, given, FLASH_FLAG_POSITIONS | FLASH_FLAG_ADD);
    problem.reads_delta = problem.adds;
    Reader reader(reading);
    problem.dout = reader.required(dout, "dout", kContiguousRows);
    problem.q = reader.required(q, "q", kContiguousRows);
    problem.k = reader.required(k, "k", kContiguousRows);
    problem.v = reader.required(v, "v", kContiguousRows);
    problem.out = reader.required(out, "out", kContiguousRows);
    problem.lse = reader.required(lse, "lse");
    problem.dq = reader.required(dq, "dq", kContiguousRows | kWritten);
    problem.dk = reader.required(dk, "dk", kContiguousRows | kWritten);
    problem.dv = reader.required(dv, "dv", kContiguousRows | kWritten);
    const OptionTensors tensors = read_option_tensors(reader, options, problem);

    build_attention_sizes(problem, tensors, options);
    check_like_out(problem, problem.dout, "dout");
    check_like_out(problem, problem.out, "out");
    check_like_lse(problem, problem.lse, "lse");
    check_gradient(problem, problem.dq, "dq", problem.q, "that of q");
    check_gradient(problem, problem.dk, "dk", problem.k, "that of k");
    check_gradient(problem, problem.dv, "dv", problem.v, "that of v");
    build_option_tensors(problem, tensors, options);
    check_contents(problem, tensors, options, reader);
    return problem;
}

}  // namespace libflash
