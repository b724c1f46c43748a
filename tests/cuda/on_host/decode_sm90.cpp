// Runs a decode kernel of sm90 on the host, from the problem over the plan to the kernels, and compares it with double precision:
// values that are channels of the keys or, where keys and values have as many channels, a cache of their own; sequences of
// several lengths over a cache with pages or without, splits, windows, new rows, pages that do not exist, and NaN in all rows of
// the cache that must not be read. The argument is 0, or the seed of a random order, as in forward_sm90.cpp. Prints the errors;
// exit code 0 means none is too large.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <random>

#define DECODE_SM90
#include "decode_problem.h"
#include "numbers.h"

struct DecodeKernel {
    static constexpr KernelConfig config{"decode", Operation::decode, "sm90", KernelType::DTYPE, KERNEL_DIMS, DECODE_TILE, ""};
};
using T = ElementOf<DecodeKernel::config.dtype>;
constexpr bool kInKeys = sm90::has_values_in_keys(DecodeKernel::config);
constexpr int kDim = DecodeKernel::config.head_dim, kValues = DecodeKernel::config.head_dim_v, kUnused = 2, kPositions = 2100;
constexpr double kRounding = DecodeKernel::config.dtype == KernelType::f16_ ? 0x1p-11 : 0x1p-8, kScale = 0.06;
constexpr double kSmallest = DecodeKernel::config.dtype == KernelType::f16_ ? 0x1p-25 : 0;  // half of the smallest number
constexpr float kUntouched = 7;

struct Case {
    int page;  // rows of a page; 0: contiguous
    int heads_k, group;
    int dense;   // query rows of each sequence; 0: packed rows
    int splits;  // 0: the plan's; negative: the keys of each split
    int window;  // on the left; -1: none
    bool causal, append, sink, leftpad;
    int absent;  // every n-th page or entry does not exist; 0: all do
    float size;  // of q
    std::vector<int> rows, cached;

    int heads() const { return heads_k * group; }
};

std::mt19937 generator(3);

struct Problem {
    const Case& c;
    const int batch, capacity, page, columns, pages;
    std::vector<int32_t> cu{0}, lengths, table, pads;
    int query_rows;
    std::vector<T> q, k, v, news, new_values, out, wanted_k, wanted_v;
    std::vector<float> lse, sinks, cos, sin;

    explicit Problem(const Case& given)
        : c(given), batch(static_cast<int>(c.cached.size())), capacity(capacity_of(c)), page(c.page ? c.page : capacity),
          columns((capacity + page - 1) / page), pages(batch * columns + 2) {
        for (int b = 0; b < batch; ++b) {
            cu.push_back(cu.back() + rows(b)), lengths.push_back(c.cached[b]);
            pads.push_back(b % 2 ? 5 * b : 0);
        }
        query_rows = cu.back() + (c.dense ? 0 : kUnused);
        q = random<T>(size_t(query_rows) * c.heads() * kDim, c.size, generator);
        news = random<T>(size_t(cu.back() + 1) * c.heads_k * kDim, 1, generator);
        if (!kInKeys) new_values = random<T>(news.size(), 1, generator);
        out.assign(size_t(query_rows) * c.heads() * kValues, T(kUntouched));
        lse.assign(size_t(query_rows) * c.heads(), kUntouched);
        sinks = random<float>(c.heads(), 1, generator);
        for (int i = 0; i < kPositions * kDim / 2; ++i)
            cos.push_back(static_cast<float>(std::cos(i * 0.01))), sin.push_back(static_cast<float>(std::sin(i * 0.01)));
        make_cache();
    }
    static int capacity_of(const Case& c) { return *std::max_element(c.cached.begin(), c.cached.end()) + (c.append ? 2 : 0) + 1; }
    int rows(int b) const { return c.dense ? c.dense : c.rows[b]; }
    int new_rows(int b) const { return c.append ? rows(b) : 0; }
    int length(int b) const { return c.cached[b] + new_rows(b); }
    int existing(int b) const { return std::min(length(b), capacity); }
    int shift(int b) const { return length(b) - rows(b); }
    int first_seen(int b) const { return std::max(c.leftpad ? pads[b] : 0, c.window < 0 ? 0 : shift(b) - c.window); }
    int page_of(int b, int j) const { return table[b * columns + j / page]; }
    bool has_page(int b, int j) const { return page_of(b, j) >= 0 && page_of(b, j) < pages; }
    T* key(std::vector<T>& x, int b, int j, int head) const {
        return &x[((size_t(page_of(b, j)) * page + j % page) * c.heads_k + head) * kDim];
    }

