// Decode: the result of a valid call is compared with the scalar reference, its cache bit for bit, and that with cache_write; an
// invalid call must be refused and change nothing.
#include "decode_case.h"
#include "kernels.h"
#include "target.h"

namespace fuzz {
namespace {

constexpr DecodeRole kWritten[] = {kDecodeOut, kDecodeLse, kKCache, kVCache, kRopeCache, kKScale, kVScale};

struct Outputs {
    Tensor tensor[kDecodeRoles];

    Outputs(const DecodeCase& problem, DecodeCall& call) {
        for (const DecodeRole role : kWritten) {
            if (!problem.tensor[role].present()) continue;
            tensor[role].copy(problem.tensor[role]);
            call.view[role] = tensor[role].view;
        }
        problem.place_parts(call);
    }
};

void run(DecodeCall& call, const char* kernel, int fill) {
    call.options.kernel = kernel;
    call.bind();
    size_t bytes = 0;
    check_status(call.workspace_size(&bytes), FLASH_STATUS_OK, "workspace_size");
    const Workspace workspace(bytes, fill);
    check_status(call.run(workspace.data(), bytes), FLASH_STATUS_OK, "decode");
}

// Takes the batch dimension from new rows. Returns false if they cannot be seen so.
bool remove_batch(const DecodeCase& problem, flash_tensor_t& rows) {
    if (problem.packed) return true;
    if (problem.batch != 1) return false;
    --rows.ndim;
    for (int n = 0; n < rows.ndim; ++n) rows.shape[n] = rows.shape[n + 1], rows.stride[n] = rows.stride[n + 1];
    return true;
}

// The row of key j in a cache that has only some of the keys, by counting; -1 if it is on another shard.
int64_t row_on_shard(const flash_decode_options_t& options, int64_t j) {
    if (options.shard_count <= 1) return j;
    const int64_t keys = options.shard_keys ? options.shard_keys : 1;
    const auto is_here = [&](int64_t t) { return t / keys % options.shard_count == options.shard_index; };
    if (!is_here(j)) return -1;
    int64_t row = 0;
    for (int64_t t = 0; t < j; ++t) row += is_here(t);
    return row;
}

// flash_cache_write gives the caches and scales of an append, bit for bit.
void compare_cache_write(const DecodeCase& problem, DecodeCall call, const Outputs& appended) {
    if (problem.v_in_k) call.given[kVCache] = call.given[kVScale] = false;  // only the keys are written
    for (const DecodeRole role : {kKNew, kVNew, kRopeNew})
        if (!problem.append || (call.given[role] && !remove_batch(problem, call.view[role]))) return;
    for (const DecodeRole role : {kKScale, kVScale})
        if (call.given[role] && call.view[role].ndim == 2) return;  // a slot belongs to no sequence
    if (call.given[kCos] && call.given[kPositions]) return;         // of query rows, and so of new keys
    const Outputs written(problem, call);
    std::vector<int64_t> slots;
    std::vector<int32_t> positions;
    for (int64_t b = 0; b < problem.batch; ++b)
        for (int64_t i = 0; i < problem.new_rows[static_cast<size_t>(b)]; ++i) {
            const int64_t j = problem.cached(b) + i;
            const int64_t row = row_on_shard(call.options, j);
            slots.push_back(row < 0 ? -1 : problem.cache_block(b, row) * call.view[kKCache].shape[1] + problem.row_in_block(row));
            positions.push_back(static_cast<int32_t>(j));
        }
    const auto count = static_cast<int64_t>(slots.size());
    flash_tensor_t slot_view = contiguous(FLASH_DTYPE_INT64, {count}), position_view = contiguous(FLASH_DTYPE_INT32, {count});
    slot_view.data = slots.data(), position_view.data = positions.data();
    flash_cache_write_options_t options = {};
    options.struct_size = sizeof options;
    options.flags = call.options.flags & FLASH_FLAG_ROTARY_INTERLEAVED;
    options.k_scale = call.at(kKScale), options.v_scale = call.at(kVScale);
    options.k_rope_cache = call.at(kRopeCache), options.k_rope_new = call.at(kRopeNew);
    options.rotary_cos = call.at(kCos), options.rotary_sin = call.at(kSin);
    options.positions = call.given[kCos] ? &position_view : nullptr;
    options.num_threads = call.options.num_threads;
    check_status(
        flash_cache_write(call.at(kKNew), call.at(kVNew), call.at(kKCache), call.at(kVCache), &slot_view, &options, nullptr),
        FLASH_STATUS_OK, "cache_write");
    for (const DecodeRole role : {kKCache, kVCache, kRopeCache, kKScale, kVScale})
        FUZZ_CHECK(written.tensor[role].bytes() == appended.tensor[role].bytes(), "cache_write and an append differ in tensor %d",
                   role);
}

// Values in the cache of keys give the bits that a copy of them gives, with a copy of its scales.
void compare_values_apart(const DecodeCase& problem, DecodeCall call, const Outputs& reference) {
    if (!problem.v_in_k || problem.append) return;
    const Outputs apart(problem, call);
    Tensor values;
    values.copy(problem.tensor[kKCache]);
    call.view[kVCache] = values.view, call.view[kVCache].shape[3] = problem.head_dim_v;
    if (!call.given[kVScale] && call.given[kKScale]) {
        call.given[kVScale] = true;
        flash_tensor_t& scale = call.view[kVScale] = call.view[kKScale];
        if (scale.ndim == 4) scale.shape[3] = problem.head_dim_v * scale.shape[3] / problem.channels_k();
    }
    run(call, "decode_cpu_scalar", 0);
    for (const DecodeRole role : {kDecodeOut, kDecodeLse})
        FUZZ_CHECK(apart.tensor[role].bytes() == reference.tensor[role].bytes(), "values apart from keys differ: tensor %d",
                   role);
}

// Two parts of keys that lie side by side give what the whole keys give.
void compare_whole_keys(const DecodeCase& problem, DecodeCall call, const Outputs& reference, const ErrorBounds& bounds) {
    if (!problem.rope_in_k || problem.append || call.given[kKScale] || call.given[kCos]) return;
    const Outputs whole(problem, call);
    call.given[kRopeCache] = false, call.view[kKCache].shape[3] = problem.head_dim;
    run(call, "decode_cpu_scalar", 0);
    const Rounding rounding(problem.dtype);
    check_close(whole.tensor[kDecodeOut], reference.tensor[kDecodeOut], rounding.u, bounds.o, "out of whole keys");
    check_close(whole.tensor[kDecodeLse], reference.tensor[kDecodeLse], rounding.sums, bounds.lse, "lse of whole keys");
}

// The queries accept a call without the addresses of its tensors. The workspace may then be larger: caches with the same strides
// may be one.
void check_queries(const DecodeCall& call) {
    DecodeCall described = call, bound = call;
    for (flash_tensor_t& view : described.view) view.data = nullptr;
    described.bind(), bound.bind();
    size_t bytes = 0, bytes_described = 1, bytes_schedule = 1;
    check_status(bound.workspace_size(&bytes), FLASH_STATUS_OK, "workspace_size");
    check_status(described.workspace_size(&bytes_described), FLASH_STATUS_OK, "workspace_size without addresses");
    FUZZ_CHECK(bytes <= bytes_described, "workspace of %zu bytes, without addresses %zu", bytes, bytes_described);
    check_status(described.schedule_size(&bytes_schedule), FLASH_STATUS_OK, "schedule_size");
    FUZZ_CHECK(bytes_schedule == 0, "schedule of %zu bytes on the CPU", bytes_schedule);
}

// A schedule of size 0 is not written. Only the lengths need addresses.
void check_write_schedule(const DecodeCase& problem, DecodeCall call) {
    Tensor schedule;
    schedule.copy(problem.tensor[kSchedule]);
    for (int role = 0; role < kDecodeRoles; ++role)
        if (role != kSeqlens && role != kCuQ && role != kCuNew) call.view[role].data = nullptr;
    call.given[kSchedule] = false;
    call.bind();
    check_status(call.write_schedule(&schedule.view), FLASH_STATUS_OK, "decode_schedule");
    FUZZ_CHECK(schedule.bytes() == problem.tensor[kSchedule].bytes(), "a schedule of size 0 was written");
    check_status(call.write_schedule(nullptr), FLASH_STATUS_INVALID, "decode_schedule without schedule");
}

// No bit of a result depends on the schedule, and the call only reads it.
void check_schedule(const DecodeCase& problem, DecodeCall call, const Outputs& got, const char* kernel) {
    if (!call.given[kSchedule]) return;
    check_write_schedule(problem, call);
    const std::vector<char> before = problem.tensor[kSchedule].bytes();
    const Outputs with(problem, call);
    run(call, kernel, 0);
    FUZZ_CHECK(problem.tensor[kSchedule].holds(before), "decode wrote to the schedule");
    for (const DecodeRole role : kWritten)
        FUZZ_CHECK(with.tensor[role].bytes() == got.tensor[role].bytes(), "tensor %d depends on the schedule", role);
}

void compare(const DecodeCase& problem, DecodeCall call, const char* kernel, Bytes& bytes) {
    const DecodeCall original = call;
    DecodeCall reference_call = call;
    const Outputs got(problem, call), reference(problem, reference_call);
    check_queries(call);
    run(reference_call, "decode_cpu_scalar", 0);
    compare_cache_write(problem, call, reference);
    DecodeCall without_schedule = call;
    without_schedule.given[kSchedule] = false;
    run(without_schedule, kernel, bytes.byte());
    check_schedule(problem, call, got, kernel);
    const Rounding rounding(problem.dtype);
    const ErrorBounds bounds(rounding, problem.magnitudes);
    compare_values_apart(problem, original, reference);
    compare_whole_keys(problem, original, reference, bounds);
    check_close(got.tensor[kDecodeOut], reference.tensor[kDecodeOut], rounding.u, bounds.o, "out");
    check_close(got.tensor[kDecodeLse], reference.tensor[kDecodeLse], rounding.sums, bounds.lse, "lse");
    for (const DecodeRole role : {kKCache, kVCache, kRopeCache, kKScale, kVScale})
        FUZZ_CHECK(got.tensor[role].bytes() == reference.tensor[role].bytes(), "caches or scales differ: tensor %d", role);
}

void refuse(DecodeCase& problem, DecodeCall call, Bytes& bytes) {
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

}  // namespace

void decode_target(Bytes& bytes) {
    static const std::vector<std::string> kernels = usable_kernels("decode");
    DecodeCase problem(bytes);
    const DecodeCall call = problem.call();
    if (bytes.chance(128)) return refuse(problem, call, bytes);
    compare(problem, call, pick_kernel(kernels, bytes), bytes);
}

}  // namespace fuzz
