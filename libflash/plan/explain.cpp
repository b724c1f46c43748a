#include "plan/explain.h"

#include <utility>
#include <vector>

#include "plan/explain_line.h"
#include "plan/explain_plan.h"
#include "plan/selection.h"

namespace libflash {

namespace {

std::string lengths_text(const Sequences& rows) {
    std::string text = rows.packed() ? text_of("packed ", rows.capacity, " rows") : text_of(rows.capacity);
    if (rows.packed() && rows.max_length < rows.capacity) text += text_of(", at most ", rows.max_length, " per sequence");
    if (rows.used) text += ", used lengths given";
    return text;
}

template <class Problem>
void sizes_line(std::string& text, const Problem& p, const std::string& queries, const std::string& keys) {
    const std::string heads = p.heads_k == p.heads_q ? text_of(p.heads_q) : text_of(p.heads_q, " (", p.heads_k, " key heads)");
    const std::string dims = p.head_dim == p.head_dim_v ? text_of(p.head_dim) : text_of(p.head_dim, " and ", p.head_dim_v);
    line(text, "problem", p.dtype, " on ", p.device, ", batch ", p.batch, ", heads ", heads, ", head_dim ", dims);
    line(text, "", "queries ", queries, ", keys ", keys);
}

std::string score_options_text(const ScoreOptions& score) {
    std::string text = text_of("softmax_scale ", score.softmax_scale);
    const MaskRule& rule = score.mask_rule;
    if (rule.right == 0 && rule.left == MaskRule::kUnbounded) {
        text += ", causal";
    } else if (rule.bounded()) {
        const auto side = [](int64_t keys) { return keys == MaskRule::kUnbounded ? int64_t{-1} : keys; };
        text += text_of(", window (", side(rule.left), ", ", side(rule.right), ")");
    }
    if (rule.bounded() && rule.top_left) text += " top-left";
    if (score.softcap > 0) text += text_of(", softcap ", score.softcap);
    if (score.alibi_slopes.present) text += ", alibi";
    if (score.sink.present) text += ", sink";
    return text;
}

std::string positions_text(const Positions& positions) {
    if (positions.of_rows) return "each at its own position";
    const std::string begin = positions.begins ? "0 of each sequence at its own position" : text_of("0 at ", positions.begin);
    return positions.step == 1 ? begin : begin + text_of(" with step ", positions.step);
}

std::string shard_options_text(const AttentionProblem& p) {
    std::string text;
    if (p.has_positions) {
        text += ", row " + positions_text(p.row_positions) + ", column " + positions_text(p.column_positions);
    }
    const DropoutNumbers& numbers = p.dropout_numbers;
    if (numbers.sequences) text += ", sequence numbers";
    if (numbers.heads_total != p.heads_q) text += text_of(", heads from ", numbers.head_begin, " of ", numbers.heads_total);
    if (p.continues) text += ", continues";
    if (p.adds) text += ", adds";
    if (p.delta.present) text += p.reads_delta ? ", reads delta" : ", writes delta";
    if (p.max_logit.present) text += p.max_logit.ndim == 1 ? ", max_logit of heads" : ", max_logit of rows";
    if (p.entropy.present) text += ", entropy";
    if (p.request.sm_margin > 0) {
        text += text_of(", sm_margin ", p.request.sm_margin, p.device.is_cuda() ? "" : " (no effect on the CPU)");
    }
    return text;
}

std::string options_text(const AttentionProblem& p) {
    std::string text = score_options_text(p);
    if (p.bias.present) text += text_of(", bias ", Sizes{p.bias.shape, 4});
    if (p.mask.present) text += text_of(", mask ", Sizes{p.mask.shape, 4});
    if (p.block_mask.present) {
        text += text_of(", block mask ", p.block_mask.rows, " x ", p.block_mask.cols,
                        p.block_mask.has_lists ? " (lists)" : " (dense)");
    }
    if (p.dropout.active()) text += text_of(", dropout ", p.dropout.p);
    text += shard_options_text(p);
    if (p.dbias.present) text += ", dbias";
    if (p.dsink.present) text += ", dsink";
    if (p.request.deterministic) text += ", deterministic";
    return text;
}

std::string options_text(const DecodeProblem& p) {
    std::string text = score_options_text(p);
    if (p.cache.paged()) text += text_of(", pages of ", p.cache.page_size);
    if (p.tree.data) text += ", tree mask";
    if (p.positions) text += ", positions given";
    if (p.invariant_rows) text += ", invariant rows";
    if (p.seqlen_new > 0) text += ", appends " + lengths_text(p.new_rows);
    if (p.rotary_cos.present) text += text_of(", rotary embedding of ", 2 * p.rotary_cos.shape[1], " channels");
    return text;
}

// Appends `names`, separated by ", ", broken into lines of at most kWidth characters.
void add_wrapped(std::string& text, std::string names) {
    constexpr size_t kWidth = 110;
    while (names.size() > kWidth) {
        const size_t end = names.rfind(", ", kWidth);
        line(text, "", "  ", names.substr(0, end + 1));
        names.erase(0, end + 2);
    }
    line(text, "", "  ", names);
}

// Appends why the other kernels of the operation are not chosen.
void add_other_kernels(std::string& text, const KernelQuery& query, const KernelEntry& chosen) {
    std::vector<KernelReason> reasons;
    for (int i = 0; i < kernel_count(); ++i) {
        const KernelEntry& kernel = kernel_entry(i);
        if (kernel.operation != query.operation || &kernel == &chosen) continue;
        std::string why;
        if (accepts(kernel, query, &why)) why = "accepts the call too, but comes later in the order of preference";
        add_reason(reasons, why, kernel);
    }
    for (const auto& [why, names] : reasons) {
        line(text, "not", why);
        add_wrapped(text, names);
    }
}

// `plan_with(kernel)` makes the plan for a kernel that accepts the problem.
template <class Problem, class PlanWith>
void add_kernel_choice(std::string& text, const Problem& problem, const PlanWith& plan_with) {
    const KernelQuery query = kernel_query(problem);
    if (cuda::device_count() > 0) cuda::check_device_exists(query.device);  // without a GPU the text gives the reason
    if (const KernelEntry* kernel = find_kernel(query)) {
        add_plan_lines(text, plan_with(*kernel));
        add_other_kernels(text, query, *kernel);
    } else {
        line(text, "kernel", "none: UNSUPPORTED");
        line(text, "because", why_no_kernel(query));
    }
    if (problem.device.is_cuda()) line(text, "cuda", cuda::state_text());
}

}  // namespace

std::string explain(const AttentionProblem& problem) {
    std::string text;
    line(text, "operation", problem.backward ? "backward" : "forward");
    sizes_line(text, problem, lengths_text(problem.q_rows), lengths_text(problem.k_rows));
    line(text, "options", options_text(problem));
    if (problem.backward) {
        add_kernel_choice(text, problem, [&](const KernelEntry& kernel) { return plan_backward(problem, kernel); });
    } else {
        add_kernel_choice(text, problem, [&](const KernelEntry& kernel) { return plan_forward(problem, kernel); });
    }
    return text;
}

namespace {

// "q, k, bias": the inputs that have a tangent.
std::string tangents_text(const TangentProblem& p) {
    const std::pair<bool, const char*> given[] = {{p.tangents.q.present, "q"},       {p.tangents.k.present, "k"},
                                                  {p.tangents.v.present, "v"},       {p.tangents.bias.present, "bias"},
                                                  {p.tangents.sink.present, "sink"}, {p.tangents.dout.present, "dout"},
                                                  {p.tangents.dlse.present, "dlse"}};
    std::string text;
    for (const auto& [present, name] : given)
        if (present) text += (text.empty() ? "" : ", ") + std::string(name);
    text = text.empty() ? "none" : text;
    if (!p.backward) return text + (p.from_lse ? "; out and lse are given" : "; with out and lse");
    return text + (p.with_gradients() ? "; with the gradients" : "");
}

}  // namespace

std::string explain(const TangentProblem& problem) {
    std::string text;
    line(text, "operation", operation_name(problem.operation));
    sizes_line(text, problem, lengths_text(problem.q_rows), lengths_text(problem.k_rows));
    line(text, "options", options_text(problem));
    line(text, "tangents", tangents_text(problem));
    add_kernel_choice(text, problem, [&](const KernelEntry& kernel) { return plan_tangent(problem, kernel); });
    return text;
}

std::string explain(const DecodeProblem& problem) {
    std::string text;
    line(text, "operation", "decode");
    sizes_line(text, problem, lengths_text(problem.q_rows), text_of("up to ", problem.cache.capacity));
    line(text, "options", options_text(problem));
    add_kernel_choice(text, problem, [&](const KernelEntry& kernel) { return plan_decode(problem, kernel); });
    return text;
}

}  // namespace libflash