    // Pages in a shuffled order. Those before the window are stale: their entries name a page of NaN, or none.
    void make_cache() {
        for (int i = 0; i < batch * columns; ++i) table.push_back(i);
        std::shuffle(table.begin(), table.end(), generator);
        for (int i = 0; c.absent && i < batch * columns; i += c.absent) table[i] = i % 2 ? -1 : pages + i;
        k.assign(size_t(pages) * page * c.heads_k * kDim, T(NAN));
        if (!kInKeys) v = k;
        for (int b = 0; b < batch; ++b)
            for (int j = first_seen(b); j < std::min(c.cached[b], capacity); ++j)
                for (int h = 0; h < c.heads_k && has_page(b, j); ++h) {
                    const std::vector<T> channels = random<T>(kDim, 1, generator);
                    std::copy(channels.begin(), channels.end(), key(k, b, j, h));
                    if (kInKeys) continue;
                    const std::vector<T> values = random<T>(kDim, 1, generator);
                    std::copy(values.begin(), values.end(), key(v, b, j, h));
                }
        wanted_k = k, wanted_v = v;
        for (int b = 0; b < batch; ++b)
            for (int i = 0; i < new_rows(b); ++i) append(b, i);
        for (int b = 0; c.page && b < batch; ++b)
            for (int column = 0; (column + 1) * page <= std::min(first_seen(b), capacity); ++column)
                table[b * columns + column] = column % 2 ? pages - 1 : INT32_MAX;
    }
    void append(int b, int i) {
        const int j = c.cached[b] + i;
        if (j >= capacity || !has_page(b, j)) return;
        for (int h = 0; h < c.heads_k; ++h) {
            const size_t from = (size_t(cu[b] + i) * c.heads_k + h) * kDim;
            rotate(&news[from], key(wanted_k, b, j, h), j);
            if (!kInKeys) std::copy_n(&new_values[from], kDim, key(wanted_v, b, j, h));
        }
    }
    // Rotary embedding of pairs from the two halves of the channels.
    void rotate(const T* from, T* to, int position) const {
        for (int n = 0; n < kDim / 2; ++n) {
            const double x = wide(from[n]), y = wide(from[n + kDim / 2]);
            const double cosine = cos[position * kDim / 2 + n], sine = sin[position * kDim / 2 + n];
            to[n] = rounded(x * cosine - y * sine, T()), to[n + kDim / 2] = rounded(x * sine + y * cosine, T());
        }
    }

