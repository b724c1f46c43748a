// Runs forward_tangent of one kernel on the host and compares it with double precision. Arguments: 1 the size of the inputs, 2
// the size of their tangents, 3 whether the rare options, a block mask and packed rows are used, 4 which tangents are given (bit
// 0: q, 1: k, 2: v). Prints the errors; exit code 0 means none is too large.
#include "emulation.h"

#include "cuda/host/tile_schedule.h"
#include "cuda/sm80/forward_tangent.cuh"

using namespace libflash;
using namespace libflash::cuda;

struct TangentRow {
    static constexpr KernelConfig config{
        "forward_tangent", Operation::forward_tangent, "sm80", KernelType::DTYPE, HEAD_DIM, HEAD_DIM, TANGENT_TILE, 1, ""};
};
using T = ElementOf<TangentRow::config.dtype>;
// Two query heads share a key head; causal with a window; the last rows are not in use, and rows before kFirst see no key.
constexpr int kDim = HEAD_DIM - 8, kDimV = HEAD_DIM, kRows = 150, kUsed = 141, kKeys = 130, kHeads = 2, kLeft = 70;
constexpr int kFirst = kUsed - kKeys;
constexpr int kBefore = 5;  // packed: rows that belong to no sequence
constexpr bool kFloat = TangentRow::config.dtype == KernelType::f32_;
constexpr double kRounding = kFloat ? 0x1p-18 : (TangentRow::config.dtype == KernelType::f16_ ? 0x1p-10 : 0x1p-7);

std::mt19937 generator(7);
template <class Number>
std::vector<Number> random(size_t count, float scale) {
    std::normal_distribution<float> normal;
    std::vector<Number> x(count);
    for (Number& y : x) y = Number(scale * normal(generator));
    return x;
}
template <class Number>
double wide(Number x) {
    return to_float(x);
}

struct Problem {
    bool rare;
    int given;
    double scale = 1 / std::sqrt(double{kDim}), cap = 9;
    std::vector<uint8_t> mask, blocks{1, 1, 1, 0};  // blocks: the last rows do not see the last keys
    std::vector<float> slopes{0.02f, 0.1f};
    DropoutParams dropout{};
    std::vector<T> q, k, v, tq, tk, tv, out, tout, dout, tdout;
    std::vector<float> bias, tbias, sink, tsink, lse, tlse, tdlse, tdelta;
    std::vector<double> to64, mu64, delta64;

    Problem(float size, float tsize, bool rare_options, int which) : rare(rare_options), given(which) {
        q = random<T>(kRows * kHeads * kDim, size), k = random<T>(kKeys * kDim, size), v = random<T>(kKeys * kDimV, size);
        tq = random<T>(q.size(), tsize), tk = random<T>(k.size(), tsize), tv = random<T>(v.size(), tsize);
        const size_t outputs = kRows * kHeads * kDimV;
        dout = random<T>(outputs, size), tdout = random<T>(outputs, size);
        bias = random<float>(kHeads * kRows * kKeys, 1), tbias = random<float>(bias.size(), tsize);
        sink = random<float>(kHeads, 1), tsink = random<float>(kHeads, tsize), tdlse = random<float>(kHeads * kRows, 1);
        for (int i = 0; i < kRows * kKeys; ++i) mask.push_back(generator() % 8 != 0);
        dropout.keep_factor = rare ? 1 / 0.75f : 1, dropout.threshold = 1u << 30, dropout.active = rare;
        dropout.seed_low = 3, dropout.seed_high = 4, dropout.offset_mix = 5;
        out.assign(outputs, T(0.0f)), tout.assign(outputs, T(NAN));
        lse.assign(kHeads * kRows, -INFINITY), tlse.assign(lse.size(), NAN), tdelta.assign(lse.size(), NAN);
        to64.assign(outputs, 0), mu64.assign(lse.size(), 0), delta64.assign(lse.size(), 0);
        if (!(given & 1)) tq.assign(tq.size(), T(0.0f));
        if (!(given & 2)) tk.assign(tk.size(), T(0.0f));
        if (!(given & 4)) tv.assign(tv.size(), T(0.0f));
    }

