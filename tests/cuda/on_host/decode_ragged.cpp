// Runs decode with any number of rows in each sequence on the host, from the problem over the plan to the kernels, and compares
// it with double precision. Arguments:
// 1 the number of splits (0: the plan's, negative: the split size); 2 whether the cache is paged; 3 what is appended, with rotary
// embedding (0: nothing, 1: as many rows as query rows, 2: other numbers of rows); 4 whether positions are given; 5 bits of trees
// (0: none, 1: for all sequences, 2: for some of them); 6 the window on the left (-1: none); 7 whether there are softcap, ALiBi
// and sinks; 8 the query rows of each sequence (0: packed rows); 9 sequences without rows before the others; 10 whether the mask
// is causal; 11 whether copies complete late; 12 0, or the seed of a random order; 13 the prefill kernel of sm90 computes
// sequences with at least so many query rows (0: none); 14 whether prefix sums descend (only if 3 is not 2). With DECODE_SM90 the
// kernel is that of sm90 for many rows; GROUP: the query heads of a key head.
// With prefill a second call takes a schedule, and must give the same bits. Prints the errors; exit code 0 means none is too
// large.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "decode_instances.h"
#include "decode_problem.h"
#include "numbers.h"
#ifdef PREFILL_TILE
#include "cuda/sm90/prefill_plan.cpp"
#include "prefill_instances.h"
#endif

using namespace libflash;
using namespace libflash::cuda;

#ifndef GROUP
#define GROUP 3
#endif
using T = ElementOf<DecodeKernel::config.dtype>;
constexpr int kDim = HEAD_DIM, kHeadsK = 2, kGroup = GROUP, kHeads = kHeadsK * kGroup, kCapacity = 200, kPage = 16;
constexpr int kColumns = (kCapacity + kPage - 1) / kPage, kPositions = 260, kUnused = 2, kMost = 8;
// One row of the fifth sequence fits, none of the sixth.
constexpr int kCached[kMost] = {127, 0, 50, 77, 199, 200, 1, 130};
constexpr int kRows[kMost] = {1, 3, 0, 40, 2, 9, 1, 0}, kOtherNews[kMost] = {0, 5, 3, 20, 3, 1, 2, 0};
constexpr double kRounding = sizeof(T) == 4 ? 0x1p-21 : (std::is_same<T, __half>::value ? 0x1p-11 : 0x1p-8);
constexpr double kSmallest = std::is_same<T, __half>::value ? 0x1p-25 : 0;  // half of the smallest number
constexpr double kScale = 0.2, kSoftcap = 5;
constexpr float kUntouched = 7;

std::mt19937 generator(5);
std::vector<T> random(size_t count) {
    std::normal_distribution<float> normal;
    std::vector<T> x(count);
    for (T& y : x) y = from_float(normal(generator), T());
    return x;
}
double wide(T x) { return to_float(x); }

struct Case {
    int splits, paged, append, positions, tree, window, score_options, dense, padding, causal, late, order_seed, fewest_rows,
        descending;
};

struct Problem {
    const Case& c;
    const int batch;
    std::vector<int> rows, news, cached;
    std::vector<int32_t> cu_q{0}, cu_new{0}, cu_tree{0}, lengths, position, bits, table, entries;
    int query_rows, rows_end = 0, news_end = 0, words;  // ends: of the rows of all sequences
    std::vector<T> q, new_k, new_v, k, v, out, dense_k, dense_v;
    std::vector<float> lse, cos, sin, slopes, sinks;

