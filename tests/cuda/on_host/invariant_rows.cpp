// Runs decode of invariant rows on the host, from the problem over the plan to the kernels. The rows that the decode kernel of
// sm80 computes, all together and alone, must have the same bits as those that the prefill kernel of sm90 computes, in chunks of
// several lengths, in other orders, in pages of several sizes. The arguments are the number of the case, and 0 or the seed of a
// random order. Exit code 0 means that no bit differs and that the errors against double precision are small.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <random>

#include "cuda/sm90/prefill_plan.cpp"
#include "decode_instances.h"
#include "decode_problem.h"
#include "numbers.h"
#include "prefill_instances.h"

using T = ElementOf<DecodeKernel::config.dtype>;
constexpr DType kType = std::is_same<T, __half>::value ? DType::f16 : DType::bf16;
constexpr double kRounding = kType == DType::f16 ? 0x1p-11 : 0x1p-8, kScale = 0.1;
constexpr int kDim = HEAD_DIM, kDimV = HEAD_DIM_V;
constexpr int kSomeMultiprocessors = 80;  // with them some thread blocks have several segments, but not all
constexpr float kDirection = 6000;        // of the first channel of q, times the scale

struct Sequence {
    int rows, length;
};
struct Case {
    std::vector<Sequence> sequences;
    int window;  // keys on the left of the diagonal; -1: all
    bool causal;
    float size;  // of q and k
    float jump;  // differences between the scores of neighbouring keys; 0: none
    bool sink;
    int absent;      // every n-th unit of 64 keys has no page; 0: all have one
    int split_size;  // 0: the library's segments
    int heads_k, group;
    double most;  // error, relative to the root mean square; 0: of the type
};

std::mt19937 generator(7);

struct Inputs {
    const Case& c;
    const int batch, heads;
    int longest = 0;
    std::vector<int> first_row{0};
    std::vector<T> q;
    std::vector<std::vector<T>> k, v;  // of each sequence: [key][head][channel]
    std::vector<float> sink;

    explicit Inputs(const Case& given) : c(given), batch(static_cast<int>(c.sequences.size())), heads(c.heads_k * c.group) {
        for (const Sequence& s : c.sequences) {
            first_row.push_back(first_row.back() + s.rows);
            longest = std::max(longest, s.length);
            k.push_back(random<T>(size_t(s.length) * c.heads_k * kDim, c.size, generator));
            v.push_back(random<T>(size_t(s.length) * c.heads_k * kDimV, 1, generator));
            // The scores of blocks of 32 keys differ by up to `jump`, for kept maxima that are raised.
            for (int j = 0; c.jump > 0 && j < s.length; ++j)
                for (int h = 0; h < c.heads_k; ++h)
                    k.back()[(size_t(j) * c.heads_k + h) * kDim] = T(c.jump / kDirection * (j / 32 * 7 % 11 / 5.0f - 1));
        }
        q = random<T>(size_t(first_row.back()) * heads * kDim, c.size, generator);
        for (size_t i = 0; c.jump > 0 && i < q.size(); i += kDim) q[i] = T(kDirection / kScale);
        sink = random<float>(heads, 1, generator);
    }
    int shift(int b) const { return c.sequences[b].length - c.sequences[b].rows; }
    bool exists(int j) const { return !c.absent || j / 64 % c.absent != c.absent - 1; }
};

// Rows [begin, end) of a sequence.
struct Chunk {
    int sequence, begin, end;
};
// The results of all rows of the inputs.
struct Results {
    std::vector<T> out;
    std::vector<float> lse;

    explicit Results(const Inputs& x)
        : out(x.q.size() / kDim * kDimV, T(7.0f)), lse(size_t(x.first_row.back()) * x.heads, 7.0f) {}
};

// A call with several chunks, in pages of `page` keys or, with 0, in entries. `fewest`: the prefill kernel computes chunks with
// at least so many query rows; 0: no chunk.
struct Call {
    const Inputs& x;
    const std::vector<Chunk>& chunks;
    const int page, columns, capacity, batch;
    std::vector<int32_t> cu{0}, lengths, table;
    std::vector<T> q, k, v, out;
    std::vector<float> lse;

