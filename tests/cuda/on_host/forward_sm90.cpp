// Runs a forward kernel of sm90 on the host, with three multiprocessors, and compares it with double precision: several work
// tiles per thread block, rows without keys, warpgroups without rows, and scores that overflow with a kept maximum. The argument
// is 0, or the seed of a random order: warps are delayed, copies complete late and in any order, and products are computed when
// they are waited for. Prints the errors; exit code 0 means none is too large. With STATISTICS the kernel is the one with
// statistics of rows: 1, the largest scores of rows and the entropy; 2, the largest scores of heads; 3, the entropy alone. With
// WIDE_HEADS it is the one for more than 256 channels, which supports no block masks and, of the rare options, only softcap.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <random>

#include "cuda/attention/dropout.cuh"
#ifdef WIDE_HEADS
#include "cuda/sm90/forward_wide.cuh"
#else
#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/forward_statistics.cuh"
#endif
#include "numbers.h"
#include "static_schedule_cases.h"

using namespace libflash;
using namespace libflash::cuda;

constexpr int kMultiprocessors = 3;
#ifndef STATISTICS
#define STATISTICS 0
#endif
constexpr int kStatistics = STATISTICS;
struct EmulatedKernel {
    static constexpr KernelConfig config{
        "forward", Operation::forward, "sm90", KernelType::DTYPE, HEAD_DIM, HEAD_DIM_V, FORWARD_TILE, STAGES, "",
        "",        kStatistics != 0};
};
using T = ElementOf<EmulatedKernel::config.dtype>;
constexpr bool kWideHeads = EmulatedKernel::config.head_dim > 256;
constexpr bool kWide = EmulatedKernel::config.dtype == KernelType::bf16_;  // bf16 has the exponent range of float
constexpr double kRounding = EmulatedKernel::config.dtype == KernelType::f16_ ? 0x1p-11 : 0x1p-8;

// uneven: packed, with one long sequence, some short ones and many without rows.
enum class Lengths { dense, used, packed, uneven };
// Block masks of 128 x 128 blocks: none; a random one as dense mask or as lists, different for each head, with a row of blocks
// that keeps no block and one that keeps only the first; no block at all.
enum class Blocks { all, mask, lists, none };

struct Case {
    int batch, heads_q, heads_k, queries, keys, head_dim;
    int left, right;  // of the window; kUnboundedWindow: none
    // Scale of q and k. 0: all scores are 0 except one that is far larger; -1: the large score is smaller, but values are near
    // the largest float.
    float size;
    bool sink;
    Lengths lengths = Lengths::dense;  // other than dense: lengths differ, and rows outside a sequence are NaN
    bool rare = false;                 // softcap, ALiBi, bias, boolean mask and dropout
    Blocks blocks = Blocks::all;
    int percent = 50;  // of the blocks that are kept

    int head_dim_v() const { return head_dim - (HEAD_DIM - HEAD_DIM_V); }
    bool is_packed() const { return lengths == Lengths::packed || lengths == Lengths::uneven; }
};

std::mt19937 generator(3);
template <class Number>
std::vector<Number> random(size_t count, float scale) {
    return random<Number>(count, scale, generator);
}

// The sequences of one side: first row of each in all rows, allocated and used lengths.
struct Side {
    std::vector<int32_t> start, owned, length, cu;
    int rows = 0;

    Side(const Case& c, int count, int less) : cu(1, 0) {
        for (int b = 0; b < c.batch; ++b) {
            const int here = length_of(c, count, less, b);
            start.push_back(rows), owned.push_back(here);
            length.push_back(c.lengths == Lengths::used ? count - b * less : here);
            cu.push_back(rows += here);
        }
    }
    static int length_of(const Case& c, int count, int less, int b) {
        if (c.lengths == Lengths::uneven) return b == 7 ? count : b % 16 == 5 || b == 1 ? b % 20 + 1 : 0;
        return c.lengths == Lengths::packed && b > 0 ? count / (b + 1) - less : count;
    }
    LengthsParams params(const Case& c) const {
        if (c.is_packed()) return {cu.data(), nullptr, rows};
        return {nullptr, c.lengths == Lengths::used ? length.data() : nullptr, owned[0]};
    }
    // Visits the rows that no kernel may read: after the used length, and all rows of the second packed sequence, whose results
    // are not checked.
    template <class Visit>
    void for_hidden_rows(const Case& c, const Visit& visit) const {
        for (int b = 0; b < c.batch; ++b) {
            const bool poisoned = c.is_packed() && b == 1;
            for (int i = poisoned ? 0 : length[b]; i < owned[b]; ++i) visit(start[b] + i);
        }
    }
};

