// Runs an sm80 kernel of forward with statistics of rows on the host and compares out, LSE and the statistics with double
// precision. Arguments: 1 the size of the inputs, 2 options (1: softcap, ALiBi, bias and mask; 2: a sink; 4: dropout; 8: packed
// rows; 16: causal with a window, some rows without a key; 32: scores that jump up late, and NaN in one row), 3 whether the
// largest score is that of heads. Prints the errors; exit code 0 means none is too large.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>

#include "cuda/host/long_sums.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/sm80/forward_statistics.cuh"
#include "dropout_problem.h"
#include "numbers.h"

using namespace libflash;
using namespace libflash::cuda;

struct EmulatedKernel {
    static constexpr KernelConfig config{
        "forward", Operation::forward, "sm80", KernelType::DTYPE, HEAD_DIM, HEAD_DIM, FORWARD_TILE, 1, "", "", true};
};
using T = ElementOf<EmulatedKernel::config.dtype>;
constexpr int kDim = HEAD_DIM, kBatch = 2, kRows = 150, kKeys = 200, kHeads = 4, kGroup = 2, kLeft = 90;
constexpr double kCap = 9, kDrop = 0.3;
constexpr bool kFloat = EmulatedKernel::config.dtype == KernelType::f32_;
constexpr double kRounding = kFloat ? 0x1p-19 : (EmulatedKernel::config.dtype == KernelType::f16_ ? 0x1p-11 : 0x1p-8);

enum Option { kScores = 1, kSink = 2, kDropout = 4, kPacked = 8, kWindow = 16, kJump = 32 };

std::mt19937 generator(5);

struct Problem {
    int options;
    double scale = 1 / std::sqrt(double{kDim});
    // Of each sequence: rows, keys, and those in use. Rows of packed sequences follow each other.
    int rows[kBatch] = {kRows, kRows}, keys[kBatch] = {kKeys, kKeys}, used[kBatch] = {kRows - 7, kRows};
    std::vector<int32_t> cu_q{0}, cu_k{0}, used_q;
    std::vector<T> q, k, v, out;
    std::vector<float> lse, max_logit, entropy, head_maxima, bias, sink, slopes;
    std::vector<uint8_t> mask;
    std::vector<double> out64, lse64, max64, entropy64, heads64;

    Problem(float size, int wanted) : options(wanted) {
        if (has(kPacked)) rows[0] = 71, keys[1] = 33, used[0] = 60;
        for (int b = 0; b < kBatch; ++b) {
            cu_q.push_back(cu_q[b] + rows[b]), cu_k.push_back(cu_k[b] + keys[b]);
            used_q.push_back(used[b]);
        }
        q = random<T>(cu_q.back() * kHeads * kDim, size, generator);
        k = random<T>(cu_k.back() * (kHeads / kGroup) * kDim, size, generator);
        v = random<T>(k.size(), 1, generator);
        if (has(kJump)) jump();
        bias = random<float>(kHeads * kRows * kKeys, 1, generator), sink = random<float>(kHeads, 2, generator);
        slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
        mask.assign(kRows * kKeys, 1);
        for (size_t i = 0; i < mask.size(); ++i) mask[i] = i % 7 != 3 && i / kKeys != 11;
        out.assign(q.size(), T(NAN)), out64.assign(q.size(), 0);
        for (auto* x : {&lse, &max_logit, &entropy}) x->assign(cu_q.back() * kHeads, 77);
        head_maxima.assign(kHeads, 77);
        for (auto* x : {&lse64, &max64}) x->assign(lse.size(), -INFINITY);
        entropy64.assign(lse.size(), 0), heads64.assign(kHeads, -INFINITY);
    }
    bool has(Option option) const { return options & option; }

    // The kernel processes the first keys of a sequence last. For some rows the score of the first key is far above the others;
    // one row of the last head is NaN.
    void jump() {
        for (int c = 0; c < kDim; ++c) {
            for (int b = 0; b < kBatch; ++b) k[cu_k[b] * (kHeads / kGroup) * kDim + c] = T(8.0f);
            for (int row = 3; row < cu_q.back(); row += 5) q[size_t(row) * kHeads * kDim + c] = T(row % 2 ? 8.0f : 1.0f);
        }
        q[(size_t(20) * kHeads + kHeads - 1) * kDim] = T(NAN);
    }

