// A problem for the backward kernels of sm90, or those of wide heads, that run on the host: the kernel, sizes and options of a
// case, its tensors with NaN wherever nothing may be read, the exact gradients, and what the kernels are launched with.
#pragma once

#include <random>
#include <vector>

#include "cuda/host/long_sums.h"
#include "cuda/host/tile_schedule.h"
#ifdef WIDE_HEADS
#include "cuda/sm90/backward_instance.h"
#include "cuda/sm90/backward_wide.cuh"
#else
#include "cuda/sm90/backward.cuh"
#endif
#include "numbers.h"

using namespace libflash;
using namespace libflash::cuda;

struct EmulatedKernel {
    static constexpr KernelConfig config{
        "backward", Operation::backward, "sm90", KernelType::DTYPE, HEAD_DIM, HEAD_DIM, BACKWARD_TILE, STAGES, ""};
};
using T = ElementOf<EmulatedKernel::config.dtype>;
#ifdef WIDE_HEADS
constexpr bool kWideHeads = true;
const auto launch_kernels = launch_backward_wide<EmulatedKernel>;
const auto resources_of_kernels = resources_of_backward_wide<EmulatedKernel>;
#else
constexpr bool kWideHeads = false;
const auto launch_kernels = launch_backward<EmulatedKernel>;
const auto resources_of_kernels = resources_of_backward<EmulatedKernel>;
#endif
constexpr bool kWide = EmulatedKernel::config.dtype == KernelType::bf16_;  // bf16 has the exponent range of float
constexpr double kRounding = kWide ? 0x1p-8 : 0x1p-11;

enum class Lengths { dense, used, packed };
// Block masks of 128 x 128 blocks: none; a random one as dense mask or as lists, different for each head, with a column of blocks
// that keeps no block; no block at all.
enum class Blocks { all, mask, lists, none };

struct Case {
    int batch, heads_q, heads_k, queries, keys, head_dim, head_dim_v;
    int left, right;  // of the window; kUnboundedWindow: none
    float size;       // of all inputs
    bool top_left, dlse;
    Lengths lengths = Lengths::dense;  // other than dense: lengths differ, and rows outside a sequence are NaN
    bool rare = false;                 // softcap, ALiBi, bias, mask and dropout
    Blocks blocks = Blocks::all;
    bool softcap = false;  // alone; only with wide heads

    bool is_packed() const { return lengths == Lengths::packed; }
    BackwardInstance kind() const { return backward_instance(rare, lengths != Lengths::dense, blocks != Blocks::all); }
    bool wants_dbias() const { return rare && !is_packed(); }
};

constexpr int64_t kThreadBlocks = 3;  // as if a GPU had so many multiprocessors

inline std::mt19937 generator(3);

// The sequences of one side: first row of each in all rows, allocated and used lengths. A packed tensor has more rows than its
// sequences.
struct Side {
    std::vector<int32_t> start, owned, length, cu;
    int rows = 0;

    Side(const Case& c, int count, int less) : cu(1, 0) {
        for (int b = 0; b < c.batch; ++b) {
            const int here = c.is_packed() && b > 0 ? count / (b + 1) - less : count;
            start.push_back(rows), owned.push_back(here);
            length.push_back(c.lengths == Lengths::used ? std::max(0, count - b * less) : here);
            cu.push_back(rows += here);
        }
        if (c.is_packed()) rows += 5;
    }
    LengthsParams params(const Case& c) const {
        if (c.is_packed()) return {cu.data(), nullptr, rows};
        return {nullptr, c.lengths == Lengths::used ? length.data() : nullptr, owned[0]};
    }
    Sequences sequences(const Case& c) const {
        Sequences sequences;
        sequences.capacity = sequences.max_length = params(c).capacity;
        sequences.cu = params(c).cu;
        return sequences;
    }
};
// In a packed tensor all rows of this sequence are NaN, and its results are not checked.
inline bool is_poisoned(const Case& c, int b) { return c.is_packed() && b == 1; }