// The same dropout state by value and in memory.
constexpr DropoutParams kDropout = {1u << 30, 7, 9, 3, nullptr, 4.0f / 3, true};
constexpr uint64_t kState[2] = {7 | uint64_t{9} << 32, 3};

struct Problem {
    Case c;
    double scale, cap = 9;
    Side queries, keys;
    std::vector<T> q, k, v, out;
    std::vector<double> q64, k64, v64;
    std::vector<float> sink, lse, max_logit, entropy, head_maxima, bias, slopes;
    std::vector<T> rounded_bias;  // the same numbers in 16 bits
    std::vector<uint8_t> mask;    // (head, row, column); the rows of dense problems begin at multiples of 16 bytes
    int mask_row;
    mutable std::vector<double> head_maxima64;
    ForwardStatisticsParams params{};
    ForwardPlan plan;
    int block_rows, block_cols;
    std::vector<uint8_t> blocks;  // (head, row, column)
    std::vector<int32_t> counts, indices, sequence_order;
    std::vector<float> long_sums;

    explicit Problem(const Case& given)
        : c(given), scale(1 / std::sqrt(double(c.head_dim))), queries(c, c.queries, 5), keys(c, c.keys, 41) {
        q = random<T>(size_t(queries.rows) * c.heads_q * c.head_dim, c.size);
        k = random<T>(size_t(keys.rows) * c.heads_k * c.head_dim, c.size),
        v = random<T>(size_t(keys.rows) * c.heads_k * c.head_dim_v(), 1);
        sink = random<float>(c.heads_q, 1), lse.assign(size_t(c.heads_q) * queries.rows, NAN),
        out.assign(size_t(queries.rows) * c.heads_q * c.head_dim_v(), T(NAN));
        max_logit = entropy = lse, head_maxima.assign(c.heads_q, NAN), head_maxima64.assign(c.heads_q, -INFINITY);
        mask_row = c.lengths == Lengths::dense && c.blocks == Blocks::all ? (c.keys + 15) / 16 * 16 : c.keys;
        if (c.rare) make_options();
        if (c.size <= 0) one_large_score();
        choose_blocks();
        queries.for_hidden_rows(c, [&](int row) { fill_with_nan(q, row, c.heads_q * c.head_dim); });
        keys.for_hidden_rows(c, [&](int row) {
            fill_with_nan(k, row, c.heads_k * c.head_dim), fill_with_nan(v, row, c.heads_k * c.head_dim_v());
        });
        q64 = wide(q), k64 = wide(k), v64 = wide(v);
        fill_in();
    }
    void fill_with_nan(std::vector<T>& x, int row, int size) const { std::fill_n(x.begin() + int64_t{row} * size, size, T(NAN)); }
    void choose_blocks() {
        block_rows = (c.queries + 127) / 128, block_cols = (c.keys + 127) / 128;
        blocks.assign(size_t(c.heads_q) * block_rows * block_cols, 0), indices.assign(blocks.size(), -1);
        for (int row = 0; row < c.heads_q * block_rows; ++row) {
            counts.push_back(0);
            for (int col = 0; col < block_cols; ++col) {
                const bool there = row % 5 == 2 ? false : row % 5 == 3 ? col == 0 : int(generator() % 100) < c.percent;
                if (!there || c.blocks == Blocks::none) continue;
                blocks[row * block_cols + col] = 1;
                indices[row * block_cols + counts[row]++] = col;
            }
        }
        const int64_t per_head = int64_t{block_rows} * block_cols;
        if (c.blocks == Blocks::lists) {
            params.block_mask = {nullptr, {}, counts.data(), indices.data(), {0, block_rows, 1}, {0, per_head, block_cols, 1}};
        } else if (c.blocks != Blocks::all) {
            params.block_mask = {blocks.data(), {0, per_head, block_cols, 1}};
        }
    }
    bool left_out(int h, int i, int j) const {
        if (c.rare && !kWideHeads && !mask[(size_t(h) * c.queries + i) * mask_row + j]) return true;
        return c.blocks != Blocks::all && !blocks[(size_t(h) * block_rows + i / 128) * block_cols + j / 128];
    }
    void one_large_score() {
        for (T& x : q) x = T(0.0f);
        for (T& x : k) x = T(0.0f);
        for (size_t i = 0; i < q.size(); i += c.head_dim) q[i] = T(8.0f);
        // Size 0: the difference of scores is nearly the largest exponent of a float. Size -1: a smaller difference, with large
        // values.
        k[5 * c.head_dim] = T(static_cast<float>((c.size == 0 ? 88 : 9) / (8 * scale)));
        if (c.size < 0 && kWide)
            for (T& x : v) x = T(1e35f * float(x));
    }