    explicit Problem(const Case& given) : c(given), batch(kMost + given.padding) {
        for (int b = 0; b < batch; ++b) {
            const int n = b - c.padding;
            cached.push_back(n < 0 ? 7 : kCached[n]);
            rows.push_back(c.dense ? c.dense : n < 0 ? 0 : kRows[n]);
            news.push_back(n < 0 || !c.append ? 0 : c.append == 1 ? rows[b] : kOtherNews[n]);
            lengths.push_back(cached[b]);
            cu_q.push_back(cu_q[b] + rows[b]);
            cu_new.push_back(cu_new[b] + news[b]);
        }
        rows_end = cu_q[batch], news_end = cu_new[batch];
        query_rows = rows_end + (c.dense ? 0 : kUnused);
        if (c.descending) descend(cu_q), descend(cu_new);
        make_positions();
        make_tree();
        q = random(size_t(query_rows) * kHeads * kDim);
        new_k = random(size_t(news_end + 1) * kHeadsK * kDim), new_v = random(new_k.size());
        out.assign(q.size(), from_float(kUntouched, T())), lse.assign(size_t(query_rows) * kHeads, kUntouched);
        dense_k = random(size_t(batch) * kCapacity * kHeadsK * kDim), dense_v = random(dense_k.size());
        k.assign(size_t(batch * kColumns + 2) * kPage * kHeadsK * kDim, from_float(NAN, T())), v = k;
        // Entries of sequences without rows and keys point nowhere.
        for (int i = 0; i < batch * kColumns; ++i) table.push_back(i < c.padding * kColumns ? -1 : batch * kColumns - 1 - i);
        for (int b = 0; b < batch; ++b) entries.push_back(b < c.padding ? -1 : batch - 1 - b);
        for (int i = 0; i < kPositions * kDim / 2; ++i) {
            cos.push_back(static_cast<float>(std::cos(i * 0.01)));
            sin.push_back(static_cast<float>(std::sin(i * 0.01)));
        }
        for (int h = 0; h < kHeads; ++h) slopes.push_back(0.02f * (h + 1)), sinks.push_back(0.5f * h - 1);
        for (int b = c.padding; b < batch; ++b)
            for (int j = 0; j < cached[b]; ++j) copy_row(b, j);
        for (int b = 0; b < batch; ++b) append_exactly(b);
    }

    // Puts the rows of the sequences up to the first empty one after those of the others. The last sequence, which is empty,
    // ends before the tensor.
    void descend(std::vector<int32_t>& cu) const {
        const int empty = c.padding + 2, before = cu[empty], after = cu[batch] - before;
        for (int b = 0; b <= batch; ++b) cu[b] += b <= empty ? after : -before;
        cu[batch] = -5;
    }

    int shift(int b) const { return cached[b] + news[b] - rows[b]; }
    int existing(int b) const { return std::min(cached[b] + news[b], kCapacity); }
    bool has_bits(int b) const { return c.tree == 1 || (c.tree == 2 && (b - c.padding) % 4 == 1); }

    // Positions like those of the nodes of a tree: several rows have the same position, and positions are not in order.
    void make_positions() {
        position.assign(query_rows, -1);
        for (int b = 0; b < batch; ++b)
            for (int i = 0; i < rows[b]; ++i) position[cu_q[b] + i] = std::max(0, shift(b) + i + 4 - i * 3 % 7);
    }
    void make_tree() {
        words = 2;
        for (int b = 0; b < batch; ++b) {
            const int of_tree = has_bits(b) ? rows[b] : 0;
            cu_tree.push_back(cu_tree[b] + of_tree);
            for (int i = 0; i < of_tree * words; ++i) bits.push_back(static_cast<int32_t>(generator()));
        }
        bits.resize(bits.size() + size_t(kUnused) * words, -1);
    }

    size_t at(int b, int j) const { return (size_t(b) * kCapacity + j) * kHeadsK * kDim; }
    size_t cache_row(int b, int j) const {
        const size_t row =
            c.paged ? size_t(table[b * kColumns + j / kPage]) * kPage + j % kPage : size_t(entries[b]) * kCapacity + j;
        return row * kHeadsK * kDim;
    }
    void copy_row(int b, int j) {
        for (int e = 0; e < kHeadsK * kDim; ++e)
            k[cache_row(b, j) + e] = dense_k[at(b, j) + e], v[cache_row(b, j) + e] = dense_v[at(b, j) + e];
    }
    // Rotary embedding of pairs from the two halves of the channels.
    void rotate(const T* from, T* to, int position) const {
        for (int n = 0; n < kDim / 2; ++n) {
            const double x = wide(from[n]), y = wide(from[n + kDim / 2]);
            const double cosine = cos[position * kDim / 2 + n], sine = sin[position * kDim / 2 + n];
            to[n] = rounded(x * cosine - y * sine, T());
            to[n + kDim / 2] = rounded(x * sine + y * cosine, T());
        }
    }
    int key_position(int b, int j) const { return c.positions && j >= shift(b) ? position[cu_q[b] + j - shift(b)] : j; }
    void append_exactly(int b) {
        for (int i = 0; i < news[b] && cached[b] + i < kCapacity; ++i)
            for (int h = 0; h < kHeadsK; ++h) {
                const size_t from = (size_t(cu_new[b] + i) * kHeadsK + h) * kDim, to = at(b, cached[b] + i) + h * kDim;
                rotate(&new_k[from], &dense_k[to], key_position(b, cached[b] + i));
                for (int e = 0; e < kDim; ++e) dense_v[to + e] = new_v[from + e];
            }
    }

