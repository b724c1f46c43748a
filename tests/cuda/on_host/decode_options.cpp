// Runs decode with the options of caches that need instances of their own, from the problem over the plan to the kernels, and
// compares it with double precision by the rules of the CPU (problem/sequence_keys.h, cpu/append.cpp). Arguments:
// 1 the type of the cache (0: that of q, 1 e4m3, 2 e5m2, 3 int8); 2 what scales belong to (0: none, 1: all, 2: heads,
// 3: sequences and heads, 4: rows, 16 or more: groups of so many channels); 3 the channels of k_rope_cache; 4 whether values are
// channels of the keys; 5 the number of shards (out is float32 then); 6 the query rows of each sequence (0: packed rows); 7 the
// splits (0: the plan's, negative: the split size); 8 whether new rows are appended, with rotary embedding; 9 whether rows are
// nodes of trees with positions and a window; 10 whether rows are invariant: each is also computed alone, with the same bits;
// 11 whether there are ALiBi and sinks; 12 whether copies complete late, and warps run in another order; 13 the rows of a page.
// Memory that holds no key is NaN. Without an append, codes have the bits of a cache of the type of q with their values and
// scales.
#include "emulation.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "cpu/append.cpp"
#include "cuda/sm80/decode_capabilities.cpp"
#include "decode_instances.h"
#include "decode_problem.h"
#include "problem/sequence_keys.h"

using namespace libflash;
using namespace libflash::cuda;

// Replacements of functions that other sources of the library define.
void cpu::run_tasks(int64_t tasks, int, void (*body)(const void*, int64_t, int), const void* context) {
    for (int64_t task = 0; task < tasks; ++task) body(context, task, 0);
}
int cpu::threads_or_default(int) { return 1; }

using T = ElementOf<DecodeKernel::config.dtype>;
constexpr DType kType = sizeof(T) == 4 ? DType::f32 : std::is_same_v<T, __half> ? DType::f16 : DType::bf16;
constexpr int kDim = HEAD_DIM, kBatch = 5, kHeadsK = 2, kGroup = 3, kHeads = kHeadsK * kGroup, kCapacity = 192;
constexpr int kMostValues = DecodeKernel::config.head_dim_v;
constexpr int kPositions = 700, kWords = 2;
// float32: scores of 10 and more have rounding errors of several units.
constexpr double kRounding = kType == DType::f32 ? 0x1p-20 : kType == DType::f16 ? 0x1p-11 : 0x1p-8;
// Half of the smallest number, of the results and of P times the scales, which are divided by the largest.
constexpr double kSmallest = kType == DType::f16 ? 0x1p-25 : 0;
constexpr float kScale = 0.2f;

std::mt19937 generator(5);
float normal() { return std::normal_distribution<float>()(generator); }

double number_of(DType dtype, const void* data, int64_t at) {
    switch (dtype) {
        case DType::e4m3: return cpu::widen(cpu::e4m3{static_cast<const uint8_t*>(data)[at]});
        case DType::e5m2: return cpu::widen(cpu::e5m2{static_cast<const uint8_t*>(data)[at]});
        case DType::i8: return static_cast<const int8_t*>(data)[at];
        default: return to_float(static_cast<const T*>(data)[at]);
    }
}
void set_number(DType dtype, void* data, int64_t at, float x) {
    cpu::e4m3 a;
    cpu::e5m2 b;
    cpu::int8 c;
    if (dtype == DType::e4m3) cpu::store(a, double(x)), static_cast<uint8_t*>(data)[at] = a.bits;
    if (dtype == DType::e5m2) cpu::store(b, double(x)), static_cast<uint8_t*>(data)[at] = b.bits;
    if (dtype == DType::i8) cpu::store(c, double(x)), static_cast<int8_t*>(data)[at] = c.value;
    if (dtype == kType) static_cast<T*>(data)[at] = from_float(x, T());
}

struct Case {
    int stored, scale, rope, v_in_k, shards, dense, splits, append, tree, invariant, score_options, late, page;
};