// A tensor (row, head, channel) with NaN after the heads of each row, and with NaN rows outside the sequences.
struct Rows {
    static constexpr int kGap = 8;
    const Side* side;
    int heads, dim, stride;
    std::vector<T> x;
    std::vector<double> widened;       // x of an input
    std::vector<double> exact, sizes;  // sums of terms, and of their absolute values

    Rows(const Case& c, const Side& s, int head_count, int channels, float size)
        : side(&s), heads(head_count), dim(channels), stride(head_count * channels + kGap), x(size_t(s.rows) * stride, T(NAN)) {
        std::normal_distribution<float> normal;
        for (int b = 0; b < c.batch; ++b)
            for (int i = 0; i < s.length[b] && !is_poisoned(c, b); ++i)
                for (int j = 0; j < heads * dim; ++j) x[at(b, i, 0) + j] = T(size * normal(generator));
        widened = wide(x);
        exact.assign(x.size(), 0), sizes = exact;
    }
    // Adds factor * terms to the exact values of a row.
    void add(int batch, int i, int head, double factor, const double* terms, int count) {
        add_scaled(&exact[at(batch, i, head)], factor, terms, count);
        add_absolute(&sizes[at(batch, i, head)], factor, terms, count);
    }
    size_t at(int batch, int row, int head) const { return size_t(side->start[batch] + row) * stride + head * dim; }
    const double* row(int batch, int i, int head) const { return &widened[at(batch, i, head)]; }
    RowsParams params(const Case& c) { return {x.data(), c.is_packed() ? 0 : int64_t{side->owned[0]} * stride, stride, dim}; }
    void fill_with_nan() { std::fill(x.begin(), x.end(), T(NAN)); }
};

const DropoutParams kDropout = {1u << 30, 7, 9, 3, nullptr, 4.0f / 3, true};

// The blocks that are kept, as a mask (head, row, column) and as a list for each column.
struct KeptBlocks {
    int rows, cols;
    std::vector<uint8_t> mask;
    std::vector<int32_t> counts, indices;

    explicit KeptBlocks(const Case& c) : rows((c.queries + 127) / 128), cols((c.keys + 127) / 128) {
        mask.assign(size_t(c.heads_q) * rows * cols, 0), indices.assign(mask.size(), -1);
        for (int i = 0; i < c.heads_q * cols; ++i) {
            counts.push_back(0);
            for (int row = 0; row < rows; ++row) {
                if (c.blocks == Blocks::none || i % 5 == 2 || generator() % 2 == 0) continue;
                mask[(size_t(i / cols) * rows + row) * cols + i % cols] = 1;
                indices[i * rows + counts[i]++] = row;
            }
        }
    }
    bool keeps(int h, int i, int j) const { return mask[(size_t(h) * rows + i / 128) * cols + j / 128]; }
    BlockMaskParams params(Blocks kind) const {
        const int64_t per_head = int64_t{rows} * cols;
        if (kind == Blocks::all) return {};
        if (kind == Blocks::lists) return {nullptr, {}, counts.data(), indices.data(), {0, cols, 1}, {0, per_head, rows, 1}};
        return {mask.data(), {0, per_head, cols, 1}};
    }
};

struct Problem {
    Case c;
    double scale, cap = 9;
    Side queries, keys;
    KeptBlocks blocks;
    std::vector<float> bias, dbias, slopes;
    std::vector<T> rounded_bias;  // the same numbers in 16 bits
    std::vector<double> dbias_exact;
    std::vector<uint8_t> mask;  // (head, row, column), as the bias
    Rows q, k, v, out, dout, dq, dk, dv;
    std::vector<float> lse, dlse, sums, gradient_sums;
    BackwardParts parts;
    BackwardSplits split_tiles;
    std::vector<float> split_sums;
    std::vector<int32_t> split_counts;
    std::vector<SoftmaxStatistics> statistics;
    std::vector<int32_t> counters, first_units;
    int32_t next_work_tile = -1;
    BackwardParams params{};