    DecodeProblem problem() {
        DecodeProblem p;
        const DType dtype = sizeof(T) == 4 ? DType::f32 : std::is_same<T, __half>::value ? DType::f16 : DType::bf16;
        p.device = {FLASH_DEVICE_CUDA, 0}, p.dtype = dtype;
        p.batch = batch, p.heads_q = kHeads, p.heads_k = kHeadsK, p.head_dim = p.head_dim_v = kDim;
        const int64_t of_sequence = c.dense, all = query_rows;
        if (c.dense) {
            p.q = view(q.data(), dtype, {batch, of_sequence, kHeads, kDim});
            p.lse = view(lse.data(), DType::f32, {batch, kHeads, of_sequence});
        } else {
            p.q = view(q.data(), dtype, {all, kHeads, kDim});
            p.lse = view(lse.data(), DType::f32, {kHeads, all});
        }
        p.out = p.q, p.out.data = out.data();
        p.seqlen_q = c.dense ? c.dense : query_rows;
        p.q_rows.batch = p.new_rows.batch = batch, p.q_rows.capacity = p.q_rows.max_length = p.seqlen_q;
        if (!c.dense) p.q_rows.cu = cu_q.data();
        p.cache.dtype = dtype, p.cache.capacity = kCapacity;
        if (c.paged) {
            p.cache.k = view(k.data(), dtype, {batch * kColumns + 2, kPage, kHeadsK, kDim});
            p.cache.page_size = kPage, p.cache.pages = batch * kColumns + 2, p.cache.block_table = table.data();
            p.cache.block_table_stride[0] = kColumns, p.cache.block_table_stride[1] = 1;
            p.cache.capacity = kCapacity;
        } else {
            p.cache.k = view(k.data(), dtype, {batch, kCapacity, kHeadsK, kDim});
            p.cache.batch_idx = entries.data();
        }
        p.cache.v = p.cache.k, p.cache.v.data = v.data();
        p.cache_seqlens = lengths.data();
        if (c.append) {
            p.seqlen_new = p.new_rows.capacity = news_end;
            p.new_rows.cu = cu_new.data();
            p.k_new = view(new_k.data(), dtype, {p.seqlen_new, kHeadsK, kDim});
            p.v_new = p.k_new, p.v_new.data = new_v.data();
            p.rotary_cos = view(cos.data(), DType::f32, {kPositions, kDim / 2});
            p.rotary_sin = p.rotary_cos, p.rotary_sin.data = sin.data();
        }
        if (c.positions) p.positions = position.data();
        if (c.tree) {
            p.tree.data = bits.data(), p.tree.words = words, p.tree.stride[0] = words, p.tree.stride[1] = 1;
            p.tree.rows = p.q_rows;
            if (c.tree == 2) p.tree.rows.cu = cu_tree.data(), p.tree.rows.capacity = cu_tree[batch] + kUnused;
        }
        p.softmax_scale = kScale;
        p.causal = c.causal;
        if (c.window >= 0) p.window.left = c.window;
        p.mask_rule = p.window;
        if (c.causal) p.mask_rule.right = 0;
        if (c.score_options) {
            p.softcap = kSoftcap;
            p.alibi_slopes.present = p.sink.present = true;
            p.alibi_slopes.dtype = p.sink.dtype = DType::f32;
            p.alibi_slopes.data = slopes.data(), p.sink.data = sinks.data();
            p.alibi_slopes.head_stride = p.sink.head_stride = 1;
        }
        (c.splits < 0 ? p.request.split_size : p.request.num_splits) = std::abs(c.splits);
        return p;
    }