    void fill_in() {
        const auto rows = [&](std::vector<T>& x, const Side& side, int heads, int dim) {
            const int64_t row = int64_t{heads} * dim;
            return RowsParams{x.data(), c.is_packed() ? 0 : side.owned[0] * row, row, dim};
        };
        params.q = rows(q, queries, c.heads_q, c.head_dim), params.out = rows(out, queries, c.heads_q, c.head_dim_v());
        params.k = rows(k, keys, c.heads_k, c.head_dim), params.v = rows(v, keys, c.heads_k, c.head_dim_v());
        // (head, row of all sequences)
        params.lse = {lse.data(), c.is_packed() ? 0 : queries.owned[0], 1, queries.rows};
        if (kStatistics == 1 || kStatistics == 3) params.entropy = params.lse, params.entropy.data = entropy.data();
        if (kStatistics == 1) params.max_logit = params.lse, params.max_logit.data = max_logit.data();
        if (kStatistics == 2) params.head_maxima = head_maxima.data(), params.head_maxima_stride = 1;
        params.q_lengths = queries.params(c), params.k_lengths = keys.params(c);
        params.batch = c.batch, params.heads_q = c.heads_q, params.group_size = c.heads_q / c.heads_k;
        params.head_dim = c.head_dim, params.head_dim_v = c.head_dim_v();
        params.softmax_scale = static_cast<float>(scale), params.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
        params.mask = {c.left, c.right, false};
        params.vector_out = c.head_dim_v() % 8 == 0;
        params.rare.dropout.keep_factor = 1;
        if (c.sink) params.sink = {sink.data(), 0, 1, true};
        if (c.rare) params.rare.softcap = static_cast<float>(cap);
        if (c.rare && !kWideHeads) {
            const void* const numbers = c.is_packed() ? static_cast<const void*>(bias.data()) : rounded_bias.data();
            params.rare.bias = {numbers, {0, int64_t{c.queries} * c.keys, c.keys, 1}, c.is_packed()};
            params.rare.mask = {mask.data(), {0, int64_t{c.queries} * mask_row, mask_row, 1}};
            params.rare.alibi_slopes = {slopes.data(), 0, 1, true};
            params.rare.dropout = c.is_packed() ? DropoutParams{1u << 30, 0, 0, 0, kState, 4.0f / 3, true} : kDropout;
        }
        Sequences side;
        side.capacity = params.q_lengths.capacity;
        side.max_length = c.queries;
        side.cu = params.q_lengths.cu;
        make_plan(side);
    }
    void make_options() {
        for (float x : random<float>(size_t(c.heads_q) * c.queries * c.keys, 1)) {
            rounded_bias.push_back(from_float(x, T()));
            bias.push_back(to_float(rounded_bias.back()));
        }
        for (int64_t i = 0; i < int64_t{c.heads_q} * c.queries * mask_row; ++i) mask.push_back(generator() % 4 ? i % 255 + 1 : 0);
        for (int h = 0; h < c.heads_q; ++h) slopes.push_back(0.01f * (h + 1));
    }
    void make_long_sums(int tile) {
        const int64_t blocks = plan.blocks_at_once ? std::min(plan.attention.blocks, plan.blocks_at_once) : plan.attention.blocks;
        const size_t bytes = blocks * long_sums_bytes(tile, HEAD_DIM_V);
        long_sums.assign(bytes / sizeof(float) + 1, NAN);  // the last element is a guard
        long_sums.back() = 7;
        params.long_sums = long_sums.data();
    }

#ifdef WIDE_HEADS
    void make_plan(const Sequences& side) {
        const int tile = EmulatedKernel::config.tile_q;
        params.schedule = schedule_params(side, c.batch, c.heads_q, tile, 1e3, c.right < kUnboundedWindow);
        plan.attention = launch_shape(blocks_of(params.schedule), resources_of_forward_wide<EmulatedKernel>(0, 0));
        if (c.keys <= most_keys_of_accumulators(EmulatedKernel::config)) return;
        plan.blocks_at_once = kMultiprocessors;
        make_long_sums(tile);
    }
#else
    void make_plan(const Sequences& side) {
        const bool too_many = forward_has_long_sums(EmulatedKernel::config) &&
                              c.keys > most_keys_of_accumulators(EmulatedKernel::config),
                   block_mask = c.blocks != Blocks::all || (!c.rare && too_many), lengths_on_device = c.lengths != Lengths::dense;
        const bool causal = c.right < kUnboundedWindow, unequal = lengths_on_device || block_mask;
        const bool paired = causal && !unequal;
        ForwardInstance kind = kStatistics ? forward_statistics_instance(unequal, params.entropy.data)
                                           : forward_instance(EmulatedKernel::config, c.rare, lengths_on_device, block_mask);
        static int plain_problems = 0;
        if (kind == ForwardInstance::plain && has_narrow_instance(EmulatedKernel::config) && plain_problems++ % 2 == 1)
            kind = ForwardInstance::narrow;
        const int tile = forward_tile_q(EmulatedKernel::config, kind);
        const double head_bytes = paired ? kL2Bytes : 1e3;  // pairs: groups of one head
        params.schedule = schedule_params(side, c.batch, c.heads_q, tile * (paired ? 2 : 1), head_bytes, causal && !paired);
        params.schedule.paired = paired;
        const int64_t units = blocks_of(params.schedule);
        const auto resources = [&](ForwardStep step) {
            if constexpr (kStatistics) return resources_of_forward_statistics<EmulatedKernel>(int(step), plan.instance.number);
            return resources_of_forward<EmulatedKernel>(int(step), plan.instance.number);
        };
        if (params.head_maxima) plan.head_maxima = launch_shape(1, resources(ForwardStep::head_maxima));
        plan.instance.number = int(kind);
        const int64_t blocks = make_static_schedule(params.schedule, side.capacity, tile, kMultiprocessors);
        plan.attention =
            launch_shape(unequal ? std::min<int64_t>(units, kMultiprocessors) : blocks, resources(ForwardStep::attention));
        if (forward_has_long_sums(EmulatedKernel::config, kind) && needs_long_sums(EmulatedKernel::config, c.keys)) {
            make_long_sums(tile);
        }
        if (!unequal) return;
        plan.order = launch_shape(1, resources(ForwardStep::order));
        sequence_order.assign(sequence_order_bytes(units) / sizeof(int32_t) + 1,
                              0x7ead7ead);  // the last element is a guard after the workspace
        params.sequence_order = sequence_order.data();
    }
#endif

