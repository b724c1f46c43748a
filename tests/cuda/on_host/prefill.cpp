// Runs a prefill kernel of sm90 on the host, with three multiprocessors (four where thread blocks work in pairs), and compares it
// with double precision: chunks of several lengths over a cache with pages or without, sequences that are left to the decode
// kernels, keys that do not fit, pages that do not exist, and NaN in all rows of the cache that hold no key. The argument is 0,
// or the seed of a disorder, as in forward_sm90.cpp. Prints the errors; exit code 0 means none is too large.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <random>

#include "cuda/host/tile_schedule.h"
#include "numbers.h"
#include "prefill_instances.h"

using namespace libflash;
using namespace libflash::cuda;

constexpr int kFewestRows = 64, kHeadsK = 2, kUnused = 3;
constexpr float kUntouched = 7;
using T = sm90::ForwardTraits<PrefillKernel, ForwardInstance::cache>::T;
constexpr double kRounding = PrefillKernel::config.dtype == KernelType::f16_ ? 0x1p-11 : 0x1p-8, kScale = 0.1;

// Query rows, new rows and cached keys of a sequence.
struct Sequence {
    int rows, news, cached;
};
struct Case {
    int page_size;  // 0: contiguous
    int group, capacity, head_dim;
    int left, right;
    float size;  // scale of q and k
    bool heads_first, sink;
    int absent;  // every n-th page or entry does not exist; 0: all do
    std::vector<Sequence> sequences;
    bool beside_decode = false;  // one of the thread blocks leaves its multiprocessor to decode

    int head_dim_v() const { return head_dim - (HEAD_DIM - HEAD_DIM_V); }
    int heads() const { return kHeadsK * group; }
    bool in_pairs() const { return prefill_has_pairs(PrefillKernel::config) && group % 2 == 0; }
    int multiprocessors() const { return in_pairs() ? 4 : 3; }
};

std::mt19937 generator(3);
template <class Number>
std::vector<Number> random(size_t count, float scale) {
    return random<Number>(count, scale, generator);
}

struct Problem {
    const Case& c;
    const int batch, rows_of_page, columns, pages;
    std::vector<int32_t> cu_q{0}, cu_new{0}, lengths, table, entries, sequence_order;
    int query_rows;
    std::vector<T> q, k, v, out;
    std::vector<double> q64, k64, v64;
    std::vector<float> lse, sink, long_sums;
    PrefillParams params{};
    PrefillPlan plan;