    bool sees(int b, int i, int j) const {
        const int n = j - shift(b), at_position = c.positions ? position[cu_q[b] + i] : shift(b) + i;
        if (c.window >= 0 && key_position(b, j) < at_position - c.window) return false;
        if (has_bits(b)) return n < 0 || (bits[(cu_tree[b] + i) * words + n / 32] >> (n % 32) & 1);
        return n <= i || !(c.causal || c.tree);
    }

    // The largest error of a row, in units of its error bound.
    double worst(int b, int i, int h) const {
        std::vector<T> query(kDim);
        const size_t row = (size_t(cu_q[b] + i) * kHeads + h) * kDim;
        const int at_position = c.positions ? position[cu_q[b] + i] : shift(b) + i;
        const bool advances = c.causal || c.tree || c.window >= 0;
        std::copy_n(&q[row], kDim, query.begin());
        if (c.append) rotate(&q[row], query.data(), c.positions ? at_position : cached[b] + (advances ? i : 0));
        double sum = 0, o[kDim] = {}, size[kDim] = {};
        for (int j = 0; j < existing(b); ++j) {
            if (!sees(b, i, j)) continue;
            double score = 0;
            for (int e = 0; e < kDim; ++e) score += wide(query[e]) * wide(dense_k[at(b, j) + h / kGroup * kDim + e]);
            score *= kScale;
            if (c.score_options)
                score = kSoftcap * std::tanh(score / kSoftcap) - slopes[h] * std::abs(at_position - key_position(b, j));
            const double p = std::exp(score);
            sum += p;
            for (int e = 0; e < kDim; ++e) {
                o[e] += p * wide(dense_v[at(b, j) + h / kGroup * kDim + e]);
                size[e] += p * std::fabs(wide(dense_v[at(b, j) + h / kGroup * kDim + e]));
            }
        }
        const double total = sum + (c.score_options ? std::exp(sinks[h]) : 0);
        const double got = c.dense ? lse[(size_t(b) * kHeads + h) * c.dense + i] : lse[size_t(h) * query_rows + cu_q[b] + i];
        const double lse_limit = c.score_options ? 1e-4 : 1e-5;  // tanh is approximate
        double worst = total == 0 ? (got == -INFINITY ? 0 : INFINITY) : std::fabs(got - std::log(total)) / lse_limit;
        for (int e = 0; e < kDim; ++e) {
            const double exact = sum == 0 ? 0 : o[e] / total;
            const double limit = sum == 0 ? 1e-30 : 8 * kRounding * size[e] / total + kSmallest;
            const double error = std::fabs(wide(out[row + e]) - exact) / (limit + (c.score_options ? 1e-4 * size[e] / total : 0));
            worst = error <= worst ? worst : error;  // NaN is the worst
        }
        return worst;
    }

    // The number of wrong elements in the cache: appended rows that differ, or other elements that changed.
    int wrong_bits() {
        const std::vector<T> got_k = k, got_v = v;
        std::fill(k.begin(), k.end(), from_float(NAN, T()));
        v = k;
        for (int b = c.padding; b < batch; ++b)
            for (int j = 0; j < existing(b); ++j) copy_row(b, j);
        const auto same_bits = [](const std::vector<T>& x, const std::vector<T>& y) {
            return std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0;
        };
        if (same_bits(k, got_k) && same_bits(v, got_v)) return 0;
        int wrong = 0;
        for (size_t i = 0; i < k.size(); ++i) {
            const auto same = [](T x, T y) { return wide(x) == wide(y) || (wide(x) != wide(x) && wide(y) != wide(y)); };
            wrong += !same(k[i], got_k[i]) + !same(v[i], got_v[i]);
        }
        return wrong;
    }
    // Elements of rows of no sequence that were written.
    int touched() const {
        int count = 0;
        for (size_t i = size_t(rows_end) * kHeads * kDim; i < out.size(); ++i) count += wide(out[i]) != kUntouched;
        for (int h = 0; h < kHeads && !c.dense; ++h)
            for (int i = rows_end; i < query_rows; ++i) count += lse[size_t(h) * query_rows + i] != kUntouched;
        return count;
    }
};