    DecodeProblem problem() {
        DecodeProblem p;
        const DType dtype = std::is_same<T, __half>::value ? DType::f16 : DType::bf16;
        const int heads = c.heads(), heads_k = c.heads_k;
        p.device = {FLASH_DEVICE_CUDA, 0}, p.dtype = dtype;
        p.batch = batch, p.heads_q = heads, p.heads_k = heads_k, p.head_dim = kDim, p.head_dim_v = kValues;
        p.q = c.dense ? view(q.data(), dtype, {batch, c.dense, heads, kDim}) : view(q.data(), dtype, {query_rows, heads, kDim});
        p.out = c.dense ? view(out.data(), dtype, {batch, c.dense, heads, kValues})
                        : view(out.data(), dtype, {query_rows, heads, kValues});
        p.lse =
            c.dense ? view(lse.data(), DType::f32, {batch, heads, c.dense}) : view(lse.data(), DType::f32, {heads, query_rows});
        p.seqlen_q = p.q_rows.capacity = p.q_rows.max_length = c.dense ? c.dense : query_rows;
        p.q_rows.batch = p.new_rows.batch = batch;
        if (!c.dense) p.q_rows.cu = cu.data();
        p.cache.dtype = dtype, p.cache.capacity = capacity, p.cache.v_in_k = kInKeys;
        p.cache.k = view(k.data(), dtype, {pages, page, heads_k, kDim}), p.cache.v = p.cache.k, p.cache.v.shape[3] = kValues;
        if (!kInKeys) p.cache.v.data = v.data();
        if (c.page) {
            p.cache.page_size = page, p.cache.pages = pages, p.cache.block_table = table.data();
            p.cache.block_table_stride[0] = columns, p.cache.block_table_stride[1] = 1;
        } else {
            p.cache.batch_idx = table.data();
        }
        p.cache_seqlens = lengths.data();
        if (c.leftpad) p.leftpad = pads.data();
        if (c.append) add_new_rows(p, dtype);
        p.softmax_scale = kScale, p.causal = c.causal;
        if (c.window >= 0) p.window.left = c.window;
        p.mask_rule = p.window;
        if (c.causal) p.mask_rule.right = 0;
        p.sink.present = c.sink, p.sink.dtype = DType::f32, p.sink.data = sinks.data(), p.sink.head_stride = 1;
        (c.splits < 0 ? p.request.split_size : p.request.num_splits) = std::abs(c.splits);
        return p;
    }
    void add_new_rows(DecodeProblem& p, DType dtype) {
        p.seqlen_new = p.new_rows.capacity = c.dense ? c.dense : cu.back();
        if (!c.dense) p.new_rows.cu = cu.data();
        p.k_new = c.dense ? view(news.data(), dtype, {batch, c.dense, c.heads_k, kDim})
                          : view(news.data(), dtype, {cu.back(), c.heads_k, kDim});
        if (!kInKeys) p.v_new = p.k_new, p.v_new.data = new_values.data();
        p.rotary_cos = view(cos.data(), DType::f32, {kPositions, kDim / 2}), p.rotary_sin = p.rotary_cos;
        p.rotary_sin.data = sin.data();
    }

    bool sees(int b, int i, int j) const {
        if (j < first_seen(b) || !has_page(b, j)) return false;
        const int at = shift(b) + i;
        return (!c.causal || j <= at) && (c.window < 0 || j >= at - c.window);
    }
    __attribute__((optimize("O3"))) static void add_sizes(double* sizes, double weight, const T* values, double& largest) {
        for (int e = 0; e < kValues; ++e) {
            const double size = std::fabs(wide(values[e]));
            sizes[e] += weight * size, largest = size > largest ? size : largest;
        }
    }
    // The largest error of a row, in units of its error bound.
    double worst(int b, int i, int h) {
        std::vector<T> query(kDim);
        const T* const given = &q[(size_t(cu[b] + i) * c.heads() + h) * kDim];
        std::copy_n(given, kDim, query.begin());
        if (c.append) rotate(given, query.data(), c.cached[b] + (c.causal || c.window >= 0 ? i : 0));
        std::vector<double> o(kValues), size(kValues);
        double sum = 0, largest_value = 0;
        for (int j = 0; j < existing(b); ++j) {
            if (!sees(b, i, j)) continue;
            const T *const x = key(wanted_k, b, j, h / c.group), *const values = kInKeys ? x : key(wanted_v, b, j, h / c.group);
            const double weight = std::exp(dot(query.data(), x, kDim) * static_cast<float>(kScale));
            sum += weight;
            add_scaled(o.data(), weight, values, kValues);
            add_sizes(size.data(), weight, values, largest_value);
        }
        const double total = sum + (c.sink ? std::exp(double{sinks[h]}) : 0);
        const double got = c.dense ? lse[(size_t(b) * c.heads() + h) * c.dense + i] : lse[size_t(h) * query_rows + cu[b] + i];
        double worst = total == 0 ? (got == -INFINITY ? 0 : INFINITY)
                                  : std::fabs(got - std::log(total)) / (1e-5 * (1 + std::fabs(std::log(total))));
        for (int e = 0; e < kValues; ++e) {
            const double exact = sum == 0 ? 0 : o[e] / total;
            const double limit = sum == 0 ? 1e-30 : 8 * kRounding * size[e] / total + kSmallest * (1 + largest_value);
            const double error = std::fabs(wide(out[(size_t(cu[b] + i) * c.heads() + h) * kValues + e]) - exact) / limit;
            worst = larger_error(worst, error);
        }
        return worst;
    }
    // Elements of the cache that differ, and of rows of no sequence that were written.
    int wrong() const {
        int count = 0;
        for (size_t i = 0; i < k.size(); ++i) count += !equal_or_nan(wide(k[i]), wide(wanted_k[i]));
        for (size_t i = 0; i < v.size(); ++i) count += !equal_or_nan(wide(v[i]), wide(wanted_v[i]));
        for (size_t i = size_t(cu[batch]) * c.heads() * kValues; i < out.size(); ++i) count += wide(out[i]) != kUntouched;
        for (int h = 0; h < c.heads() && !c.dense; ++h)
            for (int i = cu[batch]; i < query_rows; ++i) count += lse[size_t(h) * query_rows + i] != kUntouched;
        return count;
    }
};