    size_t row_at(int b, int row, int head) const { return (size_t(cu_q[b] + row) * kHeads + head); }
    bool sees(int b, int row, int key) const {
        const int diagonal = row + keys[b] - used[b];
        return !has(kWindow) || (key <= diagonal && key >= diagonal - kLeft);
    }

    double score(int b, int row, int head, int key) const {
        if (!sees(b, row, key)) return -INFINITY;
        const T* x = &q[row_at(b, row, head) * kDim];
        const T* y = &k[(size_t(cu_k[b] + key) * (kHeads / kGroup) + head / kGroup) * kDim];
        double sum = scale * dot(x, y, kDim);
        if (!has(kScores)) return sum;
        if (!mask[row * kKeys + key]) return -INFINITY;
        sum = kCap * std::tanh(sum / kCap) - slopes[head] * std::abs(row + keys[b] - used[b] - key);
        return sum + bias[(head * kRows + row) * kKeys + key];
    }

    void solve_row(int b, int row, int head) {
        std::vector<double> s(keys[b]);
        double largest = -INFINITY, sum = 0, mean = 0;
        bool unknown = false;
        for (int j = 0; j < keys[b]; ++j) {
            s[j] = score(b, row, head, j);
            unknown |= s[j] != s[j];
            largest = std::fmax(largest, s[j]);
        }
        const double top = has(kSink) ? std::fmax(largest, sink[head]) : largest;
        for (int j = 0; j < keys[b] && top > -INFINITY; ++j) sum += std::exp(s[j] - top);
        if (has(kSink)) sum += std::exp(sink[head] - top);
        const size_t at = row_at(b, row, head);
        if (unknown) {
            lse64[at] = max64[at] = entropy64[at] = heads64[head] = NAN;
            for (int c = 0; c < kDim; ++c) out64[at * kDim + c] = NAN;
            return;
        }
        if (sum == 0) return;
        const double log_sum = lse64[at] = top + std::log(sum);
        max64[at] = largest;
        if (!(heads64[head] >= largest) && heads64[head] == heads64[head]) heads64[head] = largest;
        for (int j = 0; j < keys[b]; ++j) {
            const double p = std::exp(s[j] - log_sum);
            if (p == 0) continue;
            mean += p * (s[j] - log_sum);
            const T* y = &v[(size_t(cu_k[b] + j) * (kHeads / kGroup) + head / kGroup) * kDim];
            add_scaled(&out64[at * kDim], p, y, kDim);
        }
        if (has(kSink)) mean += std::exp(sink[head] - log_sum) * (sink[head] - log_sum);
        entropy64[at] = -mean;
    }

    void launch(bool of_heads) {
        ForwardStatisticsParams params{};
        const bool packed = has(kPacked);
        const auto rows_of = [&](std::vector<T>& x, int heads, int count) {
            return RowsParams{x.data(), packed ? 0 : int64_t{count} * heads * kDim, int64_t{heads} * kDim, kDim};
        };
        params.q = rows_of(q, kHeads, kRows), params.out = rows_of(out, kHeads, kRows);
        params.k = rows_of(k, kHeads / kGroup, kKeys), params.v = rows_of(v, kHeads / kGroup, kKeys);
        const auto numbers = [&](std::vector<float>& x) {
            return RowStatisticsParams{x.data(), packed ? 0 : int64_t{kRows} * kHeads, kHeads, 1};
        };
        params.lse = numbers(lse), params.entropy = numbers(entropy);
        if (of_heads) {
            params.head_maxima = head_maxima.data(), params.head_maxima_stride = 1;
        } else {
            params.max_logit = numbers(max_logit);
        }
        params.q_lengths = {packed ? cu_q.data() : nullptr, used_q.data(), packed ? cu_q.back() : kRows};
        params.k_lengths = {packed ? cu_k.data() : nullptr, nullptr, packed ? cu_k.back() : kKeys};
        params.batch = kBatch, params.heads_q = kHeads, params.group_size = kGroup;
        params.head_dim = params.head_dim_v = kDim;
        params.softmax_scale = static_cast<float>(scale), params.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
        params.mask = {has(kWindow) ? kLeft : kUnboundedWindow, has(kWindow) ? 0 : kUnboundedWindow, false};
        params.rare.dropout = dropout_params(dropout_of(has(kDropout) ? kDrop : 0));
        params.shard.heads_total = kHeads;
        if (has(kSink)) params.sink = {sink.data(), 0, 1, true};
        if (has(kScores)) {
            params.rare.softcap = kCap;
            params.rare.alibi_slopes = {slopes.data(), 0, 1, true};
            params.rare.bias = {bias.data(), {0, int64_t{kRows} * kKeys, kKeys, 1}, true};
            params.rare.mask = {mask.data(), {0, 0, kKeys, 1}, false};
        }
        params.vector_loads = params.vector_out = true;
        run(params);
    }