// Memory of a part of the cache, and a copy that the CPU appends to.
struct Part {
    DType dtype;
    int channels, pages, page;
    std::vector<char> bytes;
    TensorView tensor() { return view(bytes.data(), dtype, {pages, page, kHeadsK, channels}); }
};

struct Problem {
    const Case& c;
    const DType stored;
    const int dim_v = kDim > kMostValues ? kMostValues : c.v_in_k ? kDim / 2 : kDim, k_channels = kDim - c.rope;
    const int columns = kCapacity / c.page, pages = kBatch * columns + 1;  // of the block table
    const bool of_groups = c.scale >= 16;
    std::vector<int> rows{1, 0, 7, 30, 3};
    std::vector<int32_t> cu{0}, lengths{300, 20, 0, 131, 77}, position, bits, table;
    std::vector<T> q, new_k, new_v, new_rope;
    std::vector<float> lse, cos, sin, slopes, sinks, k_scales, v_scales;
    std::vector<char> out;
    Part k, v, rope;

    explicit Problem(const Case& given) : c(given), stored(std::array{kType, DType::e4m3, DType::e5m2, DType::i8}[given.stored]) {
        if (c.dense) rows.assign(kBatch, c.dense);
        if (c.shards == 1)
            for (int32_t& n : lengths) n = std::min(n, columns * c.page - 5);  // some new rows do not fit
        for (const int n : rows) cu.push_back(cu.back() + n);
        const auto some = [](size_t count) {
            std::vector<T> x(count);
            for (T& y : x) y = from_float(normal(), T());
            return x;
        };
        const size_t total = cu.back();
        q = some(total * kHeads * kDim), new_k = some(total * kHeadsK * k_channels), new_v = some(total * kHeadsK * dim_v);
        new_rope = some(total * kHeadsK * (c.rope + 1));
        lse.assign(total * kHeads, NAN), out.assign(total * kHeads * dim_v * out_bytes(), char(0xff));
        for (int i = 0; i < kPositions * kDim / 4; ++i) cos.push_back(std::cos(i * 0.01f)), sin.push_back(std::sin(i * 0.01f));
        for (int h = 0; h < kHeads; ++h) slopes.push_back(0.02f * (h + 1)), sinks.push_back(0.5f * h - 1);
        for (int b = 0; b < kBatch; ++b)
            for (int i = 0; i < rows[b]; ++i) position.push_back(std::max(0, lengths[b] + i + 4 - i * 3 % 7));
        for (size_t i = 0; i < total * kWords; ++i) bits.push_back(static_cast<int32_t>(generator()));
        const int turn = columns % 7 ? 7 : 11;  // has no common factor with the number of pages in use
        for (int i = 0; i < kBatch * columns; ++i) table.push_back((i * turn + 3) % (kBatch * columns));
        k = filled(stored, k_channels), v = filled(stored, dim_v), rope = filled(kType, c.rope);
        make_scales(k_scales, k_channels), make_scales(v_scales, dim_v);
        if (c.shards == 1) spoil_unused_rows();
    }
    // NaN in rows of pages that hold no key: also in those that are appended.
    void spoil_unused_rows() {
        std::vector<bool> used(size_t(pages) * c.page);
        for (int b = 0; b < kBatch; ++b)
            for (int j = 0; j < lengths[b]; ++j) used[size_t(table[b * columns + j / c.page]) * c.page + j % c.page] = true;
        for (size_t row = 0; row < used.size(); ++row) {
            if (used[row]) continue;
            for (Part* part : {&k, &v, &rope}) {
                const size_t bytes = part->bytes.size() / used.size();
                std::memset(part->bytes.data() + row * bytes, 0xff, bytes);  // NaN but in int8
            }
            for (std::vector<float>* scales : {&k_scales, &v_scales}) {
                if (c.scale < 4) continue;
                const size_t of_row = scales->size() / used.size();
                std::fill_n(scales->begin() + row * of_row, of_row, NAN);
            }
        }
    }
    size_t out_bytes() const { return c.shards > 1 ? 4 : sizeof(T); }
    Part filled(DType dtype, int channels) const {
        Part part{dtype, channels, pages, c.page, {}};
        const size_t count = size_t(pages) * c.page * kHeadsK * channels;
        part.bytes.resize(count * element_bytes(dtype));
        const float size = dtype == DType::i8 ? 30 : 1;
        for (size_t i = 0; i < count; ++i) set_number(dtype, part.bytes.data(), i, size * normal());
        return part;
    }
    // The same values in the type of q.
    static Part widened(const Part& part) {
        Part wide{kType, part.channels, part.pages, part.page, {}};
        const size_t count = part.bytes.size() / element_bytes(part.dtype);
        wide.bytes.resize(count * sizeof(T));
        for (size_t i = 0; i < count; ++i) set_number(kType, wide.bytes.data(), i, number_of(part.dtype, part.bytes.data(), i));
        return wide;
    }
    void make_scales(std::vector<float>& scales, int channels) const {
        const size_t of_rows = size_t(pages) * c.page * kHeadsK, groups = of_groups ? channels / c.scale : 1;
        const size_t counts[] = {0, 1, kHeadsK, kBatch * kHeadsK, of_rows, of_rows * groups};
        for (size_t i = 0; i < counts[std::min(c.scale, 5)]; ++i)
            scales.push_back((stored == DType::i8 ? 1 / 30.0f : 1) * std::exp2(0.7f * normal()));
    }
    CacheScale scale(std::vector<float>& scales, int channels) const {
        CacheScale s;
        s.present = c.scale > 0;
        if (!s.present) return s;
        s.data = scales.data(), s.of_rows = c.scale >= 4, s.groups = of_groups ? channels / c.scale : 1;
        s.group_stride = 1, s.head_stride = c.scale > 1 ? s.groups : 0, s.batch_stride = c.scale == 3 ? kHeadsK : 0;
        if (s.of_rows) s.row_stride = kHeadsK * s.groups, s.block_stride = c.page * s.row_stride;
        return s;
    }