    explicit Problem(const Case& given)
        : c(given), batch(static_cast<int>(c.sequences.size())), rows_of_page(c.page_size ? c.page_size : c.capacity),
          columns(c.page_size ? (c.capacity + c.page_size - 1) / c.page_size : 1), pages(batch * columns + 2) {
        for (const Sequence& s : c.sequences) {
            cu_q.push_back(cu_q.back() + s.rows), cu_new.push_back(cu_new.back() + s.news);
            lengths.push_back(s.cached);
        }
        query_rows = cu_q.back() + kUnused;
        q = random<T>(size_t(query_rows) * c.heads() * c.head_dim, c.size);
        // With large scores in one head of each pair, the two thread blocks do not recompute the same rows.
        for (size_t i = 0; c.in_pairs() && i < q.size(); ++i)
            if (i / c.head_dim % 2 == 1) q[i] = T(float(q[i]) / c.size);
        out.assign(size_t(query_rows) * c.heads() * c.head_dim_v(), T(kUntouched));
        lse.assign(size_t(query_rows) * c.heads(), kUntouched);
        sink = random<float>(c.heads(), 1);
        for (int i = 0; i < batch * columns; ++i) table.push_back(pages - 1 - i);
        for (int i = 0; c.absent && i < batch * columns; i += c.absent) table[i] = i % 2 ? -1 : pages + i;
        for (int b = 0; b < batch; ++b) entries.push_back(table[b]);
        k.assign(size_t(pages) * rows_of_page * kHeadsK * c.head_dim, T(NAN));
        v.assign(size_t(pages) * rows_of_page * kHeadsK * c.head_dim_v(), T(NAN));
        for (int b = 0; b < batch; ++b) fill_sequence(b);
        q64 = wide(q), k64 = wide(k), v64 = wide(v);
        fill_in();
    }
    int length(int b) const { return c.sequences[b].cached + c.sequences[b].news; }
    int existing(int b) const { return std::min(length(b), c.capacity); }
    int shift(int b) const { return length(b) - c.sequences[b].rows; }
    int page_of(int b, int j) const { return table[b * columns + j / rows_of_page]; }
    bool has_page(int b, int j) const { return page_of(b, j) >= 0 && page_of(b, j) < pages; }
    bool seen_by_any(int b, int j) const { return j >= shift(b) - c.left; }
    int64_t row_stride(int dim) const { return c.heads_first ? dim : kHeadsK * dim; }
    int64_t head_stride(int dim) const { return c.heads_first ? int64_t{rows_of_page} * dim : dim; }
    template <class Number>
    Number* at(std::vector<Number>& x, int b, int j, int head, int dim) const {
        return &x[int64_t{page_of(b, j)} * rows_of_page * kHeadsK * dim + j % rows_of_page * row_stride(dim) +
                  head * head_stride(dim)];
    }
    // Pages before the window are stale: their entries name a page of NaN, or none.
    void fill_sequence(int b) {
        const int first_seen = std::max(0, shift(b) - c.left);
        for (int j = 0; j < existing(b); ++j)
            for (int h = 0; h < kHeadsK && has_page(b, j); ++h) {
                const std::vector<T> key = random<T>(c.head_dim, c.size), value = random<T>(c.head_dim_v(), 1);
                std::copy(key.begin(), key.end(), at(k, b, j, h, c.head_dim));
                std::copy(value.begin(), value.end(), at(v, b, j, h, c.head_dim_v()));
            }
        for (int column = 0; c.page_size && (column + 1) * c.page_size <= first_seen; ++column)
            table[b * columns + column] = column % 2 ? 0 : INT32_MAX;
    }

    void fill_in() {
        const auto rows = [&](std::vector<T>& x, int dim) { return RowsParams{x.data(), 0, int64_t{c.heads()} * dim, dim}; };
        const auto scattered = [&](std::vector<T>& x, int dim) {
            return RowsParams{x.data(), int64_t{rows_of_page} * kHeadsK * dim, row_stride(dim), head_stride(dim)};
        };
        params.q = rows(q, c.head_dim), params.out = rows(out, c.head_dim_v());
        params.lse = {lse.data(), 0, 1, query_rows};
        params.q_lengths = {cu_q.data(), nullptr, query_rows};
        params.news = {cu_new.data(), nullptr, cu_new.back()};
        params.batch = batch, params.heads_q = c.heads(), params.group_size = c.group;
        params.head_dim = c.head_dim, params.head_dim_v = c.head_dim_v();
        params.softmax_scale = static_cast<float>(kScale), params.scale_log2 = static_cast<float>(kScale * 1.4426950408889634);
        params.mask = {c.left, c.right, false};
        params.vector_out = params.vector_loads = true;
        params.rare.dropout.keep_factor = 1;
        if (c.sink) params.sink = {sink.data(), 0, 1, true};
        params.fewest_rows = kFewestRows;
        CacheParams& cache = params.cache;
        cache.k = scattered(k, c.head_dim), cache.v = scattered(v, c.head_dim_v());
        cache.seqlens = lengths.data(), cache.capacity = c.capacity, cache.pages = pages;
        if (c.page_size) {
            cache.table = table.data(), cache.table_batch = columns, cache.table_column = 1;
            cache.page_size = divisor_params(c.page_size);
        } else {
            cache.entries = entries.data();
        }
        make_plan();
    }
    void make_plan() {
        plan.tile_q = PrefillKernel::config.tile_q, plan.tile_k = PrefillKernel::config.tile_k;
        Sequences side;
        side.capacity = side.max_length = query_rows;
        side.cu = cu_q.data();
        params.schedule = schedule_params(side, batch, c.heads(), plan.tile_q, 1e3, c.right < kUnboundedWindow);
        const int64_t units = blocks_of(params.schedule);
        const auto resources = [&](ForwardStep step) { return resources_of_prefill<PrefillKernel>(int(step), 0); };
        plan.order = launch_shape(1, resources(ForwardStep::order));
        plan.attention = launch_shape(std::min<int64_t>(units, c.multiprocessors()), resources(ForwardStep::attention));
        sequence_order.assign(sequence_order_bytes(units) / sizeof(int32_t) + 1, 0x7ead7ead);  // the last is a guard
        params.sequence_order = sequence_order.data();
        params.blocks = static_cast<int>(plan.attention.blocks);
        params.in_pairs = c.in_pairs();
        // Beside decode one thread block or pair has no work. prefill_share() alone would leave none out on so few
        // multiprocessors.
        if (c.beside_decode) params.blocks -= 1 + params.in_pairs, params.multiprocessors = c.multiprocessors();
        if (!needs_long_sums(PrefillKernel::config, c.capacity)) return;
        const size_t bytes = plan.attention.blocks * long_sums_bytes(plan.tile_q, HEAD_DIM_V);
        long_sums.assign(bytes / sizeof(float) + 1, NAN);
        long_sums.back() = 7;
        params.long_sums = long_sums.data();
    }