    void run(ForwardStatisticsParams& params) {
        Sequences side;
        side.capacity = params.q_lengths.capacity, side.max_length = kRows, side.cu = params.q_lengths.cu;
        params.schedule = schedule_params(side, kBatch, kHeads, EmulatedKernel::config.tile_q, 1e3, has(kWindow));
        ForwardPlan plan;
        plan.instance = kGeneralInstance;
        plan.attention = launch_shape(blocks_of(params.schedule), resources_of_forward_statistics<EmulatedKernel>(0, 1));
        if (params.head_maxima)
            plan.head_maxima =
                launch_shape(1, resources_of_forward_statistics<EmulatedKernel>(static_cast<int>(ForwardStep::head_maxima), 1));
        std::vector<float> sums;
        if (needs_long_sums(EmulatedKernel::config, kKeys)) {
            plan.blocks_at_once = 3;
            sums.assign(plan.blocks_at_once * long_sums_bytes(EmulatedKernel::config.tile_q, kDim) / sizeof(float) + 1, NAN);
            sums.back() = 7;  // a guard
            params.long_sums = sums.data();
        }
        launch_forward_statistics<EmulatedKernel>(plan, params, nullptr);
        if (!sums.empty() && sums.back() != 7) std::exit(2);
    }
};

// Errors are relative to the exact number or to `unit`, whichever is larger. Infinities and NaN must be the same.
template <class Number>
bool near(const char* name, const std::vector<Number>& got, const std::vector<double>& exact, double limit, double unit = 1) {
    double worst = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        const double x = wide(got[i]), y = exact[i];
        if (equal_or_nan(x, y)) continue;
        worst = larger_error(worst, std::isfinite(y) ? std::fabs(x - y) / std::max(unit, std::fabs(y)) : NAN);
    }
    const bool good = worst <= limit;
    std::printf("%s %s: error %.2e, limit %.1e\n", good ? "ok" : "WRONG", name, worst, limit);
    return good;
}

int main(int, char** argv) {
    late_copies = true;
    emulation::set_random_order(1);
    const double size = std::atof(argv[1]);
    const bool of_heads = std::atoi(argv[3]) != 0;
    Problem p(static_cast<float>(size), std::atoi(argv[2]));
    for (int b = 0; b < kBatch; ++b)
        for (int head = 0; head < kHeads; ++head)
            for (int row = 0; row < p.used[b]; ++row) p.solve_row(b, row, head);
    p.launch(of_heads);
    // A score has the rounding errors of its products and of its size; that of float is made of three parts.
    const double scores = 0x1p-19 * std::max(1.0, size * size);
    bool good = near("lse", p.lse, p.lse64, scores);
    if (!p.has(kDropout)) good &= near("out", p.out, p.out64, 4 * kRounding * (kFloat ? std::max(1.0, size * size) : 1));
    good &= near("entropy", p.entropy, p.entropy64, 8 * scores);
    if (of_heads) {
        good &= near("max_logit of heads", p.head_maxima, p.heads64, scores);
        good &= near("max_logit unwritten", p.max_logit, std::vector<double>(p.max_logit.size(), 77), 0);
    } else {
        good &= near("max_logit", p.max_logit, p.max64, scores);
        good &= near("max_logit of heads unwritten", p.head_maxima, std::vector<double>(kHeads, 77), 0);
    }
    return good ? 0 : 1;
}