    DecodeProblem problem(int shard) {
        DecodeProblem p;
        p.device = {FLASH_DEVICE_CUDA, 0}, p.dtype = kType, p.batch = kBatch, p.heads_q = kHeads, p.heads_k = kHeadsK;
        p.head_dim = kDim, p.head_dim_v = dim_v, p.softmax_scale = kScale, p.causal = true, p.mask_rule.right = 0;
        const int64_t total = cu.back(), n = c.dense;
        const DType of_out = c.shards > 1 ? DType::f32 : kType;
        p.q = n ? view(q.data(), kType, {kBatch, n, kHeads, kDim}) : view(q.data(), kType, {total, kHeads, kDim});
        p.out = n ? view(out.data(), of_out, {kBatch, n, kHeads, dim_v}) : view(out.data(), of_out, {total, kHeads, dim_v});
        p.lse = n ? view(lse.data(), DType::f32, {kBatch, kHeads, n}) : view(lse.data(), DType::f32, {kHeads, total});
        p.seqlen_q = p.q_rows.capacity = n ? n : total, p.q_rows.batch = p.new_rows.batch = kBatch;
        if (!n) p.q_rows.cu = cu.data();
        p.cache.dtype = stored, p.cache.capacity = columns * c.page, p.cache.page_size = c.page, p.cache.pages = pages;
        p.cache.block_table = table.data(), p.cache.block_table_stride[0] = columns, p.cache.block_table_stride[1] = 1;
        p.cache.k = k.tensor(), p.cache.v = c.v_in_k ? p.cache.k : v.tensor(), p.cache.v.shape[3] = dim_v;
        p.cache.v_in_k = c.v_in_k;
        if (c.rope) p.cache.k_rope = rope.tensor();
        p.cache.k_scale = scale(k_scales, k_channels), p.cache.v_scale = scale(v_scales, dim_v);
        if (c.v_in_k && c.scale) {
            p.cache.v_scale = p.cache.k_scale;
            if (of_groups) p.cache.v_scale.groups = dim_v / c.scale;
        }
        p.cache_seqlens = lengths.data();
        p.shard = {c.shards, shard, 3};
        if (c.append) append_to(p);
        if (c.tree) {
            p.positions = position.data(), p.window.left = p.mask_rule.left = 40;
            p.tree.data = bits.data(), p.tree.words = kWords, p.tree.stride[0] = kWords, p.tree.stride[1] = 1;
            p.tree.rows = p.q_rows;
        }
        p.invariant_rows = c.invariant;
        if (c.score_options) {
            p.alibi_slopes.present = p.sink.present = true, p.alibi_slopes.dtype = p.sink.dtype = DType::f32;
            p.alibi_slopes.data = slopes.data(), p.sink.data = sinks.data();
            p.alibi_slopes.head_stride = p.sink.head_stride = 1;
            if (shard > 0) p.sink = {};
        }
        (c.splits < 0 ? p.request.split_size : p.request.num_splits) = std::abs(c.splits);
        return p;
    }
    void append_to(DecodeProblem& p) {
        const int64_t total = cu.back(), n = c.dense;
        const auto rows_of = [&](std::vector<T>& x, int64_t channels) {
            return n ? view(x.data(), kType, {kBatch, n, kHeadsK, channels}) : view(x.data(), kType, {total, kHeadsK, channels});
        };
        p.seqlen_new = p.q_rows.capacity, p.new_rows = p.q_rows;
        p.k_new = rows_of(new_k, k_channels);
        if (!c.v_in_k) p.v_new = rows_of(new_v, dim_v);
        if (c.rope) p.k_rope_new = rows_of(new_rope, c.rope);
        // Of rope parts all channels with one pairing and half of them with the other.
        const int64_t pairs = c.rope ? c.rope / (c.late ? 2 : 4) : kDim / 4;
        p.rotary_cos = view(cos.data(), DType::f32, {kPositions, pairs}), p.rotary_sin = p.rotary_cos;
        p.rotary_sin.data = sin.data(), p.rotary_interleaved = c.rope && c.late;
    }

