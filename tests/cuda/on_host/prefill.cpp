// Runs a prefill kernel of sm90 on the host, with three multiprocessors (four where thread blocks work in pairs), and compares it
// with double precision: chunks of several lengths over a cache with pages or without, sequences that are left to the decode
// kernels, keys that do not fit, pages that do not exist, and NaN in all rows of the cache that hold no key. Caches that the
// kernel copies (forward_copy_warpgroup.cuh) or converts (forward_code_converter.cuh): pages of any size, scales, and codes,
// which must give the bits of a cache with their values. A schedule, which an earlier call has written, must give the same bits;
// one of any numbers must do no harm. The arguments are the kind of cases (0: loaded by TMA, 1: copied) and 0 or the seed of a
// random order, as in forward_sm90.cpp. Prints the errors; exit code 0 means none is too large.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "cpu/quantize.h"
#include "cuda/host/tile_schedule.h"
#include "numbers.h"
#include "prefill_instances.h"

using namespace libflash;
using namespace libflash::cuda;

constexpr int kFewestRows = 64, kHeadsK = 2, kUnused = 3;
constexpr float kUntouched = 7;
using T = sm90::ForwardTraits<PrefillKernel, ForwardInstance::cache>::T;
constexpr double kRounding = PrefillKernel::config.dtype == KernelType::f16_ ? 0x1p-11 : 0x1p-8, kScale = 0.1;

enum class Scales { none, heads, rows };  // of each sequence and key head, or of each row and key head

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
    CodeType code = CodeType::none;
    Scales scales = Scales::none;

    int head_dim_v() const { return head_dim - (HEAD_DIM - HEAD_DIM_V); }
    int heads() const { return kHeadsK * group; }
    bool copied() const { return code != CodeType::none || scales != Scales::none || page_size % 16 != 0; }
    ForwardInstance instance() const {
        if (!copied()) return ForwardInstance::cache;
        return code != CodeType::none && page_size % kCachedUnit == 0 ? ForwardInstance::codes : ForwardInstance::copied;
    }
    bool in_pairs() const { return !copied() && prefill_has_pairs(PrefillKernel::config) && group % 2 == 0; }
    int multiprocessors() const { return in_pairs() ? 4 : 3; }
};

std::mt19937 generator(3);
template <class Number>
std::vector<Number> random(size_t count, float scale) {
    return random<Number>(count, scale, generator);
}

float value_of(uint8_t bits, CodeType code) {
    if (code == CodeType::e4m3) return cpu::widen(cpu::e4m3{bits});
    return code == CodeType::e5m2 ? cpu::widen(cpu::e5m2{bits}) : static_cast<float>(static_cast<int8_t>(bits));
}
// A finite code, for e4m3 and e5m2 of a number below 4.
uint8_t random_code(CodeType code) {
    const unsigned most = code == CodeType::e4m3 ? 0x48 : (code == CodeType::e5m2 ? 0x44 : 0x80);
    return static_cast<uint8_t>((generator() % most) | (generator() % 2) << 7);
}

