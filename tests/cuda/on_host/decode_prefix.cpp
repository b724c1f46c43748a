// Runs decode over keys that sequences share twice, without and with the hint (shared_groups), and compares the bits. With
// PREFIX_TILE the kernel of sm90 processes the shared keys, if it supports the pages. Arguments:
// 1 the query rows of a sequence; 2 the query heads of a key head; 3 the number of splits (0: the plan's, negative: the split
// size); 4 keys of a page (0: all sequences have the same cache entry); 5 which groups there are; 6 appended rows of each
// sequence, with rotary embedding; 7 whether rows are invariant; 8 options: 1 softcap and sinks, 2 ALiBi, 4 a window, 8 causal,
// 16 a scale so small that the kept maximum hardly moves; 9 multiprocessors, on which the splits and the key heads of a thread
// block depend; 10 whether copies complete late; 11 0, or the seed of a random order.
// Prints whether the hint was used; exit code 0 means that no bit differs.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <random>

#include "decode_instances.h"
#include "decode_problem.h"
#include "numbers.h"
#ifdef PREFIX_TILE
#include "cuda/sm90/decode_plan.cpp"
#include "prefix_instances.h"
#endif

using T = ElementOf<DecodeKernel::config.dtype>;
constexpr int kDim = HEAD_DIM, kHeadsK = 2, kBatch = 13, kCapacity = 700, kLongest = 600;
std::mt19937 generator(5);
std::vector<T> random(size_t count) { return random<T>(count, 1, generator); }

struct Case {
    int rows, group, splits, page, groups, news, invariant, options, multiprocessors, late, order_seed;
};

struct Groups {
    std::vector<int32_t> begins, lens;
    bool true_hint;
};
// One group; several groups, of which one is empty and one has a single sequence; shared keys that are not whole tiles; groups
// that share no keys, or fewer than a tile; two hints that are not true.
const Groups kGroups[] = {
    {{0, kBatch}, {512}, true},  {{0, 6, 6, 12}, {77, 500, 330}, true}, {{1, 2, 11}, {300, 191}, true},
    {{0, 8, 13}, {0, 15}, true}, {{3, 40, -7}, {2000, -5}, false},      {{5, 2, 9}, {600, 600}, false},
};
constexpr int kOwn[kBatch] = {1, 40, 0, 17, 100, 64, 7, 33, 90, 2, 80, 55, 16};

struct Problem {
    const Case& c;
    const Groups& groups;
    const int heads, columns, pages;
    std::vector<int32_t> lengths, table, entries = std::vector<int32_t>(kBatch, 1);
    std::vector<T> q, new_k, new_v, k, v, out;
    std::vector<float> lse, cos, sin, slopes, sinks;

    explicit Problem(const Case& given)
        : c(given), groups(kGroups[c.groups]), heads(kHeadsK * c.group), columns(c.page ? (kCapacity + c.page - 1) / c.page : 0),
          pages(c.page ? kBatch * columns : 2) {
        for (int b = 0; b < kBatch; ++b) lengths.push_back(shared_keys(b) + kOwn[b]);
        for (int b = 0; b < kBatch; ++b)
            for (int i = 0; i < columns; ++i) table.push_back((b * columns + i) * 5 % pages);
        for (int b = 0; b < kBatch; ++b)  // the shared keys end inside of the last page
            for (int i = 0; i < columns && (i + 1) * c.page <= shared_keys(b); ++i)
                table[b * columns + i] = table[first_of_group(b) * columns + i];
        q = random(size_t(kBatch) * c.rows * heads * kDim);
        new_k = random(size_t(kBatch) * (c.news + 1) * kHeadsK * kDim), new_v = random(new_k.size());
        k = random(size_t(pages) * (c.page ? c.page : kCapacity) * kHeadsK * kDim), v = random(k.size());
        for (int b = 0; b < kBatch && c.page; ++b)
            for (int i = shared_keys(b) / c.page * c.page; i < shared_keys(b); ++i) copy_key(first_of_group(b), b, i);
        out.assign(q.size(), from_float(NAN, T())), lse.assign(size_t(kBatch) * c.rows * heads, NAN);
        for (int i = 0; i < kCapacity * kDim / 2; ++i) {
            cos.push_back(static_cast<float>(std::cos(i * 0.01)));
            sin.push_back(static_cast<float>(std::sin(i * 0.01)));
        }
        for (int h = 0; h < heads; ++h) slopes.push_back(0.02f * (h + 1)), sinks.push_back(0.5f * h - 1);
    }

    // The group of a sequence; -1 without one. Used for true hints only.
    int group_of(int b) const {
        for (size_t i = 0; i < groups.lens.size(); ++i)
            if (groups.begins[i] <= b && b < groups.begins[i + 1]) return static_cast<int>(i);
        return -1;
    }
    int shared_keys(int b) const { return !groups.true_hint ? kLongest - 100 : group_of(b) < 0 ? 0 : groups.lens[group_of(b)]; }
    int first_of_group(int b) const { return !groups.true_hint || group_of(b) < 0 ? b : groups.begins[group_of(b)]; }

    // For a page of which only some keys are shared: each sequence has its own page with the same keys.
    void copy_key(int from, int to, int key) {
        const auto row = [&](int b) {
            return (size_t(table[b * columns + key / c.page]) * c.page + key % c.page) * kHeadsK * kDim;
        };
        for (int e = 0; e < kHeadsK * kDim; ++e) k[row(to) + e] = k[row(from) + e], v[row(to) + e] = v[row(from) + e];
    }