    // The sums of a row over the keys that it sees in the cache of a shard.
    struct Row {
        double sum = 0, largest = 0, o[kDim] = {}, size[kDim] = {};  // of weights; of values times weights, of their magnitudes
        double elements[kDim] = {}, scale = 0;                       // magnitudes of v_cache; the largest of v_scale
    };
    Row row_of(const DecodeProblem& p, int b, int i, int h) const {
        Row row;
        double query[kDim];
        cpu::read_query(p, b, i, h, query);
        const SequenceKeys keys(p, b);
        const auto range = keys.range(i);
        const int64_t head = h / kGroup, last = std::min(range.last, p.cache.capacity);
        const auto factor = [&](const CacheScale& scale, const cpu::CachedRow& at, int64_t group) {
            const float* const of_row = cpu::scales_of(scale, b, at, head);
            return of_row ? double{of_row[group * scale.group_stride]} : 1.0;
        };
        // Also of keys that only other rows see.
        for (int64_t j = keys.range(0).first; j < std::min(keys.range(rows[b] - 1).last, p.cache.capacity); ++j)
            for (int64_t group = 0; group < p.cache.v_scale.groups; ++group)
                row.scale = std::max(row.scale, factor(p.cache.v_scale, cpu::cached_row(p.cache, b, j), group));
        for (int64_t j = range.first; j < last; ++j) {
            if (keys.has_gaps() && !keys.sees(i, j)) continue;
            const cpu::CachedRow at = cpu::cached_row(p.cache, b, j);
            const auto cached = [&](const TensorView& x, const CacheScale& scale, int64_t e) {
                return factor(scale, at, e / (x.shape[3] / scale.groups)) *
                       number_of(x.dtype, x.data, cpu::offset_of(x, at, head) + e);
            };
            double score = 0;
            for (int e = 0; e < kDim; ++e)
                score += query[e] *
                         (e < k_channels ? cached(p.cache.k, p.cache.k_scale, e) : cached(p.cache.k_rope, {}, e - k_channels));
            score *= kScale;
            if (c.score_options) score -= slopes[h] * std::abs(keys.position(i) - keys.key_position(j));
            const double weight = std::exp(score);
            row.sum += weight, row.largest = std::max(row.largest, weight);
            for (int e = 0; e < dim_v; ++e) {
                const double value = cached(p.cache.v, p.cache.v_scale, e);
                row.o[e] += weight * value, row.size[e] += weight * std::fabs(value);
                row.elements[e] += std::fabs(cached(p.cache.v, {}, e));
            }
        }
        return row;
    }
    double got(const DecodeProblem& p, int64_t at) const {
        return p.out.dtype == kType ? number_of(kType, out.data(), at) : reinterpret_cast<const float*>(out.data())[at];
    }
    // The largest error of a row, in units of its error bound.
    double worst(const DecodeProblem& p, int b, int i, int h) const {
        const Row row = row_of(p, b, i, h);
        const double total = row.sum + (p.sink.present ? std::exp(double{sinks[h]}) : 0);
        const double got_lse = lse[c.dense ? (size_t(b) * kHeads + h) * c.dense + i : size_t(h) * cu.back() + cu[b] + i];
        double worst = total == 0 ? (got_lse == -INFINITY ? 0 : INFINITY)
                                  : std::fabs(got_lse - std::log(total)) / (2e-5 + 0x1p-20 * std::fabs(std::log(total)));
        for (int e = 0; e < dim_v; ++e) {
            const double exact = total == 0 ? 0 : row.o[e] / total;
            const double lost = kSmallest * (row.scale * row.elements[e] * row.largest / total + 1);
            const double limit = total == 0 ? 1e-30 : 8 * kRounding * row.size[e] / total + lost;
            const double error = std::fabs(got(p, ((cu[b] + i) * kHeads + h) * int64_t{dim_v} + e) - exact) / limit;
            worst = error <= worst ? worst : error;  // NaN is the worst
        }
        return worst;
    }
};