    double score(int b, int h, int i, int j) const {
        const double sum = dot(&q64[(size_t(queries.start[b] + i) * c.heads_q + h) * c.head_dim],
                               &k64[(size_t(keys.start[b] + j) * c.heads_k + h / params.group_size) * c.head_dim], c.head_dim);
        if (!c.rare) return sum * scale;
        const double capped = cap * std::tanh(sum * scale / cap);
        if (kWideHeads) return capped;
        const int distance = i + keys.length[b] - queries.length[b] - j;
        return capped - slopes[h] * std::abs(distance) + bias[(size_t(h) * c.queries + i) * c.keys + j];
    }
    bool kept(int b, int h, int i, int j) const {
        if (!c.rare || kWideHeads) return true;
        return is_kept(kDropout, b * c.heads_q + h, i, j);
    }

    // Adds the squared errors of a row and the squares of its exact values.
    void check_row(int b, int h, int i, RelativeError& error, double& worst_lse, double& worst_statistic) const {
        const int dim = c.head_dim_v(), length_k = keys.length[b], shift = length_k - queries.length[b];
        std::vector<double> s(length_k, -INFINITY), o(dim, 0);
        double largest = c.sink ? double{sink[h]} : -INFINITY, sum = 0;
        const bool exists = i < queries.length[b];
        for (int j = 0; exists && j < length_k; ++j) {
            const int64_t ahead = int64_t{j} - i - shift;
            if (ahead > c.right || -ahead > c.left || left_out(h, i, j)) continue;
            s[j] = score(b, h, i, j);
            largest = std::max(largest, s[j]);
        }
        if (c.sink) sum = std::exp(sink[h] - largest);
        for (int j = 0; j < length_k && largest > -INFINITY; ++j) {
            const double p = std::exp(s[j] - largest);
            sum += p;
            const double* value = &v64[(size_t(keys.start[b] + j) * c.heads_k + h / params.group_size) * dim];
            if (p > 0 && kept(b, h, i, j)) add_scaled(o.data(), p * params.rare.dropout.keep_factor, value, dim);
        }
        const bool sees = exists && sum > 0;
        const size_t of_row = size_t(h) * queries.rows + queries.start[b] + i;
        const float got = lse[of_row];
        const double wanted = largest + std::log(sum);
        worst_lse = std::max(worst_lse, sees ? std::fabs(got - wanted) / (1 + std::fabs(wanted)) : got == -INFINITY ? 0.0 : 1e9);
        if (!(std::fabs(got) >= 0)) worst_lse = 1e9;
        if (kStatistics) check_statistics(s, exists, h, sees ? wanted : -INFINITY, of_row, worst_statistic);
        for (int x = 0; x < dim; ++x) {
            error.add(float(out[(size_t(queries.start[b] + i) * c.heads_q + h) * dim + x]), sees ? o[x] / sum : 0);
        }
    }

