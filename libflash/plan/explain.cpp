#include "plan/explain.h"

#include <utility>
#include <vector>

#include "plan/device.h"
#include "plan/plan.h"

namespace libflash {

namespace {

// "kernel      forward_cpu_avx512"
template <class... Parts>
void line(std::string& text, const char* label, const Parts&... parts) {
    std::string start = label;
    start.resize(12, ' ');
    text += start + text_of(parts...) + "\n";
}

std::string rows_text(const Sequences& rows) {
    std::string text = rows.packed() ? text_of("packed ", rows.capacity, " rows") : text_of(rows.capacity);
    if (rows.packed() && rows.max_length < rows.capacity) text += text_of(", at most ", rows.max_length, " a sequence");
    if (rows.used) text += ", partly used";
    return text;
}

template <class Problem>
void sizes_line(std::string& text, const Problem& p, const std::string& queries, const std::string& keys) {
    const std::string heads = p.heads_k == p.heads_q ? text_of(p.heads_q) : text_of(p.heads_q, " over ", p.heads_k);
    const std::string dims = p.head_dim == p.head_dim_v ? text_of(p.head_dim) : text_of(p.head_dim, " and ", p.head_dim_v);
    line(text, "problem", p.dtype, " on ", p.device, ", batch ", p.batch, ", heads ", heads, ", head_dim ", dims);
    line(text, "", "queries ", queries, ", keys ", keys);
}

template <class Problem>
std::string score_options(const Problem& p) {
    std::string text = text_of("softmax_scale ", p.softmax_scale);
    const MaskRule& rule = p.mask_rule;
    if (rule.right == 0 && rule.left == MaskRule::kUnbounded) {
        text += ", causal";
    } else if (rule.bounded()) {
        const auto side = [](int64_t keys) { return keys == MaskRule::kUnbounded ? int64_t{-1} : keys; };
        text += text_of(", window (", side(rule.left), ", ", side(rule.right), ")");
    }
    if (rule.bounded() && rule.top_left) text += " top-left";
    if (p.softcap > 0) text += text_of(", softcap ", p.softcap);
    if (p.alibi_slopes.present) text += ", alibi";
    if (p.sink.present) text += ", sink";
    return text;
}

std::string options_text(const AttentionProblem& p) {
    std::string text = score_options(p);
    if (p.bias.present) text += text_of(", bias ", Sizes{p.bias.shape, 4});
    if (p.mask.present) text += text_of(", mask ", Sizes{p.mask.shape, 4});
    if (p.block_mask.present) {
        text += text_of(", block mask ", p.block_mask.rows, " x ", p.block_mask.cols,
                        p.block_mask.has_lists ? " (lists)" : " (dense)");
    }
    if (p.dropout.active()) text += text_of(", dropout ", p.dropout.p);
    if (p.dbias.present) text += ", dbias";
    if (p.dsink.present) text += ", dsink";
    if (p.request.deterministic) text += ", deterministic";
    return text;
}

std::string options_text(const DecodeProblem& p) {
    std::string text = score_options(p);
    if (p.cache.paged()) text += text_of(", pages of ", p.cache.page_size);
    if (p.seqlen_new > 0) text += text_of(", appends ", p.seqlen_new);
    if (p.rotary_cos.present) text += text_of(", rotary over ", 2 * p.rotary_cos.shape[1], " channels");
    return text;
}

void splits_line(std::string& text, int64_t splits) {
    line(text, "splits", splits, splits == 1 ? " (keys are not split)" : " ranges of keys");
}

void cpu_lines(std::string& text, const cpu::Plan& plan) {
    line(text, "threads", plan.threads);
    splits_line(text, plan.num_splits);
    if (plan.key_chunks > 1) line(text, "chunks", plan.key_chunks, " ranges of keys with a query gradient of their own");
}

template <class Problem>
void plan_lines(std::string& text, const Problem& problem, const KernelRow& row) {
    const Plan plan = make_plan(problem, row);
    line(text, "kernel", row.name, ", backend ", row.backend);
    const int tile_q = row.cuda ? row.tile_q : plan.cpu.tile_q, tile_k = row.cuda ? row.tile_k : plan.cpu.tile_k;
    if (tile_q > 0) line(text, "tile", tile_q, " queries x ", tile_k, " keys");
    if (row.cpu) cpu_lines(text, plan.cpu);
    if (plan.cuda_splits > 0) splits_line(text, plan.cuda_splits);
    line(text, "workspace", plan.workspace_bytes, " bytes");
}

// Names, separated by ", ", in lines that fit a screen.
void wrapped(std::string& text, std::string names) {
    constexpr size_t kWidth = 110;
    while (names.size() > kWidth) {
        const size_t end = names.rfind(", ", kWidth);
        line(text, "", "  ", names.substr(0, end + 1));
        names.erase(0, end + 2);
    }
    line(text, "", "  ", names);
}

// Why not the others; rows with the same reason share a line.
void other_lines(std::string& text, const Subject& subject, const KernelRow& chosen) {
    std::vector<std::pair<std::string, std::string>> reasons;  // and the names
    bool after = false;
    for (int i = 0; i < kernel_count(); ++i) {
        const KernelRow& row = kernel_row(i);
        if (&row == &chosen) after = true;
        if (row.operation != subject.operation || &row == &chosen) continue;
        std::string why;
        if (accepts(row, subject, &why)) why = after ? "would do, comes later in order of preference" : "would do";
        size_t at = 0;
        while (at < reasons.size() && reasons[at].first != why) ++at;
        if (at == reasons.size()) reasons.emplace_back(why, "");
        reasons[at].second += (reasons[at].second.empty() ? "" : ", ") + std::string(row.name);
    }
    for (const auto& [why, names] : reasons) {
        line(text, "not", why);
        wrapped(text, names);
    }
}

template <class Problem>
void finish(std::string& text, const Problem& problem) {
    const Subject subject = subject_of(problem);
    if (device_count() > 0) check_device_exists(subject.device);  // a machine without a GPU is explained instead
    if (const KernelRow* row = find_kernel(subject)) {
        plan_lines(text, problem, *row);
        other_lines(text, subject, *row);
    } else {
        line(text, "kernel", "none: UNSUPPORTED");
        line(text, "because", why_no_kernel(subject));
    }
    if (problem.device.is_cuda()) line(text, "cuda", cuda_state());
}

}  // namespace

std::string explain(const AttentionProblem& problem) {
    std::string text;
    line(text, "operation", problem.backward ? "backward" : "forward");
    sizes_line(text, problem, rows_text(problem.q_rows), rows_text(problem.k_rows));
    line(text, "options", options_text(problem));
    finish(text, problem);
    return text;
}

std::string explain(const DecodeProblem& problem) {
    std::string text;
    line(text, "operation", "decode");
    sizes_line(text, problem, text_of(problem.seqlen_q), text_of("up to ", problem.cache.capacity));
    line(text, "options", options_text(problem));
    finish(text, problem);
    return text;
}

}  // namespace libflash