// The CPU refuses rows that do not fit; the kernels do not write them.
void append_what_fits(const DecodeProblem& problem) {
    for (int64_t b = 0; b < problem.batch && problem.k_new.present; ++b)
        for (int64_t i = 0; i < problem.new_rows.length(b); ++i) {
            const int64_t key = problem.cached(b) + i, row = problem.shard.row_of(key);
            if (!problem.shard.has(key) || row >= problem.cache.capacity) continue;
            const cpu::NewRow own{b, problem.new_rows.start(b) + i, cpu::cached_row(problem.cache, b, row),
                                  problem.new_key_position(b, i)};
            for (int64_t h = 0; h < problem.heads_k; ++h)
                cpu::with_row_types(problem.dtype, problem.cache.dtype, [&](auto* type, auto* stored) {
                    using Row = std::remove_pointer_t<decltype(type)>;
                    using Stored = std::remove_pointer_t<decltype(stored)>;
                    cpu::write_row<Row, Stored>(problem, own, h);
                });
        }
}

cuda::DecodePlan decode_on_host(const DecodeProblem& problem) {
    std::string why;
    if (!sm80::supports_decode(DecodeKernel::config, problem, &why))
        std::printf("WRONG refused: %s\n", why.c_str()), std::exit(1);
    const cuda::Kernel kernel = decode_kernel<DecodeKernel>();
    const DeviceProperties device = hopper(64);
    const cuda::DecodePlan plan = sm80::plan_decode(kernel, problem, device, {});
    std::vector<char> memory(plan.workspace.bytes() + 255, char(0xff));  // NaN
    char* const workspace = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
    std::memset(emulation::shared_memory, 0xff, sizeof emulation::shared_memory);  // NaN
    cuda::decode(kernel, problem, plan, workspace, nullptr);
    return plan;
}