    // Adds the squared errors of a row and the squares of its exact values.
    void check_row(int b, int h, int i, double& error, double& size, double& worst_lse) {
        const int dim = c.head_dim_v(), row = cu_q[b] + i, head_k = h / c.group;
        std::vector<double> s(existing(b), -INFINITY), o(dim, 0);
        double largest = c.sink ? double{sink[h]} : -INFINITY, sum = 0;
        for (int j = 0; j < existing(b); ++j) {
            const int64_t ahead = int64_t{j} - i - shift(b);
            if (ahead > c.right || -ahead > c.left || !has_page(b, j)) continue;
            const double* query = &q64[(size_t(row) * c.heads() + h) * c.head_dim];
            s[j] = kScale * dot(query, at(k64, b, j, head_k, c.head_dim), c.head_dim);
            largest = std::max(largest, s[j]);
        }
        if (c.sink) sum = std::exp(sink[h] - largest);
        for (int j = 0; j < existing(b); ++j) {
            if (s[j] == -INFINITY) continue;
            const double p = std::exp(s[j] - largest);
            sum += p;
            add_scaled(o.data(), p, at(v64, b, j, head_k, dim), dim);
        }
        const double wanted = largest + std::log(sum);
        const float got = lse[size_t(h) * query_rows + row];
        worst_lse = std::max(worst_lse, sum > 0 ? std::fabs(got - wanted) / (1 + std::fabs(wanted)) : got == -INFINITY ? 0 : 1e9);
        if (!(std::fabs(got) >= 0)) worst_lse = 1e9;
        for (int x = 0; x < dim; ++x) {
            const double exact = sum > 0 ? o[x] / sum : 0,
                         difference = float(out[(size_t(row) * c.heads() + h) * dim + x]) - exact;
            error += difference * difference;
            size += exact * exact;
        }
    }
    bool is_untouched(int row) const {
        const size_t numbers = size_t(c.heads()) * c.head_dim_v();
        for (size_t i = 0; i < numbers; ++i)
            if (float(out[row * numbers + i]) != kUntouched) return false;
        for (int h = 0; h < c.heads(); ++h)
            if (lse[size_t(h) * query_rows + row] != kUntouched) return false;
        return true;
    }
};