    DecodeProblem problem(bool hint) {
        DecodeProblem p;
        const DType dtype = std::is_same<T, __half>::value ? DType::f16 : DType::bf16;
        p.device = {FLASH_DEVICE_CUDA, 0}, p.dtype = dtype;
        p.batch = kBatch, p.heads_q = heads, p.heads_k = kHeadsK, p.head_dim = p.head_dim_v = kDim;
        p.q = view(q.data(), dtype, {kBatch, c.rows, heads, kDim});
        p.lse = view(lse.data(), DType::f32, {kBatch, heads, c.rows});
        p.out = p.q, p.out.data = out.data();
        p.seqlen_q = c.rows;
        p.q_rows.batch = p.new_rows.batch = kBatch, p.q_rows.capacity = p.q_rows.max_length = c.rows;
        p.cache.dtype = dtype, p.cache.capacity = c.page ? columns * c.page : kCapacity;
        p.cache.k = view(k.data(), dtype, {pages, c.page ? c.page : kCapacity, kHeadsK, kDim});
        p.cache.v = p.cache.k, p.cache.v.data = v.data();
        if (c.page) {
            p.cache.page_size = c.page, p.cache.pages = pages, p.cache.block_table = table.data();
            p.cache.block_table_stride[0] = columns, p.cache.block_table_stride[1] = 1;
        } else {
            p.cache.batch_idx = entries.data();
        }
        p.cache_seqlens = lengths.data();
        if (c.news > 0) {
            p.seqlen_new = p.new_rows.capacity = c.news;
            p.k_new = view(new_k.data(), dtype, {kBatch, c.news, kHeadsK, kDim});
            p.v_new = p.k_new, p.v_new.data = new_v.data();
            p.rotary_cos = view(cos.data(), DType::f32, {kCapacity, kDim / 2});
            p.rotary_sin = p.rotary_cos, p.rotary_sin.data = sin.data();
        }
        p.softmax_scale = c.options & 16 ? 0.05 : 0.7;  // the larger one moves the kept maximum often
        p.causal = c.options & 8;
        if (c.options & 4) p.window.left = 300;
        p.mask_rule = p.window;
        if (p.causal) p.mask_rule.right = 0;
        if (c.options & 1) {
            p.softcap = 5, p.sink.present = true;
            p.sink.dtype = DType::f32, p.sink.data = sinks.data(), p.sink.head_stride = 1;
        }
        if (c.options & 2) {
            p.alibi_slopes.present = true, p.alibi_slopes.dtype = DType::f32;
            p.alibi_slopes.data = slopes.data(), p.alibi_slopes.head_stride = 1;
        }
        (c.splits < 0 ? p.request.split_size : p.request.num_splits) = std::abs(c.splits);
        p.invariant_rows = c.invariant != 0;
        if (hint) p.shared = {groups.begins.data(), groups.lens.data(), int64_t(groups.lens.size())};
        return p;
    }
};

// Makes the plan use the kernel of sm90, as the plan layer does.
void take_prefix_kernel([[maybe_unused]] cuda::DecodePlan& plan, [[maybe_unused]] const DecodeProblem& problem,
                        [[maybe_unused]] const DeviceProperties& device) {
#ifdef PREFIX_TILE
    if (plan.prefix.blocks == 0 || problem.cache.page_size % 16 != 0) return;
    Kernel kernel;
    kernel.config = PrefixKernelOfSm90::config;
    kernel.resources = resources_of_decode_prefix<PrefixKernelOfSm90>;
    kernel.decode_prefix = launch_decode_prefix<PrefixKernelOfSm90>;
    sm90::plan_prefix(plan, kernel, problem, device);
#endif
}

struct Result {
    std::vector<T> out, k, v;
    std::vector<float> lse;
    cuda::DecodePlan plan;
};

Result run(const Case& c, bool hint) {
    generator.seed(5);
    Problem p(c);
    const DecodeProblem problem = p.problem(hint);
    const cuda::Kernel kernel = decode_kernel<DecodeKernel>();
    const DeviceProperties device = hopper(c.multiprocessors);
    cuda::DecodePlan plan = sm80::plan_decode(kernel, problem, device, {});
    take_prefix_kernel(plan, problem, device);
    std::vector<char> memory(plan.workspace.bytes() + 255, char(0xff));  // NaN
    char* const workspace = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
    cuda::decode(kernel, problem, plan, workspace, nullptr);
    return {p.out, p.k, p.v, p.lse, plan};
}

template <class E>
int differences(const std::vector<E>& x, const std::vector<E>& y) {
    int count = 0;
    for (size_t i = 0; i < x.size(); ++i) count += std::memcmp(&x[i], &y[i], sizeof(E)) != 0;
    return count;
}

int main(int, char** argv) {
    Case c;
    int* const fields = &c.rows;
    for (int i = 0; i < 11; ++i) fields[i] = std::atoi(argv[i + 1]);
    late_copies = c.late != 0;
    emulation::set_random_order(c.order_seed);
    const Result without = run(c, false), with = run(c, true);
    const bool used = with.plan.prefix.blocks > 0, true_hint = kGroups[c.groups].true_hint;
    int wrong = differences(without.k, with.k) + differences(without.v, with.v);
    if (true_hint) wrong += differences(without.out, with.out) + differences(without.lse, with.lse);
    int absent = 0;
    for (T x : with.out) absent += wide(x) != wide(x);
    if (!true_hint) absent = 0;
    const char* const by = with.plan.prefix_kernel.name;
    std::printf("%s %d bits differ, %d absent, hint %s%s%s with %d threads, %s, then %s, %d splits\n",
                wrong + absent == 0 ? "ok" : "WRONG", wrong, absent, used ? "used" : "unused", by ? " by " : "", by ? by : "",
                with.plan.prefix.threads, without.plan.instance.name, with.plan.instance.name, int(with.plan.splits));
    return wrong + absent == 0 ? 0 : 1;
}
