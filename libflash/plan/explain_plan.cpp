#include "plan/explain_plan.h"

#include "plan/explain_line.h"

namespace libflash {

namespace {

using cuda::LaunchShape;

void tile_line(std::string& text, int tile_q, int tile_k) {
    if (tile_q > 0) line(text, "tile", tile_q, " queries x ", tile_k, " keys");
}

void splits_line(std::string& text, int64_t splits) {
    line(text, "splits", splits, splits == 1 ? " (keys are not split)" : " ranges of keys");
}

void cpu_lines(std::string& text, const cpu::Plan& plan) {
    tile_line(text, plan.tile_q, plan.tile_k);
    line(text, "threads", plan.threads);
    splits_line(text, plan.num_splits);
    if (plan.segment > 0) line(text, "rows", "invariant: segments of ", plan.segment, " keys, version ", cpu::kInvariantVersion);
    if (plan.key_chunks > 1) line(text, "chunks", plan.key_chunks, " ranges of keys, each with its own dQ accumulator");
}

// The launches of a plan, one line each. Only the first line has the label; a kernel that is not launched (0 blocks) has no line.
struct LaunchLines {
    std::string& text;
    const char* label = "launch";

    // `more`: text about this launch.
    void add(const char* what, const LaunchShape& shape, const std::string& more = "") {
        if (shape.blocks == 0) return;
        const std::string shared =
            shape.shared_bytes > 0 ? text_of(", ", shape.shared_bytes, " bytes of shared memory each") : "";
        line(text, label, what, ": ", shape.blocks, " thread blocks of ", shape.threads, " threads", shared, more);
        label = "";
    }
};

// `at_once`: thread blocks of a launch; 0: all.
std::string divided(int64_t at_once) { return at_once > 0 ? text_of(", at most ", at_once, " in a launch") : ""; }

std::string divided(const cuda::BackwardParts& parts) {
    return parts.launches > 1 ? text_of(divided(parts.key_tiles), ", each ", parts.launches, " times") : "";
}

// The order of the work tiles of forward.
std::string order_of(const cuda::ScheduleParams& schedule) {
    const auto text = [](int64_t heads, const std::string& order) { return text_of(heads, " heads at a time", order); };
    const cuda::StaticScheduleParams& fixed = schedule.fixed;
    if (!schedule.paired) return text(schedule.heads_per_group, schedule.reversed ? ", longest tiles first" : "");
    const int all = schedule.heads, tail = fixed.tail_tiles > 0 ? fixed.tail_heads : 0;
    const int64_t group = fixed.tail_group.divisor;
    if (fixed.units == 0 && tail > 0)
        return text(group, group < tail ? ", longest or shortest tiles first in turn" : ", longest tiles first");
    const std::string except = tail > 0 ? text_of(", but not in the last ", tail, " of ", all, " heads") : "";
    return text(schedule.heads_per_group, ", long tiles paired with short ones" + except);
}

void cuda_lines(std::string& text, const cuda::ForwardPlan& plan) {
    const cuda::ScheduleParams& schedule = plan.schedule;
    line(text, "instance", plan.instance.name);
    tile_line(text, plan.tile_q, plan.tile_k);
    line(text, "schedule", plan.dynamic ? "dynamic, " : "static, ", order_of(schedule));
    LaunchLines launches{text};
    launches.add("tile order", plan.order);
    launches.add("first maxima of heads", plan.head_maxima);
    launches.add("attention", plan.attention, divided(plan.blocks_at_once));
}

void cuda_lines(std::string& text, const cuda::BackwardPlan& plan) {
    line(text, "instance", plan.instance.name);
    tile_line(text, plan.tile_q, plan.tile_k);
    if (plan.dq_tile_q > 0) line(text, "", "dq: ", plan.dq_tile_q, " queries x ", plan.dq_tile_k, " keys");
    line(text, "schedule", plan.dynamic ? "dynamic, " : "static, ", plan.key_schedule.heads_per_group, " key heads at a time",
         plan.fixed_order ? ", last keys first; additions to dq in this order" : "");
    const cuda::BackwardSplits& split_tiles = plan.split_tiles;
    if (split_tiles.splits > 1)
        line(text, "key tiles", plan.key_tiles, ", of which the last ", plan.key_tiles - split_tiles.first, " in ",
             split_tiles.splits, " splits of their queries");
    LaunchLines launches{text};
    launches.add("softmax statistics", plan.statistics);
    launches.add("order of additions to dq", plan.dq_counters);
    launches.add("dk and dv", plan.dk_dv, divided(plan.parts));
    launches.add("dq from its accumulator", plan.dq_conversion);
    launches.add("dq", plan.dq);
    launches.add("dsink", plan.dsink);
    launches.add("dbias", plan.dbias, plan.dbias_kernel ? text_of(", of ", plan.dbias_kernel->config.name) : "");
}

void cuda_lines(std::string& text, const cuda::ForwardTangentPlan& plan) {
    line(text, "instance", plan.instance.name);
    tile_line(text, plan.tile_q, plan.tile_k);
    line(text, "schedule", "static, ", plan.schedule.heads_per_group, " heads at a time",
         plan.schedule.reversed ? ", longest tiles first" : "");
    LaunchLines{text}.add("tangent of attention", plan.attention);
}

void cuda_lines(std::string& text, const cuda::BackwardTangentPlan& plan) {
    line(text, "instance", plan.instance.name);
    line(text, "tile", plan.tile_q, " rows x ", plan.tile_k, " of the other side");
    line(text, "schedule", "static, ", plan.key_schedule.heads_per_group, " key heads at a time");
    LaunchLines launches{text};
    launches.add("statistics of rows", plan.statistics);
    launches.add("tangent of dq", plan.tdq);
    launches.add("tangent of dk", plan.tdk);
    launches.add("tangent of dv", plan.tdv);
    launches.add("tangents of dk and dv", plan.tdk_tdv);
    launches.add("tangent of dsink", plan.dsink);
    launches.add("tangent of dbias", plan.dbias);
}

void cuda_lines(std::string& text, const TangentPlan& plan) {
    if (plan.kernel->cuda->config.operation == Operation::backward_tangent) {
        cuda_lines(text, plan.backward_tangent);
    } else {
        cuda_lines(text, plan.forward_tangent);
    }
}

// Only for the instance for invariant rows, which gives the same bits as the prefill kernel.
void invariant_line(std::string& text, const cuda::DecodePlan& plan) {
    if (!plan.invariant) return;
    const std::string growth =
        plan.segment_growth_begin == 0 ? "" : text_of(", from ", plan.segment_growth_begin, " on longer ones");
    line(text, "rows", "invariant: segments of ", plan.first_segment, " keys", growth, ", version ", plan.invariant_version);
}

constexpr char kInPairs[] = ", in pairs that share loads of keys";

void cuda_lines(std::string& text, const cuda::DecodePlan& plan) {
    line(text, "instance", plan.instance.name);
    tile_line(text, plan.tile_q, plan.tile_k);
    line(text, "pipeline", plan.stages, " stages",
         plan.delayed_count > 0 ? text_of(", ", plan.delayed_count, " thread blocks start later") : "");
    splits_line(text, plan.splits);
    invariant_line(text, plan);
    LaunchLines launches{text};
    launches.add("append codes", plan.append_codes);
    launches.add("append", plan.append);
    const char* const by = plan.prefix_kernel.name;
    launches.add("shared keys", plan.prefix, by ? text_of(", by ", by) : "");
    launches.add("attention", plan.attention, plan.in_pairs ? kInPairs : "");
    launches.add("combine splits", plan.combine);
    if (!plan.prefill.name) return;
    const cuda::PrefillPlan& prefill = plan.prefill.plan;
    line(text, "long chunks", "sequences of at least ", prefill.fewest_rows, " query rows: ", plan.prefill.name, ", tile ",
         prefill.tile_q, " queries x ", prefill.tile_k, " keys, instance ", prefill.instance.name);
    launches.add(prefill.order_is_given ? "tile order from the schedule" : "tile order", prefill.order);
    launches.add(
        "attention", prefill.attention,
        text_of(prefill.in_pairs ? kInPairs : "", cuda::runs_beside_prefill(plan) ? ", at the same time as decode" : ""));
}

// `of_cuda`: the CUDA part of the plan.
template <class Plan, class CudaPlan>
void all_lines(std::string& text, const Plan& plan, const CudaPlan& of_cuda) {
    line(text, "kernel", plan.kernel->info.name, ", backend ", plan.kernel->info.backend);
    if (plan.kernel->cuda) {
        cuda_lines(text, of_cuda);
    } else {
        cpu_lines(text, plan.cpu);
    }
    line(text, "workspace", plan.workspace_bytes, " bytes");
}

}  // namespace

void add_plan_lines(std::string& text, const ForwardPlan& plan) { all_lines(text, plan, plan.cuda); }
void add_plan_lines(std::string& text, const BackwardPlan& plan) { all_lines(text, plan, plan.cuda); }
void add_plan_lines(std::string& text, const DecodePlan& plan) { all_lines(text, plan, plan.cuda); }
void add_plan_lines(std::string& text, const TangentPlan& plan) {
    all_lines(text, plan, plan);
    if (plan.backward.kernel)
        line(text, "before", "backward, by ", plan.backward.kernel->info.name, " (", plan.backward.cuda.instance.name, ")");
    if (plan.forward.kernel)
        line(text, "before", "forward, by ", plan.forward.kernel->info.name, " (", plan.forward.cuda.instance.name, ")");
}

}  // namespace libflash
