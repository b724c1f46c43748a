// Runs decode over a cache of 8-bit codes on the host. Arguments: 1 query rows; 2 splits (negative: the split size); 3 whether
// the cache is paged; 4 appended rows per sequence, with rotary embedding; 5 type of the codes (CodeType); 6 what scales belong
// to (0: no scales, 1: all, 2 heads, 3 sequences and heads, 4 rows); 7 key heads of a thread block; 8 whether copies complete
// late; 9 whether the attention kernel appends; 10 the queries and, if the cache is paged, the loads:
// 0: normal numbers; loads for any alignment;
// 1: with bfloat16, some channels are so large that the others are too small for `half` beside them, but their keys are 0; pages
//    that do not begin at multiples of 16 keys;
// 2: large numbers, so that most weights are tiny; pages that begin at multiples of 16 keys.
//
// Checked: results against double; without scales, and with powers of two, bit for bit against a cache of the type of q with the
// values of the codes; appended codes and scales bit for bit against cpu/quantize.h, and that nothing else changed.
#include "decode_kernel.h"

#include <cstdio>
#include <cstdlib>

#include "cpu/quantize.h"

using H = std::conditional_t<std::is_same_v<T, __half>, cpu::half, cpu::bfloat16>;
constexpr int kBatch = 4, kCacheBlocks = kBatch * kColumns + 2;
constexpr int kLengths[kBatch] = {127, 0, 77, kCapacity - 1};  // one new key of the last sequence fits
// Half of the smallest number, of the results and of P times the scales, which are divided by the largest (decode_scales.cuh);
// bfloat16: weights below 2^-126 are 0.
constexpr double kSmallest = std::is_same_v<T, __half> ? 0x1p-25 : 0x1p-120;

float normal() { return std::normal_distribution<float>()(generator); }

uint8_t encode(float x, CodeType code) {
    cpu::e4m3 a;
    cpu::e5m2 b;
    cpu::int8 c;
    if (code == CodeType::e4m3) return cpu::store(a, double(x)), a.bits;
    if (code == CodeType::e5m2) return cpu::store(b, double(x)), b.bits;
    return cpu::store(c, double(x)), static_cast<uint8_t>(c.value);
}
float decoded(uint8_t x, CodeType code) {
    if (code == CodeType::e4m3) return cpu::widen(cpu::e4m3{x});
    return code == CodeType::e5m2 ? cpu::widen(cpu::e5m2{x}) : static_cast<float>(static_cast<int8_t>(x));
}
T rounded(double x) { return rounded(x, T()); }

// The codes of keys or of values, with their scales.
struct Cache {
    std::vector<uint8_t> codes;
    std::vector<float> scales;
    CacheScaleParams scale{};
    CacheScale host;
};

struct Problem {
    const int rows, splits, news, kind, key_heads, numbers;
    const bool paged, inside;
    const CodeType code;
    const int page = numbers == 1 ? 24 : kPage, cache_blocks = paged ? kCacheBlocks : kBatch,
              block_rows = paged ? page : kCapacity;
    Cache k, v;
    std::vector<T> q, new_k, new_v, out, turned;
    const Rotary rotary{kCapacity};
    std::vector<float> lse, partial_out, partial_lse;
    std::vector<int32_t> table;