    Call(const Inputs& given, const std::vector<Chunk>& of_call, int page_size)
        : x(given), chunks(of_call), page(page_size), columns(page ? (x.longest + page - 1) / page + 1 : 1),
          capacity(page ? columns * page : x.longest + 8), batch(static_cast<int>(chunks.size())) {
        const size_t row = size_t(x.heads) * kDim, key_row = size_t(x.c.heads_k) * kDim, value_row = size_t(x.c.heads_k) * kDimV;
        const int rows_of_page = page ? page : capacity;
        k.assign(size_t(batch * columns) * rows_of_page * key_row, T(NAN));
        v.assign(size_t(batch * columns) * rows_of_page * value_row, T(NAN));
        for (int i = 0; i < batch * columns; ++i) table.push_back(batch * columns - 1 - i);
        for (int b = 0; b < batch; ++b) {
            const Chunk& chunk = chunks[b];
            const auto from = x.q.begin() + (x.first_row[chunk.sequence] + chunk.begin) * row;
            q.insert(q.end(), from, from + (chunk.end - chunk.begin) * row);
            cu.push_back(cu[b] + chunk.end - chunk.begin);
            lengths.push_back(x.shift(chunk.sequence) + chunk.end);
            for (int j = 0; j < x.c.sequences[chunk.sequence].length; ++j) {
                if (page && !x.exists(j)) {
                    table[b * columns + j / page] = -3;
                    continue;
                }
                const size_t to = size_t(table[b * columns + j / rows_of_page]) * rows_of_page + j % rows_of_page;
                std::copy_n(&x.k[chunk.sequence][j * key_row], key_row, &k[to * key_row]);
                std::copy_n(&x.v[chunk.sequence][j * value_row], value_row, &v[to * value_row]);
            }
        }
        out.assign(q.size() / kDim * kDimV, T(7.0f)), lse.assign(size_t(cu[batch]) * x.heads, 7.0f);
    }

    DecodeProblem problem() {
        DecodeProblem p;
        p.device = {FLASH_DEVICE_CUDA, 0}, p.dtype = kType;
        p.batch = batch, p.heads_q = x.heads, p.heads_k = x.c.heads_k, p.head_dim = kDim, p.head_dim_v = kDimV;
        p.seqlen_q = cu[batch];
        p.q = view(q.data(), kType, {p.seqlen_q, x.heads, kDim}), p.out = view(out.data(), kType, {p.seqlen_q, x.heads, kDimV});
        p.lse = view(lse.data(), DType::f32, {x.heads, p.seqlen_q});
        p.q_rows.batch = p.new_rows.batch = batch, p.q_rows.capacity = p.q_rows.max_length = p.seqlen_q;
        p.q_rows.cu = cu.data();
        p.cache.dtype = kType, p.cache.capacity = capacity;
        const int64_t rows_of_page = page ? page : capacity;
        p.cache.k = view(k.data(), kType, {batch * columns, rows_of_page, x.c.heads_k, kDim});
        p.cache.v = view(v.data(), kType, {batch * columns, rows_of_page, x.c.heads_k, kDimV});
        if (page) {
            p.cache.page_size = page, p.cache.pages = batch * columns, p.cache.block_table = table.data();
            p.cache.block_table_stride[0] = columns, p.cache.block_table_stride[1] = 1;
        } else {
            p.cache.batch_idx = table.data();
        }
        p.cache_seqlens = lengths.data();
        p.softmax_scale = kScale;
        p.causal = x.c.causal;
        if (x.c.window >= 0) p.window.left = x.c.window;
        p.mask_rule = p.window;
        if (p.causal) p.mask_rule.right = 0;
        if (x.c.sink) {
            p.sink.present = true, p.sink.dtype = DType::f32, p.sink.data = const_cast<float*>(x.sink.data());
            p.sink.head_stride = 1;
        }
        p.invariant_rows = true;
        p.request.split_size = x.c.split_size;
        return p;
    }