    static size_t at(int row, int head, int dim) { return (size_t(row) * kHeads + head) * dim; }
    template <class A, class B>
    static double dot(const A* a, const B* b, int n) {
        double sum = 0;
        for (int c = 0; c < n; ++c) sum += wide(a[c]) * wide(b[c]);
        return sum;
    }
    bool sees(int row, int key) const {
        const int diagonal = row + kKeys - kUsed;
        if (row >= kUsed || key > diagonal || key < diagonal - kLeft) return false;
        return !rare || (mask[row * kKeys + key] && blocks[row / 128 * 2 + key / 128]);
    }
    // The factor of dropout.
    double keep(int row, int key, int head) const {
        if (!rare) return 1;
        const uint4 w = dropout_words(dropout, head, row, key / 4 * 4);
        const uint32_t words[] = {w.x, w.y, w.z, w.w};
        return words[key % 4] >= dropout.threshold ? 1 / 0.75 : 0;
    }

    // Scores of a row and their tangents.
    void score(int row, int head, std::vector<double>& s, std::vector<double>& ts) const {
        for (int j = 0; j < kKeys; ++j) {
            s[j] = -INFINITY, ts[j] = 0;
            if (!sees(row, j)) continue;
            const T *x = &q[at(row, head, kDim)], *y = &k[size_t(j) * kDim];
            s[j] = scale * dot(x, y, kDim);
            ts[j] = scale * (dot(&tq[at(row, head, kDim)], y, kDim) + dot(x, &tk[size_t(j) * kDim], kDim));
            if (!rare) continue;
            const double bent = std::tanh(s[j] / cap);
            ts[j] = ts[j] * (1 - bent * bent) + tbias[(head * kRows + row) * kKeys + j];
            s[j] = cap * bent - slopes[head] * std::abs(row + kKeys - kUsed - j) + bias[(head * kRows + row) * kKeys + j];
        }
    }

    void solve_row(int row, int head) {
        std::vector<double> s(kKeys), ts(kKeys);
        score(row, head, s, ts);
        double sum = rare ? std::exp(double{sink[head]}) : 0;
        for (double x : s) sum += std::exp(x);
        if (row >= kUsed || sum == 0) return;
        const double log_sum = std::log(sum);
        lse[head * kRows + row] = static_cast<float>(log_sum);
        double mu = rare ? std::exp(sink[head] - log_sum) * tsink[head] : 0;
        std::vector<double> o(kDimV);
        for (int j = 0; j < kKeys; ++j) {
            const double p = std::exp(s[j] - log_sum);
            mu += p * ts[j];
            for (int c = 0; c < kDimV; ++c) o[c] += p * keep(row, j, head) * wide(v[j * kDimV + c]);
        }
        mu64[head * kRows + row] = mu;
        const size_t first = at(row, head, kDimV);
        for (int j = 0; j < kKeys; ++j) {
            const double p = std::exp(s[j] - log_sum) * (s[j] == -INFINITY ? 0 : keep(row, j, head));
            for (int c = 0; c < kDimV; ++c)
                to64[first + c] += p * ((ts[j] - mu) * wide(v[j * kDimV + c]) + wide(tv[j * kDimV + c]));
        }
        double delta = -tdlse[head * kRows + row];
        for (int c = 0; c < kDimV; ++c) {
            out[first + c] = T(static_cast<float>(o[c]));
            delta += wide(tdout[first + c]) * o[c] + wide(dout[first + c]) * to64[first + c];
        }
        delta64[head * kRows + row] = delta;
    }
};

Sequences side(int64_t rows, const int32_t* cu) {
    Sequences sequences;
    sequences.capacity = sequences.max_length = rows;
    sequences.cu = cu;
    return sequences;
}