    Problem(char** a)
        : rows(std::atoi(a[1])), splits(std::atoi(a[2])), news(std::atoi(a[4])), kind(std::atoi(a[6])),
          key_heads(std::atoi(a[7])), numbers(std::atoi(a[10])), paged(std::atoi(a[3]) != 0), inside(std::atoi(a[9]) != 0),
          code(CodeType(std::atoi(a[5]))) {
        for (int c = 0; c < kBatch * kColumns; ++c) table.push_back((c * 7 + 3) % (kBatch * kColumns));
        q = random(size_t(kBatch) * rows * kHeads * kDim);
        for (size_t i = 0; i < q.size(); ++i)
            if (numbers == 2 || meets_zeros(i % kDim)) q[i] = rounded(wide(q[i]) * (numbers == 2 ? 12 : 0x1p30));
        new_k = random(size_t(kBatch) * news * kHeadsK * kDim), new_v = random(new_k.size());
        for (size_t i = 0; i < new_k.size(); ++i)
            if (meets_zeros(i % kDim)) new_k[i] = T(0.0f);
        turned.resize(q.size());
        fill(k), fill(v);
    }
    bool meets_zeros(size_t channel) const {
        return numbers == 1 && std::is_same_v<T, __nv_bfloat16> && channel % (kDim / 2) == 0;  // a pair of the rotary embedding
    }
    bool of_rows() const { return kind == 4; }
    // Rows that hold no key have NaN codes and NaN scales.
    void fill(Cache& x) {
        x.codes.assign(size_t(cache_blocks) * block_rows * kHeadsK * kDim, 0x7f);
        const size_t counts[5] = {0, 1, kHeadsK, kBatch * kHeadsK, size_t(cache_blocks) * block_rows * kHeadsK};
        x.scales.assign(counts[kind], of_rows() ? NAN : 0.0f);
        const float base = code == CodeType::int8 ? 1 / 30.0f : 1;
        const auto any = [&] { return base * std::exp2(of_rows() ? 2 * normal() : 0.3f * normal()); };
        if (!of_rows())
            for (float& s : x.scales) s = any();
        for (int b = 0; b < kBatch; ++b)
            for (int j = 0; j < kLengths[b]; ++j)
                for (int h = 0; h < kHeadsK; ++h) {
                    if (of_rows()) x.scales[at(b, j, h)] = any() * 0.5f;
                    for (int c = 0; c < kDim; ++c)
                        x.codes[at(b, j, h) * kDim + c] = encode(meets_zeros(c) ? 0.0f : normal() / base, code);
                }
        CacheScale& s = x.host;
        s.present = kind > 0, s.of_rows = of_rows(), s.group_stride = 1;
        s.head_stride = kind > 1, s.batch_stride = kind == 3 ? kHeadsK : 0;
        if (of_rows()) s.block_stride = block_rows * kHeadsK, s.row_stride = kHeadsK;
        if (kind) x.scale = {x.scales.data(), s.batch_stride, s.block_stride, s.row_stride, s.head_stride, 1, 1, of_rows()};
    }
    // The number of a row of a head, in the cache.
    size_t at(int b, int j, int h) const {
        const size_t row = paged ? size_t(table[b * kColumns + j / page]) * page + j % page : size_t(b) * kCapacity + j;
        return row * kHeadsK + h;
    }
    float scale_of(const Cache& x, int b, int j, int h) const {
        if (kind == 0) return 1;
        return x.scales[of_rows() ? at(b, j, h) : b * x.host.batch_stride + h * x.host.head_stride];
    }
    int length(int b) const { return kLengths[b] + news; }
    int existing(int b) const { return std::min(length(b), kCapacity); }

    DecodeParams params() {
        DecodeParams p{};
        out.assign(q.size(), rounded(NAN)), lse.assign(size_t(kBatch) * kHeads * rows, NAN);
        p.q = p.out = {q.data(), int64_t{rows} * kHeads * kDim, int64_t{kHeads} * kDim, kDim};
        p.out.data = out.data();
        p.lse = {lse.data(), int64_t{kHeads} * rows, 1, rows};
        p.cache.k = p.cache.v = {k.codes.data(), int64_t{block_rows} * kHeadsK * kDim, int64_t{kHeadsK} * kDim, kDim};
        p.cache.v.data = v.codes.data();
        p.cache.seqlens = kLengths;
        if (paged) p.cache.table = table.data(), p.cache.table_batch = kColumns, p.cache.table_column = 1;
        p.cache.page_size = divisor_params(page);
        p.shard.most_keys = kCapacity, p.k_channels = kDim;
        p.cache.capacity = kCapacity, p.cache.pages = cache_blocks, p.cache.seqlen_new = news;
        p.batch = kBatch, p.seqlen_q = rows, p.heads_q = kHeads, p.heads_k = kHeadsK, p.group_size = kGroup;
        p.head_dim = p.head_dim_v = kDim;
        p.softmax_scale = 0.1f, p.scale_log2 = 0.1f * 1.4426950408889634f;
        p.left = kUnboundedWindow;
        p.splits = splits > 0 ? splits : (kCapacity - splits - 1) / -splits;
        p.split_size = splits > 0 ? 0 : -splits;
        const int tile = shares() ? DecodeKernel::config.tile_k : kDecodeSlab;
        p.by_tiles = divisor_params((rows * kGroup + tile - 1) / tile), p.by_splits = divisor_params(p.splits);
        p.by_heads = divisor_params(kHeadsK), p.by_group = divisor_params(kGroup);
        p.by_head_groups = divisor_params(kHeadsK / key_heads);
        partial_out.assign(size_t(kBatch) * kHeads * rows * p.splits * kDim, NAN);
        partial_lse.assign(size_t(kBatch) * kHeads * rows * p.splits, NAN);
        p.partial_out = partial_out.data(), p.partial_lse = partial_lse.data();
        p.vector_q = p.vector_out = p.fetch_early = true, p.vector_kv = !paged || numbers > 0;
        p.code = code, p.k_scale = k.scale, p.v_scale = v.scale;
        p.stages = decode_code_stages(kDim, DecodeKernel::config.stages, shares());
        if (news == 0) return p;
        const RowsParams given{new_k.data(), int64_t{news} * kHeadsK * kDim, int64_t{kHeadsK} * kDim, kDim};
        p.append.k_new = p.append.v_new = given;
        p.append.v_new.data = new_v.data();
        p.append.q = p.q;
        if (!inside) {
            p.append.rotated_q = p.q;
            p.q.data = p.append.rotated_q.data = turned.data();
        }
        p.append.cos = rotary.cos.data(), p.append.sin = rotary.sin.data();
        p.append.cos_row = p.append.sin_row = p.append.pairs = kDim / 2;
        p.append.positions = kCapacity, p.append.is_float = p.append.query_rows_advance = true;
        return p;
    }
    bool shares() const { return decode_shares_keys(rows * kGroup); }
    void run(const DecodeParams& p) const {
        DecodePlan plan;
        plan.splits = p.splits;
        plan.instance.number =
            int(decode_kind(shares(), key_heads, inside, p.code != CodeType::none ? DecodeStorage::codes : DecodeStorage::plain,
                            are_few_rows(rows * kGroup)));
        const auto launch = [&](DecodeStep step, int64_t blocks) { return decode_shape(step, plan, blocks); };
        plan.attention =
            launch(DecodeStep::attention, int64_t{p.by_tiles.divisor} * p.by_head_groups.divisor * p.splits * kBatch);
        if (p.splits > 1) plan.combine = launch(DecodeStep::combine, int64_t{kBatch} * kHeads * rows);
        if (news > 0 && !inside) {
            plan.appended_codes = kBatch * news * kHeadsK;
            plan.append_codes = launch(DecodeStep::append_codes, ceil_div(2 * plan.appended_codes, kAppendThreads / 32));
            plan.append_threads_per_row = kDim / 2;
            plan.append = launch(DecodeStep::append, ceil_div(int64_t{kBatch} * rows * kHeads, kAppendThreads * 2 / kDim));
        }
        std::memset(emulation::shared_memory, 0xff, sizeof emulation::shared_memory);  // NaN
        launch_decode<DecodeKernel>(plan, p, nullptr);
    }

