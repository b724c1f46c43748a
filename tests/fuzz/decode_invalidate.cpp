// Ways to make a valid decode call invalid, each with the status that must be returned.
#include <limits>

#include "decode_case.h"
#include "tensor_invalidate.h"

namespace fuzz {
namespace {

using Options = flash_decode_options_t;

struct OptionFault {
    const char* name;
    flash_status_t expected;
    void (*apply)(Options&);
};

const OptionFault kOptionFaults[] = {
    {"struct_size 0", FLASH_STATUS_VERSION, [](Options& o) { o.struct_size = 0; }},
    {"struct_size short", FLASH_STATUS_VERSION, [](Options& o) { o.struct_size = 16; }},
    {"unknown flag", FLASH_STATUS_INVALID, [](Options& o) { o.flags |= 0x40000000u; }},
    {"reserved", FLASH_STATUS_INVALID, [](Options& o) { o.reserved = -1; }},
    {"softcap NaN", FLASH_STATUS_INVALID, [](Options& o) { o.softcap = std::numeric_limits<double>::quiet_NaN(); }},
    {"window_left -2", FLASH_STATUS_INVALID, [](Options& o) { o.flags |= FLASH_FLAG_WINDOW, o.window_left = -2; }},
    {"num_splits -1", FLASH_STATUS_INVALID, [](Options& o) { o.split_size = 0, o.num_splits = -1; }},
    {"split_size 100", FLASH_STATUS_INVALID, [](Options& o) { o.num_splits = 0, o.split_size = 100; }},
    {"split_size negative", FLASH_STATUS_INVALID, [](Options& o) { o.num_splits = 0, o.split_size = -128; }},
    {"num_splits and split_size", FLASH_STATUS_INVALID, [](Options& o) { o.num_splits = 2, o.split_size = 128; }},
    {"num_splits with invariant rows", FLASH_STATUS_INVALID,
     [](Options& o) { o.split_size = 0, o.num_splits = 2, o.flags |= FLASH_FLAG_INVARIANT_ROWS; }},
    {"shard_count -1", FLASH_STATUS_INVALID, [](Options& o) { o.shard_count = -1; }},
    {"shard_index past shard_count", FLASH_STATUS_INVALID, [](Options& o) { o.shard_index = o.shard_count + 1; }},
    {"shard_keys huge", FLASH_STATUS_INVALID, [](Options& o) { o.shard_keys = INT64_MAX; }},
    {"num_threads -1", FLASH_STATUS_INVALID, [](Options& o) { o.num_threads = -1; }},
    {"backend unknown", FLASH_STATUS_INVALID, [](Options& o) { o.backend = ""; }},
};

std::string invalidate_contents(DecodeCase& problem, DecodeCall& call, Bytes& bytes) {
    if (problem.batch == 0) return {};
    const int64_t b = bytes.below(problem.batch);
    const auto ints = [&](DecodeRole role) { return problem.tensor[role].ints(); };
    const bool shard = problem.options.shard_count > 1;
    const int64_t rows = problem.rows[static_cast<size_t>(b)], new_rows = problem.new_rows[static_cast<size_t>(b)];
    switch (bytes.below(9)) {
        case 0:
            if (!call.given[kSeqlens] || shard) return {};
            ints(kSeqlens)[b] = bytes.one_of<int32_t>({-1, 0x7fffffff, static_cast<int32_t>(problem.capacity + 1),
                                                       static_cast<int32_t>(problem.capacity - new_rows + 1)});
            return "cache_seqlens out of range";
        case 1:
            // Only a page that holds keys that a row sees must be valid.
            if (!call.given[kTable] || problem.cached(b) + new_rows == problem.leftpad(b)) return {};
            if (rows == 0 || shard || (problem.options.flags & FLASH_FLAG_WINDOW)) return {};
            ints(kTable)[b * call.view[kTable].stride[0] + problem.leftpad(b) / problem.page_size * call.view[kTable].stride[1]] =
                bytes.one_of<int32_t>({-1, static_cast<int32_t>(problem.pages), 0x7fffffff});
            return "page out of range";
        case 2:
            if (!call.given[kBatchIdx] || problem.cached(b) + new_rows == problem.leftpad(b)) return {};
            if (rows == 0 || shard || (problem.options.flags & FLASH_FLAG_WINDOW)) return {};
            ints(kBatchIdx)[b] = bytes.one_of<int32_t>({-1, static_cast<int32_t>(problem.entries)});
            return "cache_batch_idx out of range";
        case 3:
            if (!call.given[kCuQ]) return {};
            ints(kCuQ)[bytes.chance(128) ? 0 : problem.batch] = bytes.one_of<int32_t>({-1, 0x7fffffff});
            return "cu_seqlens_q out of range";
        case 4:
            if (!call.given[kCuNew]) return {};
            ints(kCuNew)[bytes.chance(128) ? 0 : problem.batch] = bytes.one_of<int32_t>({-1, 0x7fffffff});
            return "cu_seqlens_new out of range";
        case 5:
            if (!call.given[kPositions] || rows == 0) return {};
            ints(kPositions)[(call.given[kCuQ] ? ints(kCuQ)[b] : b * rows) + rows - 1] = bytes.one_of<int32_t>({-1, INT32_MIN});
            return "q_positions negative";
        case 6:
            if (!call.given[kCuTree]) return {};
            ints(kCuTree)[bytes.chance(128) ? 0 : problem.batch] = bytes.one_of<int32_t>({-1, 0x7fffffff});
            return "cu_seqlens_tree out of range";
        case 7:
            if (!call.given[kGroups]) return {};
            ints(bytes.chance(128) ? kGroups : kShared)[0] = bytes.one_of<int32_t>({-1, 0x7fffffff});
            return "shared_groups or shared_lens out of range";
        default:
            if (!call.given[kLeftpad]) return {};
            ints(kLeftpad)[b] = bytes.one_of<int32_t>({-1, static_cast<int32_t>(problem.capacity + 1)});
            return "cache_leftpad out of range";
    }
}

std::string invalidate_combination(const DecodeCase& problem, DecodeCall& call, Bytes& bytes) {
    switch (bytes.below(8)) {
        case 0:
            if (!call.given[kVNew]) return {};
            call.given[bytes.chance(128) ? kKNew : kVNew] = false;
            return "k_new without v_new";
        case 1:
            if (!call.given[kCos]) return {};
            call.given[bytes.chance(128) ? kCos : kSin] = false;
            return "rotary_cos without rotary_sin";
        case 2:
            if (!call.given[kTable] || !call.given[kSeqlens]) return {};
            call.given[kBatchIdx] = true, call.view[kBatchIdx] = call.view[kSeqlens];
            return "block_table and cache_batch_idx";
        case 3:
            if (!call.given[kCuTree]) return {};
            call.given[kTree] = false;
            return "cu_seqlens_tree without tree_mask";
        case 4:
            if (!call.given[kGroups]) return {};
            call.given[bytes.chance(128) ? kGroups : kShared] = false;
            return "shared_groups without shared_lens";
        case 5:
            if (!call.given[kRopeNew]) return {};
            call.given[bytes.one_of({kKNew, kRopeNew, kRopeCache})] = false;
            return "a rope part without the rest";
        case 6:
            if (!problem.v_in_k || !problem.append || !problem.scale_of_rows(kKScale)) return {};
            call.given[kVScale] = true, call.view[kVScale] = call.view[kKScale];
            return "v_scale for values in k_cache, whose scales an append computes";
        default: call.given[bytes.one_of({kQuery, kKCache, kVCache, kDecodeOut})] = false; return "a required tensor is NULL";
    }
}

}  // namespace

std::string invalidate(DecodeCase& problem, DecodeCall& call, Bytes& bytes, flash_status_t* expected) {
    *expected = FLASH_STATUS_INVALID;
    const int64_t kind = bytes.below(6);
    if (kind == 0) {
        const auto& fault = kOptionFaults[bytes.below(sizeof kOptionFaults / sizeof kOptionFaults[0])];
        fault.apply(call.options);
        *expected = fault.expected;
        return fault.name;
    }
    if (kind == 1) return invalidate_contents(problem, call, bytes);
    if (kind == 2) return invalidate_combination(problem, call, bytes);
    const auto role = static_cast<DecodeRole>(bytes.below(kDecodeRoles));
    if (!call.given[role]) return {};
    const bool cache = role == kKCache || role == kVCache || role == kRopeCache;
    TensorTraits traits;
    const bool scale = role == kKScale || role == kVScale, written = cache || (scale && problem.scale_of_rows(role));
    traits.output = role == kDecodeOut || role == kDecodeLse || (written && problem.seqlen_new > 0 && problem.append);
    traits.rows = role <= kDecodeOut || cache || role == kKNew || role == kVNew || role == kRopeNew || role == kPositions;
    // The number of new rows follows only from another tensor of new rows.
    const bool free_rows = role == kKNew && !call.given[kVNew] && !call.given[kRopeNew];
    traits.exact = role != kTable && role != kTree && role != kSchedule && !scale && !free_rows;
    return invalidate_tensor(call.view[role], call.view[kQuery], traits, bytes);
}

}  // namespace fuzz