    // Returns how many rows the prefill kernel computed.
    int run(int fewest, Results& results, int multiprocessors) {
        const DecodeProblem p = problem();
        cuda::Kernel kernel, prefill_kernel;
        kernel.config = DecodeKernel::config, kernel.decode = launch_decode<DecodeKernel>;
        kernel.resources = resources_of_decode<DecodeKernel>;
        DeviceProperties device;
        device.arch = 90, device.multiprocessors = 2, device.shared_memory_bytes = 227 << 10;
        DecodePrefill prefill;
        if (fewest > 0) {
            prefill_kernel.config = PrefillKernel::config, prefill_kernel.resources = resources_of_prefill<PrefillKernel>;
            prefill = {"prefill", launch_prefill<PrefillKernel>, sm90::plan_prefill(prefill_kernel, p, device)};
            if (prefill.plan.attention.blocks == 0) {
                prefill = {};  // too few rows
            } else {
                prefill.plan.fewest_rows = fewest;
            }
        }
        if (prefill.name && !prefill.plan.invariant) std::printf("WRONG instance of prefill\n"), std::exit(1);
        device.multiprocessors = multiprocessors;  // for the choice of splits
        const cuda::DecodePlan plan = sm80::plan_decode(kernel, p, device, prefill);
        if (plan.instance.number != static_cast<int>(DecodeKind::invariant)) std::printf("WRONG instance\n"), std::exit(1);
        const bool together = multiprocessors == 1 && capacity <= 2048;  // of all segments
        if (!prefill.name && (plan.splits == 1) != together && multiprocessors != kSomeMultiprocessors)
            std::printf("WRONG splits\n"), std::exit(1);
        std::vector<char> memory(plan.workspace.bytes() + 255, char(0xff));  // NaN
        char* const workspace = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
        cuda::decode(kernel, p, plan, workspace, nullptr);
        const size_t row = size_t(x.heads) * kDimV;
        int by_prefill = 0;
        for (int b = 0; b < batch; ++b)
            if (prefill.name && cu[b + 1] - cu[b] >= fewest) by_prefill += cu[b + 1] - cu[b];
        for (int b = 0; b < batch; ++b)
            for (int i = chunks[b].begin; i < chunks[b].end; ++i) {
                const int from = cu[b] + i - chunks[b].begin, to = x.first_row[chunks[b].sequence] + i;
                std::copy_n(&out[from * row], row, &results.out[to * row]);
                for (int h = 0; h < x.heads; ++h) results.lse[size_t(to) * x.heads + h] = lse[size_t(h) * cu[batch] + from];
            }
        return by_prefill;
    }
};

// With 132 multiprocessors most thread blocks have one segment.
int run(const Inputs& x, const std::vector<Chunk>& chunks, int page, int fewest, Results& results, int multiprocessors = 132) {
    return Call(x, chunks, page).run(fewest, results, multiprocessors);
}

// Prints whether rows have the same bits; `step`: only every so many rows are compared.
bool same(const char* what, const Inputs& x, const Results& got, const Results& wanted, int by_prefill, int step = 1) {
    int differences = 0;
    for (int row = 0; row < x.first_row.back(); row += step) {
        const size_t at = size_t(row) * x.heads;
        differences += std::memcmp(&got.out[at * kDimV], &wanted.out[at * kDimV], x.heads * kDimV * sizeof(T)) != 0 ||
                       std::memcmp(&got.lse[at], &wanted.lse[at], x.heads * sizeof(float)) != 0;
    }
    std::printf("%s %s: %d rows differ, %d by prefill\n", differences ? "WRONG" : "ok", what, differences, by_prefill);
    return differences == 0;
}

bool is_exact(const Inputs& x, const Results& got) {
    RelativeError error;
    double worst_lse = 0;
    for (int b = 0; b < x.batch; ++b)
        for (int i = 0; i < x.c.sequences[b].rows; i += 13)
            for (int h = 0; h < x.heads; ++h) {
                const int row = x.first_row[b] + i, at = x.shift(b) + i, length = x.c.sequences[b].length;
                const T* query = &x.q[(size_t(row) * x.heads + h) * kDim];
                std::vector<double> s(length, -INFINITY), o(kDimV, 0);
                double largest = x.c.sink ? x.sink[h] : -INFINITY, sum = 0;
                for (int j = 0; j < length; ++j) {
                    if ((x.c.causal && j > at) || (x.c.window >= 0 && j < at - x.c.window) || !x.exists(j)) continue;
                    s[j] = 0;
                    for (int e = 0; e < kDim; ++e)
                        s[j] += kScale * wide(query[e]) * wide(x.k[b][(size_t(j) * x.c.heads_k + h / x.c.group) * kDim + e]);
                    largest = std::max(largest, s[j]);
                }
                if (x.c.sink) sum = std::exp(x.sink[h] - largest);
                for (int j = 0; j < length; ++j) {
                    if (s[j] == -INFINITY) continue;
                    const double p = std::exp(s[j] - largest);
                    sum += p;
                    for (int e = 0; e < kDimV; ++e)
                        o[e] += p * wide(x.v[b][(size_t(j) * x.c.heads_k + h / x.c.group) * kDimV + e]);
                }
                const double wanted = largest + std::log(sum), lse = got.lse[size_t(row) * x.heads + h];
                worst_lse = larger_error(worst_lse, std::fabs(lse - wanted) / (1 + std::fabs(wanted)));
                for (int e = 0; e < kDimV; ++e) error.add(wide(got.out[(size_t(row) * x.heads + h) * kDimV + e]), o[e] / sum);
            }
    const double most = x.c.most > 0 ? x.c.most : kRounding;
    const bool good = error.value() <= most && worst_lse < (x.c.most > 0 ? 1e-3 : 1e-4);
    std::printf("%s relative error %.2e, lse %.1e\n", good ? "ok" : "WRONG", error.value(), worst_lse);
    return good;
}