struct Problem {
    const Case& c;
    const int batch, rows_of_page, columns, pages;
    std::vector<int32_t> cu_q{0}, cu_new{0}, lengths, table, entries, sequence_order;
    int query_rows;
    std::vector<T> q, k, v, out;
    std::vector<uint8_t> k_codes, v_codes;
    std::vector<double> q64, k64, v64;  // of the cache: without scales
    std::vector<float> lse, sink, long_sums, k_scales, v_scales;
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
        if (has_codes()) k_codes.assign(k.size(), 0x7f), v_codes.assign(v.size(), 0x7f);  // NaN, of int8 127
        const bool of_rows = c.scales == Scales::rows;
        const int scales = of_rows ? pages * rows_of_page * kHeadsK : batch * kHeadsK;
        for (int i = 0; i < scales; ++i) {
            const float size = (c.code == CodeType::int8 ? 0.03f : 1) * (has_codes() ? c.size : 1), more = of_rows ? i % 9 : i;
            k_scales.push_back(of_rows ? NAN : size * (i == 1 ? -0.5f : (i == 2 ? 0 : 1 + 0.1f * more)));
            v_scales.push_back(of_rows ? NAN : size * (i == 3 ? -1 : 1 + 0.2f * more));
        }
        for (int b = 0; b < batch; ++b) fill_sequence(b);
        q64 = wide(q), k64 = wide(k), v64 = wide(v);
        fill_in();
    }
    bool has_codes() const { return c.code != CodeType::none; }
    // Which scale a key has.
    size_t scale_of(int b, int j, int head) const {
        if (c.scales == Scales::heads) return b * kHeadsK + head;
        return (size_t(page_of(b, j)) * rows_of_page + j % rows_of_page) * kHeadsK + head;
    }
    double k_scale(int b, int j, int head) const { return c.scales == Scales::none ? 1 : k_scales[scale_of(b, j, head)]; }
    double v_scale(int b, int j, int head) const { return c.scales == Scales::none ? 1 : v_scales[scale_of(b, j, head)]; }
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
                fill_row(at(k, b, j, h, c.head_dim), k, k_codes, c.head_dim, c.size);
                fill_row(at(v, b, j, h, c.head_dim_v()), v, v_codes, c.head_dim_v(), 1);
                if (c.scales != Scales::rows) continue;
                const float size = c.code == CodeType::int8 ? 0.03f : 1;
                k_scales[scale_of(b, j, h)] = size * (j % 7 == 3 ? -0.5f : (j % 11 == 5 ? 0 : 1 + 0.1f * (j % 5)));
                v_scales[scale_of(b, j, h)] = size * (j % 6 == 1 ? -1 : 0.5f + 0.2f * (j % 4));
            }
        for (int column = 0; c.page_size && (column + 1) * c.page_size <= first_seen; ++column)
            table[b * columns + column] = column % 2 ? 0 : INT32_MAX;
    }

    void fill_row(T* row, const std::vector<T>& cache, std::vector<uint8_t>& codes, int dim, float size) {
        const std::vector<T> numbers = random<T>(dim, size);
        for (int i = 0; i < dim; ++i) {
            row[i] = numbers[i];
            if (!has_codes()) continue;
            uint8_t& code = codes[row + i - cache.data()];
            code = random_code(c.code);
            row[i] = T(value_of(code, c.code));
        }
    }

    void fill_in() {
        const auto rows = [&](std::vector<T>& x, int dim) { return RowsParams{x.data(), 0, int64_t{c.heads()} * dim, dim}; };
        const auto scattered = [&](std::vector<T>& x, std::vector<uint8_t>& codes, int dim) {
            void* const data = has_codes() ? static_cast<void*>(codes.data()) : x.data();
            return RowsParams{data, int64_t{rows_of_page} * kHeadsK * dim, row_stride(dim), head_stride(dim)};
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
        cache.k = scattered(k, k_codes, c.head_dim), cache.v = scattered(v, v_codes, c.head_dim_v());
        params.code = c.code;
        const bool rows_scaled = c.scales == Scales::rows;
        const int64_t of_sequence = rows_scaled ? 0 : kHeadsK, of_page = rows_scaled ? rows_of_page * kHeadsK : 0,
                      of_row = rows_scaled ? kHeadsK : 0;
        if (c.scales != Scales::none) {
            params.k_scale = {k_scales.data(), of_sequence, of_page, of_row, 1, 0, 1, rows_scaled};
            params.v_scale = {v_scales.data(), of_sequence, of_page, of_row, 1, 0, 1, rows_scaled};
        }
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
        plan.schedule_bytes = schedule_bytes(units / (1 + c.in_pairs()));
        plan_kernels(c.instance(), std::min<int64_t>(units, c.multiprocessors()));
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

    void plan_kernels(ForwardInstance instance, int64_t blocks) {
        plan.instance.number = int(instance);
        const auto resources = [&](ForwardStep step) { return resources_of_prefill<PrefillKernel>(int(step), int(instance)); };
        plan.order = launch_shape(1, resources(ForwardStep::order));
        plan.attention = launch_shape(blocks, resources(ForwardStep::attention));
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
            s[j] = kScale * k_scale(b, j, head_k) * dot(query, at(k64, b, j, head_k, c.head_dim), c.head_dim);
            largest = std::max(largest, s[j]);
        }
        if (c.sink) sum = std::exp(sink[h] - largest);
        for (int j = 0; j < existing(b); ++j) {
            if (s[j] == -INFINITY) continue;
            const double p = std::exp(s[j] - largest);
            sum += p;
            add_scaled(o.data(), p * v_scale(b, j, head_k), at(v64, b, j, head_k, dim), dim);
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

// Whether a cache of the values of the codes gives the same bits. The problem then has that cache.
bool values_give_the_same(Problem& p) {
    const std::vector<T> out = p.out;
    const std::vector<float> lse = p.lse;
    p.plan_kernels(ForwardInstance::copied, p.plan.attention.blocks);
    p.params.code = CodeType::none, p.params.cache.k.data = p.k.data(), p.params.cache.v.data = p.v.data();
    launch_prefill<PrefillKernel>(p.plan, p.params, nullptr);
    return std::memcmp(out.data(), p.out.data(), out.size() * sizeof(T)) == 0 &&
           std::memcmp(lse.data(), p.lse.data(), lse.size() * sizeof(float)) == 0;
}

constexpr int32_t kGuard = 0x7ead7ead;

// A schedule of this problem, or of numbers that a function gives; the last number is a guard.
std::vector<int32_t> schedule_of(Problem& p) {
    std::vector<int32_t> schedule(p.plan.schedule_bytes / sizeof(int32_t) + 1, kGuard);
    PrefillParams params = p.params;
    params.sequence_order = schedule.data(), params.order_alone = true;
    params.q.data = params.out.data = params.cache.k.data = params.cache.v.data = nullptr;
    params.lse.data = params.long_sums = nullptr;
    launch_prefill<PrefillKernel>(p.plan, params, nullptr);
    return schedule;
}
template <class Number>
std::vector<int32_t> schedule_of(const Problem& p, const Number& number) {
    std::vector<int32_t> schedule(p.plan.schedule_bytes / sizeof(int32_t) + 1, kGuard);
    for (size_t i = 0; i + 1 < schedule.size(); ++i) schedule[i] = number(i);
    return schedule;
}

// Runs the problem again with a schedule, which thread blocks copy. Returns whether nothing but the rows of prefill was written.
bool run_with(Problem& p, const std::vector<int32_t>& schedule) {
    const std::vector<int32_t> before = schedule;
    PrefillPlan plan = p.plan;
    plan.order.blocks = 3;
    PrefillParams params = p.params;
    params.given_order = schedule.data();
    std::fill(p.sequence_order.begin(), p.sequence_order.end(), kGuard);
    std::fill(p.out.begin(), p.out.end(), T(kUntouched));
    std::fill(p.lse.begin(), p.lse.end(), kUntouched);
    launch_prefill<PrefillKernel>(plan, params, nullptr);
    bool good = schedule == before && p.sequence_order.back() == kGuard && (p.long_sums.empty() || p.long_sums.back() == 7);
    for (int b = 0; b < p.batch; ++b)
        for (int i = 0; i < p.c.sequences[b].rows; ++i)
            if (p.c.sequences[b].rows < kFewestRows) good &= p.is_untouched(p.cu_q[b] + i);
    for (int row = p.cu_q.back(); row < p.query_rows; ++row) good &= p.is_untouched(row);
    return good;
}

// Whether a schedule gives the bits of p, and schedules of other numbers do no harm. The results of p are lost.
bool schedules_are_right(Problem& p) {
    const std::vector<T> out = p.out;
    const std::vector<float> lse = p.lse;
    const std::vector<int32_t> schedule = schedule_of(p);
    const int blocks = p.sequence_order[2], units = schedule[1];
    bool good = schedule.back() == kGuard && units > 0 && units == p.sequence_order[1] && schedule[2] == blocks;
    // Without a random order the second run would be the first one again, but for long sums that the first one left.
    const int runs = emulation::machine.random_order || !p.long_sums.empty() ? 2 : 1;
    for (int run = 0; run < runs; ++run) {
        good &= run_with(p, schedule) && p.sequence_order[2] == blocks;
        good &= std::memcmp(out.data(), p.out.data(), out.size() * sizeof(T)) == 0 &&
                std::memcmp(lse.data(), p.lse.data(), lse.size() * sizeof(float)) == 0;
    }
    // Half of the units: half of the work, and nothing else.
    std::vector<int32_t> half = schedule;
    half[1] = units / 2;
    good &= run_with(p, half) && std::memcmp(out.data(), p.out.data(), out.size() * sizeof(T)) != 0;
    for (const int32_t number : {0, -1, INT32_MIN, INT32_MAX, 1, 7})
        good &= run_with(p, schedule_of(p, [&](size_t) { return number; }));
    for (int seed = 0; seed < 2; ++seed)
        good &= run_with(p, schedule_of(p, [&](size_t) { return static_cast<int32_t>(generator()); }));
    // Another problem's: larger numbers of everything, and as many units as there can be.
    good &= run_with(p, schedule_of(p, [&](size_t i) { return i < 4 ? INT32_MAX - 1 : static_cast<int32_t>(i * 7 % 23); }));
    return good;
}

bool check(const Case& c) {
    Problem p(c);
    std::memset(emulation::shared_memory, 0x7f, sizeof emulation::shared_memory);  // as indices far outside
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
    if (p.has_codes()) others &= values_give_the_same(p);
    const int blocks = p.sequence_order[2];
    const bool schedules = schedules_are_right(p);
    const double relative = size > 0 ? std::sqrt(error / size) : std::sqrt(error);
    const bool good = relative <= kRounding && worst_lse < 1e-4 && others && schedules;
    std::printf(
        "%s page %d group %d capacity %d dim %d window %d %d size %g absent %d code %d scales %d blocks %d: relative error %.2e, "
        "lse %.1e, others %d, schedules %d\n",
        good ? "ok" : "WRONG", c.page_size, c.group, c.capacity, c.head_dim, c.left, c.right, c.size, c.absent, int(c.code),
        int(c.scales), blocks, relative, worst_lse, others, schedules);
    return good;
}

int main(int, char** argv) {
    emulation::set_random_order(std::atoi(argv[2]));
    late_copies = true;
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
    constexpr CodeType e4m3 = CodeType::e4m3, e5m2 = CodeType::e5m2, int8 = CodeType::int8;
    const Case copied[] = {
        {1, 1, 300, kDim, kAll, 0, 1, false, false, 0, mixed},
        {24, 2, 312, kDim - 8, kAll, 0, 1, true, true, 0, mixed},
        {100, 1, 640, kDim, 90, 0, 1, true, true, 0, {{150, 150, 400}, {64, 64, 500}}},
        {7, 2, 399, kDim, kAll, 0, 1, false, true, 3, {{150, 150, 230}, {100, 100, 99}}},                 // absent pages
        {3, 1, 207, kDim, kAll, 0, 1, false, false, 0, {{100, 100, 150}, {70, 70, 207}, {80, 80, 500}}},  // what does not fit
        {40, 1, 520, kDim, kAll, 0, 12, false, false, 0, {{300, 300, 200}}},                              // overflow
        {16, 1, 320, kDim, kAll, 0, 1, false, false, 0, {{130, 130, 70}, {200, 200, 100}}, false, CodeType::none, Scales::heads},
        {16, 2, 300, kDim, kAll, 0, 1, false, true, 0, mixed, true, e4m3, Scales::heads},
        {0, 1, 300, kDim - 16, kAll, kAll, 1, true, false, 0, mixed, false, e4m3},
        {5, 1, 640, kDim, 90, 0, 1, true, true, 4, {{150, 150, 400}, {64, 64, 500}}, false, e5m2},
        {32, 3, 700, kDim, kAll, 0, 1, false, false, 0, {{330, 330, 340}, {1, 1, 600}, {200, 200, 0}}, true, int8, Scales::heads},
        {40, 1, 520, kDim, kAll, 0, 12, false, true, 0, {{300, 300, 200}}, false, e4m3, Scales::heads},  // overflow
        {1, 1, 130, kDim, kAll, 0, 1, false, false, 5, {{90, 90, 0}, {100, 0, 130}}, false, int8, Scales::rows},
        {0, 2, 300, kDim, kAll, 0, 1, false, true, 0, mixed, false, CodeType::none, Scales::rows},
        {24, 1, 312, kDim - 16, 100, 0, 1, true, false, 0, mixed, true, e4m3, Scales::rows},
    };
    bool good = true;
    if (std::atoi(argv[1]) == 0) {
        for (const Case& c : cases) good &= check(c);
    } else if constexpr (has_copied_prefill(PrefillKernel::config)) {
        for (const Case& c : copied) good &= check(c);
    }
    return good ? 0 : 1;
}