// The plan of the prefill kernel, for a GPU with three multiprocessors, so that it has thread blocks for so few rows.
DecodePrefill prefill_of([[maybe_unused]] const Case& c, [[maybe_unused]] const DecodeProblem& problem,
                         [[maybe_unused]] DeviceProperties device) {
    DecodePrefill prefill;
#ifdef PREFILL_TILE
    if (c.fewest_rows == 0) return prefill;
    cuda::Kernel kernel;
    kernel.config = PrefillKernel::config;
    kernel.resources = resources_of_prefill<PrefillKernel>;
    device.multiprocessors = 3;
    prefill = {"prefill", launch_prefill<PrefillKernel>, sm90::plan_prefill(kernel, problem, device)};
    prefill.plan.fewest_rows = c.fewest_rows;
#endif
    return prefill;
}

#ifdef PREFILL_TILE
// Whether a call with a schedule gives the bits of the call before it, and one with half of the units other ones: so the schedule
// is read. It has exactly the bytes that the plan states.
bool schedule_changes_no_bit(Problem& p, const cuda::Kernel& kernel, const DeviceProperties& device, char* workspace) {
    const std::vector<T> out = p.out;
    const std::vector<float> lse = p.lse;
    DecodeProblem problem = p.problem();
    const auto plan = [&] { return folder::plan_decode(kernel, problem, device, prefill_of(p.c, problem, device)); };
    const size_t bytes = plan().prefill.plan.schedule_bytes;
    std::vector<int32_t> schedule(bytes / sizeof(int32_t) + 1, 0x7ead7ead);
    problem.schedule = view(schedule.data(), DType::i32, {static_cast<int64_t>(schedule.size()) - 1});
    problem.writes_schedule = true;
    cuda::decode_schedule(problem, plan(), nullptr);
    problem.writes_schedule = false;
    const auto gives_the_same = [&] {
        const std::vector<int32_t> before = schedule;
        std::fill(p.out.begin(), p.out.end(), from_float(kUntouched, T()));
        std::fill(p.lse.begin(), p.lse.end(), kUntouched);
        cuda::decode(kernel, problem, plan(), workspace, nullptr);
        const bool same = std::memcmp(out.data(), p.out.data(), out.size() * sizeof(T)) == 0 &&
                          std::memcmp(lse.data(), p.lse.data(), lse.size() * sizeof(float)) == 0;
        return same && schedule == before;
    };
    const int32_t units = schedule[1];
    schedule[1] = units / 2;
    bool good = bytes > 0 && units > 0 && schedule.back() == 0x7ead7ead && !gives_the_same();
    schedule[1] = units;
    good &= gives_the_same();
    return good;
}
#endif

int main(int, char** argv) {
    Case c;
    int* const fields = &c.splits;
    for (int i = 0; i < 14; ++i) fields[i] = std::atoi(argv[i + 1]);
    Problem p(c);
    const DecodeProblem problem = p.problem();
    const cuda::Kernel kernel = decode_kernel<DecodeKernel>();
    const DeviceProperties device = hopper(64);
    const cuda::DecodePlan plan = folder::plan_decode(kernel, problem, device, prefill_of(c, problem, device));
    std::vector<char> memory(plan.workspace.bytes() + 255, char(0xff));  // NaN
    char* const workspace = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
    late_copies = c.late != 0;
    emulation::set_random_order(c.order_seed);
    cuda::decode(kernel, problem, plan, workspace, nullptr);
    bool good = true;
#ifdef PREFILL_TILE
    if (plan.prefill.name) good = schedule_changes_no_bit(p, kernel, device, workspace);
    if (!good) std::printf("WRONG schedule\n");
#endif
    const int wrong = p.wrong_bits(), touched = p.touched();
    good &= wrong == 0 && touched == 0;
    std::printf("%s cache: %d wrong, %d written outside the sequences, %s, %d splits\n", good ? "ok" : "WRONG", wrong, touched,
                plan.instance.name, int(plan.splits));
    for (int b = 0; b < p.batch; ++b)
        for (int i = 0; i < p.rows[b]; ++i)
            for (int h = 0; h < kHeads; ++h) {
                const double worst = p.worst(b, i, h);
                if (worst <= 1) continue;
                std::printf("WRONG sequence %d row %d head %d: %.2g times the limit\n", b, i, h, worst);
                good = false;
            }
    return good ? 0 : 1;
}
