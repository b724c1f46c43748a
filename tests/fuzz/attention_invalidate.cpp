// Ways to make a valid call invalid, each with the status that must be returned.
#include <limits>

#include "attention_case.h"
#include "tensor_invalidate.h"

namespace fuzz {
namespace {

using Options = flash_attention_options_t;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct OptionFault {
    const char* name;
    flash_status_t expected;
    void (*apply)(Options&);
};

const OptionFault kOptionFaults[] = {
    {"struct_size 0", FLASH_STATUS_VERSION, [](Options& o) { o.struct_size = 0; }},
    {"struct_size short", FLASH_STATUS_VERSION, [](Options& o) { o.struct_size = 8; }},
    {"struct_size huge", FLASH_STATUS_VERSION, [](Options& o) { o.struct_size = 0xffffffffu; }},
    {"unknown flag", FLASH_STATUS_INVALID, [](Options& o) { o.flags |= 0x80000000u; }},
    {"flag of decode", FLASH_STATUS_INVALID, [](Options& o) { o.flags |= FLASH_FLAG_ROTARY_INTERLEAVED; }},
    {"reserved", FLASH_STATUS_INVALID, [](Options& o) { o.reserved = 1; }},
    {"scale NaN", FLASH_STATUS_INVALID, [](Options& o) { o.flags |= FLASH_FLAG_SCALE, o.softmax_scale = kNan; }},
    {"scale infinite", FLASH_STATUS_INVALID, [](Options& o) { o.flags |= FLASH_FLAG_SCALE, o.softmax_scale = -kInfinity; }},
    {"softcap negative", FLASH_STATUS_INVALID, [](Options& o) { o.softcap = -1; }},
    {"softcap NaN", FLASH_STATUS_INVALID, [](Options& o) { o.softcap = kNan; }},
    {"softcap infinite", FLASH_STATUS_INVALID, [](Options& o) { o.softcap = kInfinity; }},
    {"dropout 1", FLASH_STATUS_INVALID, [](Options& o) { o.dropout_p = 1; }},
    {"dropout negative", FLASH_STATUS_INVALID, [](Options& o) { o.dropout_p = -0.25; }},
    {"dropout NaN", FLASH_STATUS_INVALID, [](Options& o) { o.dropout_p = kNan; }},
    {"window_left -2", FLASH_STATUS_INVALID, [](Options& o) { o.flags |= FLASH_FLAG_WINDOW, o.window_left = -2; }},
    {"window_right lowest", FLASH_STATUS_INVALID,
     [](Options& o) { o.flags |= FLASH_FLAG_WINDOW, o.window_right = std::numeric_limits<int64_t>::min(); }},
    {"num_splits -1", FLASH_STATUS_INVALID, [](Options& o) { o.num_splits = -1; }},
    {"num_splits huge", FLASH_STATUS_INVALID, [](Options& o) { o.num_splits = int64_t{1} << 40; }},
    {"tile_q -1", FLASH_STATUS_INVALID, [](Options& o) { o.tile_q = -1; }},
    {"tile_k 513", FLASH_STATUS_INVALID, [](Options& o) { o.tile_k = 513; }},
    {"num_threads -1", FLASH_STATUS_INVALID, [](Options& o) { o.num_threads = -1; }},
    {"max_seqlen_q -1", FLASH_STATUS_INVALID, [](Options& o) { o.max_seqlen_q = -1; }},
    {"reserved2", FLASH_STATUS_INVALID, [](Options& o) { o.reserved2 = 1; }},
    {"row_begin -1", FLASH_STATUS_INVALID, [](Options& o) { o.flags |= FLASH_FLAG_POSITIONS, o.row_begin = -1; }},
    {"column_step huge", FLASH_STATUS_INVALID,
     [](Options& o) { o.flags |= FLASH_FLAG_POSITIONS, o.column_step = std::numeric_limits<int64_t>::max(); }},
    {"head_begin alone", FLASH_STATUS_INVALID, [](Options& o) { o.head_begin = 1, o.heads_total = 0; }},
    {"sm_margin -1", FLASH_STATUS_INVALID, [](Options& o) { o.sm_margin = -1; }},
    {"backend unknown", FLASH_STATUS_INVALID, [](Options& o) { o.backend = "abacus"; }},
};

// Invalid values inside lengths and lists. This changes the tensors themselves: the case must not be used again.
std::string invalidate_contents(AttentionCase& problem, AttentionCall& call, Bytes& bytes) {
    const int64_t b = problem.batch > 0 ? bytes.below(problem.batch) : 0;
    const auto ints = [&](Role role) { return problem.tensor[role].ints(); };
    switch (bytes.below(6)) {
        case 0:
            if (!call.given[kCuQ]) return {};
            ints(kCuQ)[0] = bytes.one_of<int32_t>({1, -1});
            return "cu_seqlens_q does not start at 0";
        case 1:
            if (!call.given[kCuK] || problem.batch == 0) return {};
            ints(kCuK)[b + 1] = bytes.one_of<int32_t>({-1, 0x7fffffff, static_cast<int32_t>(problem.rows_k + 1)});
            return "cu_seqlens_k decreases or ends past the rows";
        case 2:
            if (!call.given[kCuQ] || problem.batch == 0 || problem.seqlen_q < 2) return {};
            call.options.max_seqlen_q = problem.seqlen_q - 1;
            return "max_seqlen_q below a length";
        case 3:
            if (!call.given[kUsedQ] || problem.batch == 0) return {};
            ints(kUsedQ)[b] = bytes.one_of<int32_t>({-1, static_cast<int32_t>(problem.seqlen_q + 1), 0x7fffffff});
            return "seqused_q out of range";
        case 4:
            if (!call.given[kUsedK] || problem.batch == 0) return {};
            ints(kUsedK)[b] = bytes.one_of<int32_t>({-1, static_cast<int32_t>(problem.seqlen_k + 1), -0x7fffffff});
            return "seqused_k out of range";
        default: {
            if (!call.given[kRowCounts] || problem.tensor[kRowIndices].size_bytes() <= problem.tensor[kRowIndices].lead_bytes())
                return {};
            const flash_tensor_t& indices = problem.tensor[kRowIndices].view;
            ints(kRowCounts)[0] = 1;
            ints(kRowIndices)[0] = bytes.one_of<int32_t>({-1, static_cast<int32_t>(indices.shape[3]), 0x7fffffff});
            if (bytes.chance(128)) ints(kRowCounts)[0] = bytes.one_of<int32_t>({-1, static_cast<int32_t>(indices.shape[3]) + 1});
            return "block_lists out of range";
        }
    }
}

std::string invalidate_combination(const AttentionCase& problem, AttentionCall& call, Bytes& bytes) {
    switch (bytes.below(5)) {
        case 0:
            if (call.backward) return {};
            call.given[kDlse] = true, call.view[kDlse] = call.view[kLse];
            return "dlse in a forward call";
        case 1:
            if (!call.given[kBlockMask]) return {};
            for (const Role role : {kRowCounts, kRowIndices, kColCounts, kColIndices}) call.given[role] = true;
            call.given[kBlockMask] = true;
            return "block_mask and block_lists";
        case 2: {
            const Role role = bytes.one_of({kQ, kK, kV, kOut, kDout, kDq, kDk, kDv});
            if (role >= kDout && !call.backward) return {};
            call.given[role] = false;
            return "a required tensor is NULL";
        }
        case 3:
            if (!call.backward) return {};
            call.given[kLse] = false;
            return "backward without lse";
        default:
            if (!call.backward || !call.given[kDbias]) return {};
            call.given[kBias] = false;
            (void)problem;
            return "dbias without bias";
    }
}

}  // namespace

std::string invalidate(AttentionCase& problem, AttentionCall& call, Bytes& bytes, flash_status_t* expected) {
    *expected = FLASH_STATUS_INVALID;
    const int64_t kind = bytes.below(8);
    if (kind < 2) {
        const auto& fault = kOptionFaults[bytes.below(sizeof kOptionFaults / sizeof kOptionFaults[0])];
        fault.apply(call.options);
        *expected = fault.expected;
        return fault.name;
    }
    if (kind == 2) return invalidate_contents(problem, call, bytes);
    if (kind == 3) return invalidate_combination(problem, call, bytes);
    Role role = static_cast<Role>(bytes.below(kRoles));
    const bool in_call = call.backward || role < kDout || role > kDv;
    if (!call.given[role] || !in_call || (role >= kRowCounts && role <= kColIndices)) return {};
    TensorTraits traits;
    traits.output =
        call.backward ? (role >= kDq && role <= kDv) || role == kDbias || role == kDsink : role == kOut || role == kLse;
    traits.rows = (role >= kQ && role <= kDv && role != kLse);
    traits.exact = traits.rows || role == kLse || (role >= kCuQ && role <= kAlibi) || role >= kSink;
    if (role == kBlockMask) traits.exact = false;
    const Role input = role == kQ ? kK : kQ;
    return invalidate_tensor(call.view[role], call.view[input], traits, bytes);
}

}  // namespace fuzz