    // `at`: of the row in lse.
    void check_statistics(const std::vector<double>& s, bool exists, int head, double log_sum, size_t at, double& worst) const {
        double largest = -INFINITY, mean = 0;
        const auto add = [&](double score) {
            const double p = std::exp(score - log_sum);
            if (p > 0) mean += p * (score - log_sum);
        };
        for (double x : s) largest = std::max(largest, x);
        head_maxima64[head] = std::max(head_maxima64[head], largest);
        if (exists && log_sum > -INFINITY) {
            for (double x : s) add(x);
            if (c.sink) add(sink[head]);
        }
        const auto compare = [&](double got, double wanted) {
            if (got == wanted) return;
            worst = larger_error(worst, std::isfinite(wanted) ? std::fabs(got - wanted) / (1 + std::fabs(wanted)) : NAN);
        };
        if (kStatistics == 1) compare(max_logit[at], largest);
        if (kStatistics == 1 || kStatistics == 3) compare(entropy[at], -mean);
    }
    void check_head_maxima(double& worst) const {
        for (int h = 0; h < c.heads_q && kStatistics == 2 && !c.is_packed(); ++h) {
            const double got = head_maxima[h], wanted = head_maxima64[h];
            if (got != wanted)
                worst = larger_error(worst, std::isfinite(wanted) ? std::fabs(got - wanted) / (1 + std::fabs(wanted)) : NAN);
        }
    }
};

#ifdef WIDE_HEADS
void launch(const Problem& p) { launch_forward_wide<EmulatedKernel>(p.plan, p.params, nullptr); }
#else
void launch(const Problem& p) {
    if constexpr (kStatistics) {
        launch_forward_statistics<EmulatedKernel>(p.plan, p.params, nullptr);
    } else {
        launch_forward<EmulatedKernel>(p.plan, p.params, nullptr);
    }
}
#endif

bool check(const Case& c) {
    if ((kStatistics && c.rare) || (kWideHeads && c.blocks != Blocks::all)) return true;  // the kernel does not support them
    Problem p(c);
    launch(p);
    RelativeError error;
    double worst_lse = 0, worst_statistic = 0;
    for (int b = 0; b < c.batch; ++b)
        for (int h = 0; h < c.heads_q && !(c.is_packed() && b == 1); ++h)
            for (int i = 0; i < p.queries.owned[b]; ++i) p.check_row(b, h, i, error, worst_lse, worst_statistic);
    p.check_head_maxima(worst_statistic);
    const double relative = error.value();
    const bool good = relative <= kRounding && worst_lse < 1e-4 && worst_statistic < 1e-4 &&
                      (p.sequence_order.empty() || p.sequence_order.back() == 0x7ead7ead) &&
                      (p.long_sums.empty() || p.long_sums.back() == 7);
    std::printf(
        "%s %d x %d heads %d/%d keys %d dim %d window %d %d size %g lengths %d rare %d blocks %d: relative error %.2e, lse "
        "%.1e, statistics %.1e\n",
        good ? "ok" : "WRONG", c.batch, c.queries, c.heads_q, c.heads_k, c.keys, c.head_dim, c.left, c.right, c.size,
        static_cast<int>(c.lengths), c.rare, static_cast<int>(c.blocks), relative, worst_lse, worst_statistic);
    return good;
}