bool check(const Case& c) {
    const Inputs x(c);
    const int page = c.absent ? 16 : 0;
    std::vector<Chunk> all, reversed;
    for (int b = 0; b < x.batch; ++b) all.push_back({b, 0, c.sequences[b].rows});
    reversed.assign(all.rbegin(), all.rend());
    Results wanted(x), got(x);
    run(x, all, page, 0, wanted);
    bool good = is_exact(x, wanted);
    run(x, all, page, 0, got, 1);
    good &= same("segments together", x, got, wanted, 0);
    got = Results(x);
    run(x, all, page, 0, got, kSomeMultiprocessors);
    good &= same("some segments together", x, got, wanted, 0);
    got = Results(x);
    if (!c.causal) {  // other chunks see other keys
        const int by_prefill = run(x, all, 16, 4, got);
        return same("one call", x, got, wanted, by_prefill) && by_prefill > 0 && good;
    }
    // Some rows alone.
    constexpr int kStep = 37;
    Results alone(x);
    for (int b = 0; b < x.batch; ++b)
        for (int i = 0; i < c.sequences[b].rows; ++i)
            if ((x.first_row[b] + i) % kStep == 0) run(x, {{b, i, i + 1}}, page, 0, alone);
    good &= same("rows alone", x, alone, wanted, 0, kStep);
    if (c.split_size) return good;  // prefill does not take them
    int by_prefill = run(x, all, page, 2, got);
    good &= same("one call", x, got, wanted, by_prefill) && by_prefill > 0;
    got = Results(x);
    by_prefill = run(x, reversed, 64, 65, got);
    good &= same("pages of 64, other order", x, got, wanted, by_prefill) && by_prefill > 0;
    for (const auto& [rows, page_size] : {std::pair(100, 16), std::pair(45, c.absent ? 32 : 48)}) {
        got = Results(x), by_prefill = 0;
        for (int first = 0; first < 1000; first += rows) {
            std::vector<Chunk> chunks;
            for (int b = 0; b < x.batch; ++b)
                if (first < c.sequences[b].rows) chunks.push_back({b, first, std::min(first + rows, c.sequences[b].rows)});
            if (!chunks.empty()) by_prefill += run(x, chunks, page_size, 20, got);
        }
        good &= same("in chunks", x, got, wanted, by_prefill) && by_prefill > 0;
    }
    return good;
}

int main(int, char** argv) {
    const int number = std::atoi(argv[1]);
    emulation::set_random_order(std::atoi(argv[2]));
    const std::vector<Sequence> mixed = {{150, 1200}, {1, 1030}, {64, 64}, {9, 513}, {70, 700}, {200, 560}};
    const std::vector<Sequence> few = {{140, 1100}, {3, 900}, {66, 130}};
    const Case cases[] = {
        {mixed, -1, true, 1, 0, false, 0, 0, 1, 2, 0},
        {few, 300, true, 2, 0, true, 0, 0, 2, 1, 0},
        {few, -1, true, 1, 0, false, 3, 0, 1, 1, 0},
        {few, -1, true, 1, 15, false, 0, 0, 1, 1, 0},                                // sums beyond the limit
        {few, -1, true, 1, 100, true, 0, 0, 1, 1, 0},                                // overflow under a kept maximum
        {few, 700, true, 1, 2e8, false, 0, 0, 1, 1, 1},                              // large maxima
        {few, -1, true, 1, 0, true, 0, 128, 1, 2, 0},                                // segments of 128 keys
        {{{100, 900}, {1, 800}, {3, 600}}, 500, false, 1, 0, true, 0, 0, 1, 20, 0},  // not causal; heads of several tiles
        {{{66, 17700}}, -1, true, 1, 0, false, 0, 0, 1, 1, 0},                       // longer segments
    };
    return check(cases[number]) ? 0 : 1;
}