    std::vector<T> rotated(const T* from, int position) const {
        std::vector<T> to(kDim);
        rotary.rotate(from, to.data(), std::min(position, kCapacity - 1));
        return to;
    }
    // What an append must leave.
    void append_exactly(Cache& keys, Cache& values) const {
        for (int b = 0; b < kBatch; ++b)
            for (int i = 0; i < news && kLengths[b] + i < kCapacity; ++i)
                for (int h = 0; h < kHeadsK; ++h) {
                    const size_t from = ((size_t(b) * news + i) * kHeadsK + h) * kDim;
                    const std::vector<T> key = rotated(&new_k[from], kLengths[b] + i);
                    write(keys, b, kLengths[b] + i, h, key.data());
                    write(values, b, kLengths[b] + i, h, &new_v[from]);
                }
    }
    void write(Cache& x, int b, int j, int h, const T* row) const {
        const H* const from = reinterpret_cast<const H*>(row);
        float* const scales =
            kind == 0 ? nullptr : x.scales.data() + (of_rows() ? at(b, j, h) : b * x.host.batch_stride + h * x.host.head_stride);
        uint8_t* const to = &x.codes[at(b, j, h) * kDim];
        if (code == CodeType::e4m3) cpu::write_cached(from, kDim, x.host, scales, reinterpret_cast<cpu::e4m3*>(to));
        if (code == CodeType::e5m2) cpu::write_cached(from, kDim, x.host, scales, reinterpret_cast<cpu::e5m2*>(to));
        if (code == CodeType::int8) cpu::write_cached(from, kDim, x.host, scales, reinterpret_cast<cpu::int8*>(to));
    }