    Problem(const Case& given, bool fixed_order, int splits)
        : c(given), scale(1 / std::sqrt(double(c.head_dim))), queries(c, c.queries, 37), keys(c, c.keys, 41), blocks(c),
          q(c, queries, c.heads_q, c.head_dim, c.size), k(c, keys, c.heads_k, c.head_dim, c.size),
          v(c, keys, c.heads_k, c.head_dim_v, c.size), out(c, queries, c.heads_q, c.head_dim_v, 0),
          dout(c, queries, c.heads_q, c.head_dim_v, c.size), dq(q), dk(k), dv(v) {
        for (Rows* x : {&dq, &dk, &dv}) x->fill_with_nan();
        for (int i = 0; i < c.heads_q * c.queries * c.keys && c.rare; ++i) {
            rounded_bias.push_back(from_float(std::normal_distribution<float>()(generator), T()));
            bias.push_back(to_float(rounded_bias.back()));
            mask.push_back(generator() % 8 != 0);
        }
        dbias.assign(bias.size(), NAN), dbias_exact.assign(bias.size(), 0);
        for (int h = 0; h < c.heads_q; ++h) slopes.push_back(0.01f * static_cast<float>(h + 1));
        lse.assign(size_t(queries.rows) * c.heads_q, NAN);
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < lse.size(); ++i) dlse.push_back(c.dlse ? normal(generator) : 0.0f);
        for (int b = 0; b < c.batch; ++b)
            for (int h = 0; h < c.heads_q; ++h)
                for (int i = 0; i < queries.length[b] && !is_poisoned(c, b); ++i) solve_row(b, h, i);
        fill_in(fixed_order);
        if (params.next_work_tile && parts.launches == 1 && splits > 1) split_key_tiles(splits);
    }

    size_t score_at(int h, int i, int j) const { return (size_t(h) * c.queries + i) * c.keys + j; }
    bool sees(int b, int h, int i, int j) const {
        const int64_t ahead = int64_t{j} - i - (c.top_left ? 0 : keys.length[b] - queries.length[b]);
        if (ahead > c.right || -ahead > c.left) return false;
        if (c.blocks != Blocks::all && !blocks.keeps(h, i, j)) return false;
        return !c.rare || mask[score_at(h, i, j)];
    }
    double capped(double score) const { return c.rare || c.softcap ? cap * std::tanh(score / cap) : score; }
    // What is added to a score after the softcap.
    double added(int b, int h, int i, int j) const {
        if (!c.rare) return 0;
        return bias[score_at(h, i, j)] - slopes[h] * std::abs(i + keys.length[b] - queries.length[b] - j);
    }
    // 0, or the factor of the probabilities that dropout keeps.
    double keep_factor(int b, int h, int i, int j) const {
        if (!c.rare) return 1;
        return is_kept(kDropout, b * c.heads_q + h, i, j) ? kDropout.keep_factor : 0;
    }

    void solve_row(int b, int h, int i) {
        const int kv_head = h / (c.heads_q / c.heads_k), length_k = keys.length[b];
        std::vector<double> s(length_k, -INFINITY), slope(length_k, 1);
        double largest = -INFINITY, sum = 0;
        for (int j = 0; j < length_k; ++j) {
            if (!sees(b, h, i, j)) continue;
            s[j] = capped(scale * dot(q.row(b, i, h), k.row(b, j, kv_head), c.head_dim));
            if (c.rare || c.softcap) slope[j] = 1 - s[j] * s[j] / cap / cap;
            s[j] += added(b, h, i, j);
            largest = std::max(largest, s[j]);
        }
        for (const double x : s) sum += x > -INFINITY ? std::exp(x - largest) : 0;
        const double log_sum = largest + std::log(sum);
        const size_t number = size_t(h) * queries.rows + queries.start[b] + i;
        lse[number] = sum > 0 ? static_cast<float>(log_sum) : -INFINITY;
        if (sum == 0) return;
        std::vector<double> p(length_k, 0), kept(length_k, 0);  // probabilities, before and after dropout
        for (int j = 0; j < length_k; ++j) {
            p[j] = std::exp(s[j] - log_sum);
            kept[j] = p[j] > 0 ? p[j] * keep_factor(b, h, i, j) : 0;
        }
        double* o = &out.exact[out.at(b, i, h)];
        for (int j = 0; j < length_k; ++j)
            if (kept[j] > 0) add_scaled(o, kept[j], v.row(b, j, kv_head), c.head_dim_v);
        // Backward gets the rounded output.
        double delta = -dlse[number];
        for (int x = 0; x < c.head_dim_v; ++x) {
            T& rounded = out.x[out.at(b, i, h) + x] = T(static_cast<float>(o[x]));
            delta += wide(rounded) * dout.row(b, i, h)[x];
        }
        for (int j = 0; j < length_k; ++j) {
            if (p[j] == 0) continue;
            const double dp = dot(dout.row(b, i, h), v.row(b, j, kv_head), c.head_dim_v), of_score = kept[j] * dp - p[j] * delta,
                         ds = of_score * slope[j];
            if (c.rare) dbias_exact[score_at(h, i, j)] += of_score;
            dq.add(b, i, h, scale * ds, k.row(b, j, kv_head), c.head_dim);
            dk.add(b, j, kv_head, scale * ds, q.row(b, i, h), c.head_dim);
            dv.add(b, j, kv_head, kept[j], dout.row(b, i, h), c.head_dim_v);
        }
    }

    void fill_in(bool fixed_order) {
        params.q = q.params(c), params.k = k.params(c), params.v = v.params(c), params.out = out.params(c);
        params.dout = dout.params(c), params.dq = dq.params(c), params.dk = dk.params(c), params.dv = dv.params(c);
        // (head, row of all sequences)
        const int64_t entry = c.is_packed() ? 0 : queries.owned[0];
        params.lse = {lse.data(), entry, 1, queries.rows};
        if (c.dlse) params.dlse = {dlse.data(), entry, 1, queries.rows};
        params.q_lengths = queries.params(c), params.k_lengths = keys.params(c);
        params.batch = c.batch, params.heads_q = c.heads_q, params.heads_k = c.heads_k, params.group_size = c.heads_q / c.heads_k;
        params.shard.heads_total = c.heads_q;
        params.head_dim = c.head_dim, params.head_dim_v = c.head_dim_v;
        params.softmax_scale = static_cast<float>(scale), params.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
        params.mask = {c.left, c.right, c.top_left};
        params.block_cols = blocks.params(c.blocks);
        params.rare.dropout.keep_factor = 1;
        if (c.softcap) params.rare.softcap = static_cast<float>(cap);
        if (c.rare) {
            const int64_t per_head = int64_t{c.queries} * c.keys;
            params.rare = {static_cast<float>(cap), {slopes.data(), 0, 1, true}};
            const bool is_float = c.lengths == Lengths::used;
            const void* const numbers = is_float ? static_cast<const void*>(bias.data()) : rounded_bias.data();
            params.rare.bias = {numbers, {0, per_head, c.keys, 1}, is_float};
            params.rare.mask = {mask.data(), {0, per_head, c.keys, 1}};
            params.rare.dropout = kDropout;
            if (c.wants_dbias()) params.dbias = {dbias.data(), {0, per_head, c.keys, 1}, {1, c.heads_q, c.queries, c.keys}, true};
        }
        params.vector_loads = params.vector_out = true;
        params.units = c.is_packed() ? queries.rows / kUnitRows + c.batch : (c.queries + kUnitRows - 1) / kUnitRows;
        statistics.assign(size_t(c.is_packed() ? 1 : c.batch) * c.heads_q * params.units * kUnitRows, {NAN, NAN});
        params.softmax_statistics = statistics.data();
        first_units.assign(c.batch, -1);
        params.first_units = first_units.data();
        if (!kWideHeads) {
            sums.assign(statistics.size() * HEAD_DIM, NAN);
            params.dq_accumulator = sums.data();
        }
        counters.assign(statistics.size() / EmulatedKernel::config.tile_q, -1);
        if (fixed_order) params.dq_counters = counters.data();
        parts = backward_parts(EmulatedKernel::config, queries.sequences(c).max_length, c.queries, params.group_size);
        if (parts.launches > 1) {
            parts.key_tiles = 2;
            gradient_sums.assign(2 * gradient_sums_bytes(EmulatedKernel::config.tile_k, HEAD_DIM) / sizeof(float) + 1, NAN);
            gradient_sums.back() = 7;  // a guard
            params.part.sums = gradient_sums.data();
        }
        // Reversed: what a thread block wrongly writes to the next sequence is not overwritten later.
        params.key_schedule =
            schedule_params(keys.sequences(c), c.batch, c.heads_k, EmulatedKernel::config.tile_k, 1e7, c.is_packed());
        params.query_schedule = schedule_params(queries.sequences(c), c.batch, c.heads_q, kUnitRows, 1e9, false);
        params.query_tile_schedule = schedule_params(queries.sequences(c), c.batch, c.heads_q, EmulatedKernel::config.tile_q, 1e7,
                                                     c.right < kUnboundedWindow);
        // Ascending also without a causal mask, unlike the plan.
        if (fixed_order) params.key_schedule.reversed = c.heads_q == c.heads_k || c.kind() != BackwardInstance::plain;
        if (!kWideHeads && blocks_of(params.query_schedule) > 0) params.next_work_tile = &next_work_tile;
    }

    // The second half of the key tiles.
    void split_key_tiles(int splits) {
        const int64_t tiles = blocks_of(params.key_schedule);
        split_tiles = {tiles / 2, splits};
        const int64_t count = tiles - split_tiles.first;
        split_counts.assign(count * split_counters(EmulatedKernel::config.tile_k), -1);
        split_sums.assign(count * splits * gradient_sums_bytes(EmulatedKernel::config.tile_k, HEAD_DIM) / sizeof(float) + 1, NAN);
        split_sums.back() = 7;  // a guard
        params.split_tiles = {static_cast<int32_t>(split_tiles.first), divisor_params(splits),
                              static_cast<int32_t>(split_counts.size()), split_counts.data(), split_sums.data()};
    }

    BackwardPlan plan() const {
        BackwardPlan plan;
        plan.instance.number = static_cast<int>(c.kind());
        const auto launch = [&](BackwardStep step, const ScheduleParams& schedule) {
            return launch_shape(blocks_of(schedule), resources_of_kernels(int(step), plan.instance.number));
        };
        plan.statistics = launch(BackwardStep::statistics, params.query_schedule);
        static int problems = 0;
        plan.divides_units = !kWideHeads && problems++ % 2 == 0;
        if (plan.divides_units) plan.statistics.blocks *= kStatisticsParts;
        plan.dk_dv = launch(BackwardStep::dk_dv, params.key_schedule);
        plan.key_tiles = plan.dk_dv.blocks;
        plan.split_tiles = split_tiles;
        if (!kWideHeads) plan.dk_dv.blocks = std::min(plan.work_tiles(), kThreadBlocks);
        plan.dynamic = params.next_work_tile != nullptr;
        plan.fixed_order = plan.dynamic && params.dq_counters;
        if (plan.fixed_order) plan.dq_counters = launch(BackwardStep::dq_counters, params.query_schedule);
        plan.parts = parts;
        if (kWideHeads)
            plan.dq = launch(BackwardStep::dq, params.query_tile_schedule);
        else
            plan.dq_conversion = launch(BackwardStep::dq_conversion, params.query_schedule);
        if (plan.divides_units) plan.dq_conversion.blocks *= dq_conversion_parts(EmulatedKernel::config.tile_q);
        return plan;
    }
};