int main(int, char** argv) {
    emulation::set_random_order(std::atoi(argv[1]));
    constexpr int kAll = kUnboundedWindow, kDim = HEAD_DIM;
    const Case cases[] = {
        {1, 1, 1, 64, 100, kDim, kAll, kAll, 1, false},    // one work tile, partial tiles
        {1, 2, 1, 300, 333, kDim, kAll, 0, 1, true},       // causal; warpgroups without rows
        {2, 2, 2, 200, 70, kDim, kAll, 0, 1, false},       // rows and whole tiles without keys
        {1, 1, 1, 520, 520, kDim - 8, 100, 0, 1, false},   // a window, more work tiles than multiprocessors
        {1, 2, 1, 150, 700, kDim, kAll, kAll, 12, false},  // scores that overflow with a kept maximum
        {1, 1, 1, 400, 400, kDim, kAll, 0, 12, true},      // the same, causal
        {1, 1, 1, 64, 300, kDim, kAll, kAll, 0, false},    // one score that nearly overflows
        {1, 1, 1, 3, 0, kDim, kAll, kAll, 1, true},        // no keys at all
        {2, 4, 2, 400, 60, kDim, kAll, kAll, 1, false},    // many work tiles of one key tile
        {2, 4, 4, 260, 200, kDim, 40, 0, 12, false},       // the same with a window, and overflow
        {1, 1, 1, 64, 300, kDim, kAll, kAll, -1, false},   // values that overflow under a kept maximum
        {3, 2, 1, 150, 300, kDim, kAll, kAll, 1, false, Lengths::used},
        {3, 2, 1, 230, 200, kDim, 100, 0, 1, true, Lengths::used},
        {3, 2, 1, 10, 300, kDim, kAll, kAll, 1, true, Lengths::used},  // a sequence with a used length of 0
        {4, 2, 1, 300, 280, kDim, kAll, kAll, 1, true, Lengths::packed},
        {4, 2, 2, 250, 333, kDim, kAll, 0, 12, false, Lengths::packed},
        {1, 2, 1, 150, 200, kDim - 8, 120, 0, 1, true, Lengths::dense, true},
        {3, 2, 1, 100, 150, kDim, kAll, kAll, 3, false, Lengths::packed, true},
        {1, 2, 1, 500, 800, kDim, kAll, kAll, 1, true, Lengths::dense, false, Blocks::mask},
        {1, 2, 2, 600, 600, kDim, kAll, 0, 1, false, Lengths::dense, false, Blocks::lists},
        {1, 1, 1, 130, 5000, kDim, kAll, kAll, 1, false, Lengths::dense, false, Blocks::lists, 10},
        {1, 1, 1, 130, 5000, kDim, 4600, kAll, 1, true, Lengths::dense, false, Blocks::mask, 10},
        {3, 2, 1, 450, 500, kDim, 300, 0, 1, true, Lengths::packed, false, Blocks::mask, 70},
        {2, 1, 1, 400, 500, kDim, kAll, kAll, 12, false, Lengths::used, false, Blocks::lists},
        {2, 1, 1, 300, 300, kDim, kAll, 0, 1, true, Lengths::dense, false, Blocks::none},
        {40, 2, 1, 400, 300, kDim, kAll, 0, 1, true, Lengths::uneven},
        {530, 1, 1, 300, 300, kDim, kAll, kAll, 3, false, Lengths::uneven},
        {1, 6, 2, 600, 150, kDim, kAll, 100, 12, false, Lengths::used},  // more recomputations than the list can hold
        {1, 2, 1, 400, 500, kDim, kAll, 50, 1, true, Lengths::dense, true, Blocks::lists},
        {2, 2, 1, 260, 900, kDim, kAll, kAll, 12, false},  // warpgroups without rows, many key tiles, overflow
        {1, 2, 2, 640, 640, kDim, kAll, 0, 1, true},       // the same, causal
        {4, 2, 1, 450, 800, kDim, kAll, 0, 1, true, Lengths::packed},
    };
    bool good = true;
    for (const Case& c : cases) good &= check(c);
    const Case narrower[] = {
        {1, 2, 1, 130, 300, kDim - 200, kAll, 0, 1, true},
        {3, 2, 1, 100, 200, kDim - 480, kAll, kAll, 3, false, Lengths::packed},  // one chunk of K
    };
    for (const Case& c : narrower) good &= !kWideHeads || check(c);
    return good ? 0 : 1;
}