void run(Problem& p) {
    ForwardTangentParams params{};
    const auto rows = [](std::vector<T>& x, int heads, int dim) { return RowsParams{x.data(), 0, int64_t{heads} * dim, dim}; };
    const auto numbers = [](std::vector<float>& x) { return RowStatisticsParams{x.data(), int64_t{kHeads} * kRows, 1, kRows}; };
    const int32_t used = kUsed, rows_of_sequence[] = {kBefore, kBefore + kRows}, keys_of_sequence[] = {0, kKeys};
    params.q = rows(p.q, kHeads, kDim), params.k = rows(p.k, 1, kDim), params.v = rows(p.v, 1, kDimV);
    if (p.given & 1) params.tq = rows(p.tq, kHeads, kDim);
    if (p.given & 2) params.tk = rows(p.tk, 1, kDim);
    if (p.given & 4) params.tv = rows(p.tv, 1, kDimV);
    params.out = rows(p.out, kHeads, kDimV), params.tout = rows(p.tout, kHeads, kDimV);
    params.dout = rows(p.dout, kHeads, kDimV), params.tdout = rows(p.tdout, kHeads, kDimV);
    params.lse = numbers(p.lse), params.tlse = numbers(p.tlse);
    params.tdlse = numbers(p.tdlse), params.tdelta = numbers(p.tdelta);
    params.q_lengths = {nullptr, &used, kRows}, params.k_lengths = {nullptr, nullptr, kKeys};
    params.batch = 1, params.heads_q = params.group_size = kHeads, params.head_dim = kDim, params.head_dim_v = kDimV;
    params.softmax_scale = static_cast<float>(p.scale), params.scale_log2 = static_cast<float>(p.scale * 1.4426950408889634);
    params.mask = {kLeft, 0, false};
    params.rare.dropout.keep_factor = 1;
    params.vector_loads = params.vector_rows = params.vector_out = true;
    if (p.rare) {
        params.vector_loads = params.vector_rows = params.vector_out = false;
        params.q_lengths = {rows_of_sequence, &used, kBefore + kRows};
        params.k_lengths = {keys_of_sequence, nullptr, kKeys};
        for (RowsParams* x : {&params.q, &params.tq, &params.out, &params.tout, &params.dout, &params.tdout})
            x->data = static_cast<T*>(x->data) ? static_cast<T*>(x->data) - kBefore * x->row : nullptr;
        for (RowStatisticsParams* x : {&params.lse, &params.tlse, &params.tdlse, &params.tdelta}) x->data -= kBefore;
        params.block_mask.mask = p.blocks.data();
        params.block_mask.mask_stride[2] = 2, params.block_mask.mask_stride[3] = 1;
        params.rare.alibi_slopes = {p.slopes.data(), 0, 1, true};
        params.rare.mask = {p.mask.data(), {0, 0, kKeys, 1}, false};
        params.rare.dropout = p.dropout;
        params.rare.softcap = static_cast<float>(p.cap);
        params.rare.bias = {p.bias.data(), {0, int64_t{kRows} * kKeys, kKeys, 1}, true};
        params.tbias = {p.tbias.data(), {0, int64_t{kRows} * kKeys, kKeys, 1}, true};
        params.sink = {p.sink.data(), 0, 1, true}, params.tsink = {p.tsink.data(), 0, 1, true};
    }
    ForwardTangentPlan plan;
    plan.instance = p.rare ? kGeneralInstance : kPlainInstance;
    params.schedule = schedule_params(side(kRows, params.q_lengths.cu), 1, kHeads,
                                      forward_tangent_tile_q(TangentRow::config, p.rare), 1e3, true);
    plan.attention = launch_shape(blocks_of(params.schedule), resources_of_forward_tangent<TangentRow>(0, plan.instance.number));
    launch_forward_tangent<TangentRow>(plan, params, nullptr);
}

// Checks the root mean square of the error against that of the values, and that rows without keys have zeros.
template <class Number>
bool near(const char* name, const std::vector<Number>& got, const std::vector<double>& exact, double limit) {
    double error = 0, size = 0;
    int wrong = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        error += (wide(got[i]) - exact[i]) * (wide(got[i]) - exact[i]);
        size += exact[i] * exact[i];
        wrong += exact[i] == 0 && wide(got[i]) != 0;
    }
    const double relative = error == 0 ? 0 : std::sqrt(error / size);
    const bool good = relative <= limit && wrong == 0;
    std::printf("%s %s: relative error %.2e, limit %.1e, %d are not 0\n", good ? "ok" : "WRONG", name, relative, limit, wrong);
    return good;
}

int main(int, char** argv) {
    const double size = std::atof(argv[1]);
    Problem p(static_cast<float>(size), static_cast<float>(std::atof(argv[2])), std::atoi(argv[3]) != 0, std::atoi(argv[4]));
    for (int head = 0; head < kHeads; ++head)
        for (int row = 0; row < kRows; ++row) p.solve_row(row, head);
    run(p);
    const double limit = kRounding * size * size, of_sums = 0x1p-18 * size * size;
    bool good = near("tout", p.tout, p.to64, limit) & near("tlse", p.tlse, p.mu64, of_sums);
    good &= near("tdelta", p.tdelta, p.delta64, limit);
    return good ? 0 : 1;
}