bool run(Problem& x, int shard, const Case& c) {
    const DecodeProblem problem = x.problem(shard);
    Problem before = x;  // to which the CPU appends
    const cuda::DecodePlan plan = decode_on_host(problem);
    append_what_fits(before.problem(shard));
    int wrong = 0;
    const auto compare = [&](const auto& a, const auto& b) {
        wrong += std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) != 0;
    };
    compare(x.k.bytes, before.k.bytes), compare(x.v.bytes, before.v.bytes), compare(x.rope.bytes, before.rope.bytes);
    compare(x.k_scales, before.k_scales), compare(x.v_scales, before.v_scales);
    double most = 0;
    for (int b = 0; b < kBatch; ++b)
        for (int i = 0; i < x.rows[b]; ++i)
            for (int h = 0; h < kHeads; ++h) {
                const double worst = x.worst(problem, b, i, h);
                most = worst <= most ? most : worst;
            }
    const bool good = wrong == 0 && most <= 1;
    std::printf("%s %d parts of the cache wrong, results %.2g times the limit, %s, %d splits\n", good ? "ok" : "WRONG", wrong,
                most, plan.instance.name, int(plan.splits));
    return good;
}

bool codes_have_the_bits_of_their_values(Problem& x) {
    const auto out = x.out;
    const auto lse = x.lse;
    DecodeProblem p = x.problem(0);
    Part k = Problem::widened(x.k), v = Problem::widened(x.v);
    p.cache.dtype = kType, p.cache.k.dtype = p.cache.v.dtype = kType;
    p.cache.k.data = k.bytes.data(), p.cache.v.data = x.c.v_in_k ? p.cache.k.data : v.bytes.data();
    const cuda::DecodePlan plan = decode_on_host(p);
    const bool same = std::memcmp(x.out.data(), out.data(), out.size()) == 0 &&
                      std::memcmp(x.lse.data(), lse.data(), lse.size() * sizeof(float)) == 0;
    std::printf("%s bits of the values, %s\n", same ? "ok" : "WRONG", plan.instance.name);
    return same;
}

// Computes each row in a call of its own, with a cache that ends after the last key that it sees, and compares the bits.
bool rows_have_the_same_bits_alone(Problem& x, const Case& c) {
    const size_t row_bytes = size_t(kHeads) * x.dim_v * x.out_bytes();
    std::vector<char> out(row_bytes);
    std::vector<float> lse(kHeads);
    int wrong = 0;
    for (int b = 0; b < kBatch; ++b)
        for (int i = 0; i < x.rows[b]; ++i) {
            DecodeProblem p = x.problem(0);
            const int32_t length = std::max(0, x.lengths[b] - x.rows[b] + i + 1);
            const size_t row = x.cu[b] + i;
            p.batch = p.seqlen_q = 1, p.cache_seqlens = &length, p.cache.block_table += b * x.columns;
            p.q = view(&x.q[row * kHeads * kDim], kType, {1, 1, kHeads, kDim});
            p.out = view(out.data(), kType, {1, 1, kHeads, x.dim_v}), p.lse = view(lse.data(), DType::f32, {1, kHeads, 1});
            p.q_rows = {1, 1}, p.new_rows = {1};
            for (CacheScale* scale : {&p.cache.k_scale, &p.cache.v_scale})
                if (scale->present) scale->data += b * scale->batch_stride;
            decode_on_host(p);
            wrong += std::memcmp(out.data(), &x.out[row * row_bytes], row_bytes) != 0;
            for (int h = 0; h < kHeads; ++h)
                wrong += lse[h] != x.lse[c.dense ? (size_t(b) * kHeads + h) * c.dense + i : size_t(h) * x.cu.back() + row];
        }
    std::printf("%s bits of rows alone: %d wrong\n", wrong == 0 ? "ok" : "WRONG", wrong);
    return wrong == 0;
}

int main(int, char** argv) {
    Case c;
    int* const fields = &c.stored;
    for (int i = 0; i < 13; ++i) fields[i] = std::atoi(argv[i + 1]);
    Problem x(c);
    bool good = true;
    late_copies = c.late != 0;
    emulation::set_random_order(c.late);
    for (int shard = 0; shard < c.shards; ++shard) good &= run(x, shard, c);
    if (c.stored && c.shards == 1 && !c.append) good &= codes_have_the_bits_of_their_values(x);
    if (c.invariant && !c.append && !c.tree) good &= rows_have_the_same_bits_alone(x, c);
    return good ? 0 : 1;
}
