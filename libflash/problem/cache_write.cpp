#include "problem/cache_write.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "problem/build.h"
#include "problem/cache_parts.h"
#include "problem/options.h"

namespace libflash {

static_assert(sizeof(flash_cache_write_options_t) == 88, "version 1 of the options of flash_cache_write");

namespace {

struct WriteTensors {
    TensorView k_scale, v_scale, positions;
};

WriteTensors read_write_tensors(CacheWriteProblem& p, Reader& reader, const flash_cache_write_options_t& options) {
    const auto scale_role = [](const flash_tensor_t* scale) { return scale && scale->ndim > 2 ? kWritten : kRead; };
    WriteTensors tensors;
    tensors.k_scale = reader.optional(options.k_scale, "k_scale", scale_role(options.k_scale));
    tensors.v_scale = reader.optional(options.v_scale, "v_scale", scale_role(options.v_scale));
    p.cache.k_rope = reader.optional(options.k_rope_cache, "k_rope_cache", kContiguousRows | kWritten);
    p.k_rope_new = reader.optional(options.k_rope_new, "k_rope_new", kContiguousRows);
    p.rotary_cos = reader.optional(options.rotary_cos, "rotary_cos", kContiguousRows);
    p.rotary_sin = reader.optional(options.rotary_sin, "rotary_sin", kContiguousRows);
    tensors.positions = reader.optional(options.positions, "positions");
    if (p.v_new.present != p.cache.v.present) {
        invalid(p.v_new.present ? "v_cache" : "v_new", "v_new and v_cache are given together or not at all", "it is missing");
    }
    if (p.k_rope_new.present != p.cache.k_rope.present) {
        invalid(p.k_rope_new.present ? "k_rope_cache" : "k_rope_new",
                "k_rope_cache and k_rope_new are given together or not at all", "it is missing");
    }
    check_rotary_given(p.rotary_cos, p.rotary_sin);
    if (p.rotary_cos.present && !tensors.positions.present) {
        invalid("positions", "is required with rotary_cos and rotary_sin: a slot does not say where a row stands", "NULL");
    }
    if (tensors.positions.present && !p.rotary_cos.present) {
        invalid("positions", "needs rotary_cos and rotary_sin: only the rotary embedding uses the positions of rows",
                "there are none");
    }
    return tensors;
}

void build_write_sizes(CacheWriteProblem& p) {
    p.device = p.k_new.device;
    p.dtype = p.k_new.dtype;
    check_float(p.k_new, "k_new");
    check_ndim(p.k_new, "k_new", 3, "(rows, heads_k, channels of k_cache)");
    p.rows = p.k_new.shape[0];
    check_device(p.cache.k, "k_cache", p.device);
    if (p.cache.v.present) check_device(p.cache.v, "v_cache", p.device);
    check_cache_types(p.cache, p.dtype, "k_new");
    check_ndim(p.cache.k, "k_cache", 4, "(entries or pages, rows, heads_k, channels)");
    p.heads_k = p.cache.k.shape[2];
    check_shape(p.k_new, "k_new", {p.rows, p.heads_k, p.cache.k.shape[3]}, "(rows, heads_k, channels of k_cache)");
}

// Checks that a cache of values or rope parts has as many entries or pages, rows and heads as the cache of keys.
void check_part(const CacheWriteProblem& p, const TensorView& cache, const char* cache_name, const TensorView& rows,
                const char* rows_name) {
    check_ndim(cache, cache_name, 4, "those of k_cache");
    check_shape(cache, cache_name, {p.cache_blocks(), p.cache_block_rows(), p.heads_k, cache.shape[3]},
                "that of k_cache, but for channels");
    check_device(rows, rows_name, p.device);
    check_dtype(rows, rows_name, p.dtype);
    check_shape(rows, rows_name, {p.rows, p.heads_k, cache.shape[3]}, "that of k_new, with the channels of its cache");
}

CacheScale build_write_scale(const CacheWriteProblem& p, const TensorView& view, const char* name, int64_t channels) {
    if (view.ndim == 2) {
        invalid(name, "must have 1, 3 or 4 dimensions: a slot does not say to which sequence a row belongs", "shape ",
                Sizes{view.shape, view.ndim});
    }
    return build_cache_scale(view, name, {1, p.cache_blocks(), p.cache_block_rows(), p.heads_k, channels}, p.device);
}

void build_write_scales(CacheWriteProblem& p, const WriteTensors& tensors) {
    if (tensors.k_scale.present) {
        p.cache.k_scale = build_write_scale(p, tensors.k_scale, "k_scale", p.cache.k.shape[3]);
    }
    check_scale_given(p.cache, p.cache.k_scale, "k_scale", true);
    if (tensors.v_scale.present) {
        if (!p.cache.v.present) invalid("v_scale", "needs v_cache", "there is none");
        p.cache.v_scale = build_write_scale(p, tensors.v_scale, "v_scale", p.cache.v.shape[3]);
    }
    if (p.cache.v.present) check_scale_given(p.cache, p.cache.v_scale, "v_scale", true);
}

void check_slots(const CacheWriteProblem& p) {
    check_device(p.slots, "slots", p.device);
    if (p.slots.dtype != DType::i32 && p.slots.dtype != DType::i64) {
        invalid("slots", "dtype must be int32 or int64", "it is ", p.slots.dtype);
    }
    check_shape(p.slots, "slots", {p.rows}, "(rows of k_new,)");
    check_contiguous(p.slots, "slots");
}

void build_positions(CacheWriteProblem& p, const TensorView& positions) {
    check_device(positions, "positions", p.device);
    check_dtype(positions, "positions", DType::i32);
    check_shape(positions, "positions", {p.rows}, "(rows of k_new,)");
    check_contiguous(positions, "positions");
    p.positions = static_cast<const int32_t*>(positions.data);
}

void check_slot_contents(const CacheWriteProblem& p) {
    std::vector<std::pair<int64_t, int64_t>> written;
    for (int64_t row = 0; row < p.rows; ++row)
        if (p.writes(row)) written.emplace_back(p.slot(row), row);
    std::sort(written.begin(), written.end());
    for (size_t i = 1; i < written.size(); ++i) {
        if (written[i - 1].first == written[i].first) {
            invalid("slots", "two rows must not be written to the same slot", "rows ", written[i - 1].second, " and ",
                    written[i].second, ", slot ", written[i].first);
        }
    }
    for (const auto& [slot, row] : written) {
        if (!p.rotary_cos.present) return;
        if (p.positions[row] < 0 || p.positions[row] >= p.rotary_cos.shape[0]) {
            invalid("positions", "must be at least 0 and below the rows of rotary_cos", "row ", row, " has ", p.positions[row],
                    ", there are ", p.rotary_cos.shape[0]);
        }
    }
}

}  // namespace

CacheWriteProblem make_cache_write_problem(const flash_tensor_t* k_new, const flash_tensor_t* v_new,
                                           const flash_tensor_t* k_cache, const flash_tensor_t* v_cache,
                                           const flash_tensor_t* slots, const flash_cache_write_options_t* given,
                                           Reading reading) {
    CacheWriteProblem problem;
    const flash_cache_write_options_t options = read_options(given, sizeof(flash_cache_write_options_t));
    check_flags(options.flags, FLASH_FLAG_ROTARY_INTERLEAVED);
    problem.rotary_interleaved = (options.flags & FLASH_FLAG_ROTARY_INTERLEAVED) != 0;
    read_request(problem.request, options);
    check_reserved(options.reserved);

    Reader reader(reading);
    problem.k_new = reader.required(k_new, "k_new", kContiguousRows);
    problem.v_new = reader.optional(v_new, "v_new", kContiguousRows);
    problem.cache.k = reader.required(k_cache, "k_cache", kContiguousRows | kWritten);
    problem.cache.v = reader.optional(v_cache, "v_cache", kContiguousRows | kWritten);
    problem.slots = reader.required(slots, "slots");
    const WriteTensors tensors = read_write_tensors(problem, reader, options);

    build_write_sizes(problem);
    if (problem.cache.v.present) check_part(problem, problem.cache.v, "v_cache", problem.v_new, "v_new");
    check_slots(problem);
    build_write_scales(problem, tensors);
    if (problem.cache.k_rope.present) {
        check_device(problem.cache.k_rope, "k_rope_cache", problem.device);
        check_dtype(problem.cache.k_rope, "k_rope_cache", problem.dtype);
        check_part(problem, problem.cache.k_rope, "k_rope_cache", problem.k_rope_new, "k_rope_new");
    }
    if (problem.rotary_cos.present) {
        check_rotary_tables(problem.rotary_cos, problem.rotary_sin, problem.cache, problem.dtype, problem.device);
    }
    if (tensors.positions.present) build_positions(problem, tensors.positions);
    if (reader.may_read_data(problem.device)) check_slot_contents(problem);
    reader.check_overlap();
    return problem;
}

}  // namespace libflash