    // The largest error of a row, in units of its error bound.
    double worst(int b, int i, int h) const {
        const size_t row = ((size_t(b) * rows + i) * kHeads + h) * kDim;
        const std::vector<T> query = news ? rotated(&q[row], kLengths[b] + i) : std::vector<T>(&q[row], &q[row] + kDim);
        double sum = 0, largest = 0, o[kDim] = {}, size[kDim] = {}, codes[kDim] = {};  // sums of magnitudes
        for (int j = 0; j <= length(b) - rows + i && j < existing(b); ++j) {
            const size_t first = at(b, j, h / kGroup) * kDim;
            const double k_scale = scale_of(k, b, j, h / kGroup), v_scale = scale_of(v, b, j, h / kGroup);
            double score = 0;
            for (int c = 0; c < kDim; ++c) score += wide(query[c]) * decoded(k.codes[first + c], code) * k_scale;
            const double p = std::exp(double{0.1f} * score);
            sum += p, largest = std::max(largest, p);
            for (int c = 0; c < kDim; ++c) {
                const double element = decoded(v.codes[first + c], code), value = element * v_scale;
                o[c] += p * value, size[c] += p * std::fabs(value), codes[c] += std::fabs(element);
            }
        }
        // The largest scale of the sequence, also of keys that only later rows see.
        double scale = 0;
        for (int j = 0; j < existing(b); ++j) scale = std::max(scale, double{std::fabs(scale_of(v, b, j, h / kGroup))});
        const double got_lse = lse[(size_t(b) * kHeads + h) * rows + i];
        double worst = sum == 0 ? (got_lse == -INFINITY ? 0 : INFINITY)
                                : std::fabs(got_lse - std::log(sum)) / (2e-5 + 0x1p-20 * std::fabs(std::log(sum)));
        for (int c = 0; c < kDim; ++c) {
            const double exact = sum == 0 ? 0 : o[c] / sum, lost = kSmallest * (scale * codes[c] * largest / sum + 1),
                         limit = sum == 0 ? 1e-30 : 8 * kRounding * size[c] / sum + lost;
            const double error = std::fabs(wide(out[row + c]) - exact) / limit;
            worst = larger_error(worst, error);
        }
        return worst;
    }
    bool results_are_right() {
        double most = 0;
        for (int b = 0; b < kBatch; ++b)
            for (int i = 0; i < rows; ++i)
                for (int h = 0; h < kHeads; ++h) {
                    const double error = worst(b, i, h);
                    most = larger_error(most, error);
                }
        std::printf("%s results: %.2g times the limit\n", most <= 1 ? "ok" : "WRONG", most);
        return most <= 1;
    }
    // `scales`: 0: none; else all are this power of two.
    bool bits_are_those_of_values(float scales) {
        DecodeParams p = params();
        p.k_scale = p.v_scale = {};
        std::vector<float> numbers(2, scales);
        if (scales != 0) p.v_scale = {&numbers[0], 0, 0, 0, 1, 1, 1, false}, p.k_scale = p.v_scale;
        if (scales != 0) p.softmax_scale /= scales, p.scale_log2 /= scales;
        run(p);
        const std::vector<T> got = out;
        const std::vector<float> got_lse = lse;
        std::vector<T> keys, values;
        for (const uint8_t x : k.codes) keys.push_back(rounded(decoded(x, code)));
        for (const uint8_t x : v.codes) values.push_back(rounded(decoded(x, code)));
        p = params();
        p.code = CodeType::none, p.k_scale = p.v_scale = {};
        p.cache.k.data = keys.data(), p.cache.v.data = values.data();
        p.stages = DecodeKernel::config.stages;
        run(p);
        int wrong = 0;
        const double factor = scales != 0 ? scales : 1;
        for (size_t i = 0; i < out.size(); ++i) {
            const bool small = factor != 1 && std::fabs(wide(got[i])) < 0x1p-14;  // rounded to multiples of the smallest number
            wrong += !(std::fabs(wide(got[i]) - wide(out[i]) * factor) <= (small ? 2 * kSmallest : 0));
        }
        for (size_t i = 0; i < lse.size(); ++i) wrong += got_lse[i] != lse[i];
        std::printf("%s bits of values, scale %g: %d wrong\n", wrong == 0 ? "ok" : "WRONG", scales, wrong);
        return wrong == 0;
    }
};

int main(int, char** argv) {
    Problem p(argv);
    late_copies = std::atoi(argv[8]) != 0;
    bool good = true;
    if (p.news == 0) good = p.bits_are_those_of_values(0) & p.bits_are_those_of_values(0.5f);
    Cache wanted_k = p.k, wanted_v = p.v;
    p.append_exactly(wanted_k, wanted_v);
    p.run(p.params());
    int wrong = 0;
    for (const auto& [got, wanted] : {std::pair(&p.k, &wanted_k), std::pair(&p.v, &wanted_v)}) {
        for (size_t i = 0; i < got->codes.size(); ++i) wrong += got->codes[i] != wanted->codes[i];
        for (size_t i = 0; i < got->scales.size(); ++i) wrong += std::memcmp(&got->scales[i], &wanted->scales[i], 4) != 0;
    }
    std::printf("%s cache: %d wrong\n", wrong == 0 ? "ok" : "WRONG", wrong);
    good &= wrong == 0;
    return p.results_are_right() && good ? 0 : 1;
}