bool check(const Case& c) {
    Problem p(c);
    const DecodeProblem problem = p.problem();
    const cuda::Kernel kernel = decode_kernel<DecodeKernel>();
    const DeviceProperties device = hopper(8);
    const cuda::DecodePlan plan = sm90::plan_decode(kernel, problem, device, {});
    std::vector<char> memory(plan.workspace.bytes() + 255, char(0xff));  // NaN
    char* const workspace = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
    emulation::machine.most_resident = plan.in_pairs ? 4 : 1;
    cuda::decode(kernel, problem, plan, workspace, nullptr);
    const int wrong = p.wrong();
    double worst = 0;
    for (int b = 0; b < p.batch; ++b)
        for (int i = 0; i < p.rows(b); ++i)
            for (int h = 0; h < c.heads(); ++h) worst = larger_error(worst, p.worst(b, i, h));
    const bool good = worst <= 1 && wrong == 0;
    std::printf(
        "%s page %d heads %d x %d rows %d splits %d (%d) window %d causal %d append %d absent %d size %g, %s: "
        "%.2g times the limit, %d wrong elements%s\n",
        good ? "ok" : "WRONG", c.page, c.heads_k, c.group, c.dense, c.splits, int(plan.splits), c.window, c.causal, c.append,
        c.absent, c.size, plan.instance.name, worst, wrong, plan.in_pairs ? ", in pairs" : "");
    return good;
}

int main(int, char** argv) {
    emulation::set_random_order(std::atoi(argv[1]));
    late_copies = std::atoi(argv[1]) != 0;
    const std::vector<int> some = {0, 1, 63, 64, 65, 130, 333}, none;
    const Case cases[] = {
        {64, 1, 16, 1, 1, -1, false, false, false, false, 0, 1, none, some},
        {64, 1, 128, 1, 1, -1, true, false, true, false, 0, 1, none, {0, 1, 64, 200}},
        {16, 1, 16, 3, 3, -1, true, false, true, false, 0, 1, none, some},
        {0, 1, 63, 1, 2, -1, false, false, false, false, 0, 1, none, some},
        {48, 2, 3, 8, 0, -1, true, true, false, false, 0, 1, none, {0, 1, 62, 127, 900}},
        {128, 1, 1, 1, 5, -1, false, false, true, true, 0, 1, none, some},
        {32, 1, 40, 2, -100, 90, true, false, false, false, 0, 1, none, {0, 1, 63, 130, 333, 500}},
        {64, 1, 65, 1, 1, -1, false, false, false, false, 0, 9, none, {65, 700}},  // kept maxima rise
        {16, 1, 16, 2, 2, -1, true, false, false, false, 3, 1, none, some},        // absent pages
        {0, 2, 8, 1, 1, 70, true, true, false, false, 2, 1, none, some},           // absent entries
        {64, 1, 20, 0, 0, -1, true, true, true, false, 0, 1, {1, 0, 7, 3, 30, 2}, {300, 5, 0, 64, 129, 63}},
        {16, 2, 5, 0, 3, 33, true, false, false, false, 0, 1, {9, 1, 0, 14}, {300, 70, 4, 64}},
        {64, 1, 4, 1, 0, -1, true, false, false, false, 0, 1, none, {2000, 3}},
        {16, 1, 64, 4, 2, 100, true, true, true, true, 3, 1, none, {0, 1, 62, 127, 400}},  // two pairs for each sequence
        {64, 2, 40, 4, 1, -1, true, false, false, false, 0, 1, none, {3, 130}},            // three tiles: no pairs
    };
    bool good = true;
    for (const Case& c : cases) good &= check(c);
    return good ? 0 : 1;
}