bool check(const Case& c) {
    Problem p(c);
    emulation::machine.most_resident = c.in_pairs() ? 4 : 1;
    launch_prefill<PrefillKernel>(p.plan, p.params, nullptr);
    double error = 0, size = 0, worst_lse = 0;
    bool others = p.sequence_order.back() == 0x7ead7ead && (p.long_sums.empty() || p.long_sums.back() == 7);
    for (int b = 0; b < p.batch; ++b)
        for (int i = 0; i < c.sequences[b].rows; ++i) {
            if (c.sequences[b].rows < kFewestRows) {
                others &= p.is_untouched(p.cu_q[b] + i);
            } else {
                for (int h = 0; h < c.heads(); ++h) p.check_row(b, h, i, error, size, worst_lse);
            }
        }
    for (int row = p.cu_q.back(); row < p.query_rows; ++row) others &= p.is_untouched(row);
    const double relative = size > 0 ? std::sqrt(error / size) : std::sqrt(error);
    const bool good = relative <= kRounding && worst_lse < 1e-4 && others;
    std::printf(
        "%s page %d group %d capacity %d dim %d window %d %d size %g absent %d blocks %d: relative error %.2e, lse %.1e, others "
        "%d\n",
        good ? "ok" : "WRONG", c.page_size, c.group, c.capacity, c.head_dim, c.left, c.right, c.size, c.absent,
        p.sequence_order[2], relative, worst_lse, others);
    return good;
}

int main(int, char** argv) {
    emulation::set_disorder(std::atoi(argv[1]));
    constexpr int kAll = kUnboundedWindow, kDim = HEAD_DIM;
    const std::vector<Sequence> mixed = {{1, 1, 200}, {130, 130, 70}, {0, 0, 50}, {63, 63, 100}, {64, 64, 0}, {257, 257, 33}};
    const Case cases[] = {
        {16, 1, 300, kDim, kAll, 0, 1, false, false, 0, mixed},
        {16, 1, 300, kDim, kAll, 0, 1, false, false, 0, mixed, true},
        {0, 2, 300, kDim, kAll, 0, 1, false, true, 0, mixed},
        {64, 2, 320, kDim - 8, kAll, 0, 1, true, true, 0, mixed},
        {48, 1, 336, kDim, kAll, kAll, 1, false, false, 0, {{200, 0, 301}, {100, 100, 7}}},
        {128, 1, 640, kDim, 90, 0, 1, true, true, 0, {{150, 150, 400}, {64, 64, 500}}},
        {16, 1, 640, kDim, 90, 0, 1, false, false, 0, {{150, 150, 400}, {64, 64, 500}, {3, 3, 600}}},
        {256, 1, 512, kDim, kAll, 0, 12, false, false, 0, {{300, 300, 200}}},  // overflow under a kept maximum
        {16, 1, 208, kDim, kAll, 0, 1, false, false, 0, {{100, 100, 150}, {70, 70, 208}, {80, 80, 500}}},  // what does not fit
        {16, 2, 400, kDim, kAll, 0, 1, false, true, 3, {{150, 150, 230}, {100, 100, 99}}},                 // absent pages
        {64, 1, 400, kDim, 200, 20, 1, true, false, 4, {{150, 150, 230}, {100, 60, 199}, {90, 0, 0}}},
        {0, 1, 200, kDim, kAll, 0, 1, false, false, 2, {{100, 100, 90}, {80, 80, 100}, {70, 70, -5}}},  // absent entries
        {32, 3, 700, kDim, kAll, 0, 1, true, false, 0, {{330, 330, 340}, {1, 1, 600}, {200, 200, 0}}},
        {32, 3, 700, kDim, 300, 0, 1, true, false, 0, {{330, 330, 340}, {1, 1, 600}, {9, 9, 600}, {200, 200, 0}}, true},
        {16, 4, 300, kDim, kAll, 0, 1, false, true, 0, {{130, 130, 70}, {257, 257, 33}, {64, 64, 0}}, true},
        {256, 2, 512, kDim, kAll, 0, 12, false, false, 0, {{300, 300, 200}}},  // overflow in one head of each pair
    };
    bool good = true;
    for (const Case& c : cases) good &= check(c);
    return good ? 0 : 1;
}
