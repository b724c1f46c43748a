// Ways to make a valid call of flash_cache_write invalid, each with the status that must be returned and the argument that the
// text must name.
#include "cache_write_case.h"
#include "tensor_invalidate.h"

namespace fuzz {
namespace {

using Options = flash_cache_write_options_t;

struct OptionFault {
    const char *what, *argument;
    flash_status_t expected;
    void (*apply)(Options&);
};

const OptionFault kOptionFaults[] = {
    {"struct_size 0", "struct_size", FLASH_STATUS_VERSION, [](Options& o) { o.struct_size = 0; }},
    {"struct_size short", "struct_size", FLASH_STATUS_VERSION, [](Options& o) { o.struct_size = 16; }},
    {"struct_size huge", "struct_size", FLASH_STATUS_VERSION, [](Options& o) { o.struct_size = 0xffffffffu; }},
    {"unknown flag", "flags", FLASH_STATUS_INVALID, [](Options& o) { o.flags |= 0x40000000u; }},
    {"a flag of decode", "flags", FLASH_STATUS_INVALID, [](Options& o) { o.flags |= FLASH_FLAG_CAUSAL; }},
    {"reserved", "reserved", FLASH_STATUS_INVALID, [](Options& o) { o.reserved = -1; }},
    {"num_threads -1", "num_threads", FLASH_STATUS_INVALID, [](Options& o) { o.num_threads = -1; }},
    {"num_threads huge", "num_threads", FLASH_STATUS_INVALID, [](Options& o) { o.num_threads = INT32_MAX; }},
    {"backend unknown", "backend", FLASH_STATUS_INVALID, [](Options& o) { o.backend = ""; }},
    {"kernel of decode", "kernel", FLASH_STATUS_UNSUPPORTED, [](Options& o) { o.kernel = "decode_cpu_scalar"; }},
};

WriteFault invalidate_options(WriteCall& call, Bytes& bytes) {
    const auto& fault = kOptionFaults[bytes.below(sizeof kOptionFaults / sizeof kOptionFaults[0])];
    fault.apply(call.options);
    return {fault.what, fault.argument, fault.expected};
}

// A row with a slot in the cache, after `after`; -1 if there is none.
int64_t written_row(const WriteCase& problem, int64_t after) {
    for (int64_t row = after + 1; row < problem.rows; ++row)
        if (problem.writes(row)) return row;
    return -1;
}

WriteFault invalidate_contents(WriteCase& problem, Bytes& bytes) {
    const int64_t row = written_row(problem, bytes.between(-1, 3)), other = written_row(problem, row);
    if (row < 0) return {};
    if (problem.rotated() && bytes.chance(128)) {
        const auto past = static_cast<int32_t>(problem.tensor[kTableCos].view.shape[0]);
        problem.tensor[kRowPositions].ints()[row] = bytes.one_of<int32_t>({-1, INT32_MIN, past, INT32_MAX});
        return {"position out of range", "positions"};
    }
    if (other < 0) return {};
    const int64_t size = bytes_of(problem.tensor[kSlots].view.dtype);
    char* const slots = static_cast<char*>(problem.tensor[kSlots].view.data);
    std::memcpy(slots + other * size, slots + row * size, static_cast<size_t>(size));
    return {"two rows with one slot", "slots"};
}

// Takes away one of two tensors that are given together.
WriteFault remove_one(WriteCall& call, WriteRole one, WriteRole other, Bytes& bytes) {
    if (!call.given[one]) return {};
    const WriteRole removed = bytes.chance(128) ? one : other;
    call.given[removed] = false;
    return {std::string("no ") + name_of(removed), name_of(removed)};
}

WriteFault invalidate_given(const WriteCase& problem, WriteCall& call, Bytes& bytes) {
    const auto remove = [&](WriteRole role) {
        call.given[role] = false;
        return WriteFault{std::string("no ") + name_of(role), name_of(role)};
    };
    switch (bytes.below(7)) {
        case 0: return remove_one(call, kNewV, kCacheV, bytes);
        case 1: return remove_one(call, kNewRope, kCacheRope, bytes);
        case 2: return remove_one(call, kTableCos, kTableSin, bytes);
        case 3:
            if (!problem.rotated()) return {};
            return remove(kRowPositions);
        case 4:
            if (!problem.rotated()) return {};
            call.given[kTableCos] = call.given[kTableSin] = false;
            return {"positions without tables", "positions"};
        case 5:
            if (!call.given[kScaleK] || problem.cache_dtype != FLASH_DTYPE_INT8) return {};
            return remove(call.given[kScaleV] && bytes.chance(128) ? kScaleV : kScaleK);
        default: return remove(bytes.one_of({kNewK, kCacheK, kSlots}));
    }
}

WriteFault invalidate_scale(const WriteCase& problem, WriteCall& call, Bytes& bytes) {
    const WriteRole role = call.given[kScaleV] && bytes.chance(128) ? kScaleV : kScaleK;
    if (!call.given[role]) return {};
    flash_tensor_t& scale = call.view[role];
    void* const data = scale.data;
    const int32_t type = FLASH_DTYPE_FLOAT32;
    WriteFault fault;
    switch (bytes.below(4)) {
        case 0: scale = contiguous(type, {problem.rows, problem.heads}), fault.what = "a scale for each sequence"; break;
        case 1: scale = contiguous(type, {}), fault.what = "a scale without dimensions"; break;
        case 2:
            if (problem.codes()) return {};
            scale = contiguous(type, {problem.blocks, problem.block_rows, problem.heads});
            fault.what = "scales of rows without codes";
            break;
        default:
            scale = contiguous(type, {problem.blocks, problem.block_rows, problem.heads, bytes.chance(128) ? 0 : 1000});
            fault.what = "groups that do not divide the channels";
            break;
    }
    scale.data = data;
    fault.argument = name_of(role);
    return fault;
}

// Only the sizes and the type of the tables, which are checked before their data is read.
WriteFault invalidate_rotary(const WriteCase& problem, WriteCall& call, Bytes& bytes) {
    if (!problem.rotated()) return {};
    const int64_t channels = problem.channels_rope > 0 ? problem.channels_rope : problem.channels_k;
    const int kind = static_cast<int>(bytes.below(3));
    for (const WriteRole role : {kTableCos, kTableSin}) {
        if (kind == 0) call.view[role].shape[0] = 0;
        if (kind == 1) call.view[role].shape[1] = channels / 2 + 1;
        if (kind == 2) call.view[role].shape[1] = 0;
    }
    return {kind == 0 ? "no positions in the tables" : kind == 1 ? "too many pairs" : "no pairs", "rotary_cos"};
}

WriteFault invalidate_one_tensor(WriteCall& call, Bytes& bytes) {
    const auto role = static_cast<WriteRole>(bytes.below(kWriteRoles));
    if (!call.given[role]) return {};
    const bool scale = role == kScaleK || role == kScaleV, cache = role == kCacheK || role == kCacheV || role == kCacheRope;
    TensorTraits traits;
    traits.output = cache || (scale && call.view[role].ndim > 2);
    traits.rows = cache || role <= kNewRope || role == kTableCos || role == kTableSin;
    // The number of blocks and rows of k_cache follows only from other parts of the cache.
    traits.exact = !scale && (role != kCacheK || call.given[kCacheV] || call.given[kCacheRope]);
    WriteFault fault;
    fault.what = invalidate_tensor(call.view[role], call.view[kNewK], traits, bytes);
    const bool between_two = fault.what == "a size one too large" || fault.what == "on another device than the rest" ||
                             fault.what == "output over an input";
    if (!between_two) fault.argument = name_of(role);
    return fault;
}

}  // namespace

WriteFault invalidate(WriteCase& problem, WriteCall& call, Bytes& bytes) {
    switch (bytes.below(9)) {
        case 0: return invalidate_options(call, bytes);
        case 1: return invalidate_contents(problem, bytes);
        case 2: return invalidate_given(problem, call, bytes);
        case 3: return invalidate_scale(problem, call, bytes);
        case 4: return invalidate_rotary(problem, call, bytes);
        default: return invalidate_one_tensor(call, bytes);
    }
}

}  // namespace fuzz
