// Runs the backward kernel of sm90 on the host and compares it with double precision: masks, lengths that end within tiles,
// shared key heads, and NaN between rows. The argument is 0, or the seed of a disorder: warps are delayed, copies complete late
// and in any order, and products are computed when they are waited for. Prints the errors; exit code 0 means none is too large.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <random>

#include "cuda/host/tile_schedule.h"
#include "cuda/sm90/backward.cuh"

using namespace libflash;
using namespace libflash::cuda;

struct Kernel {
    static constexpr KernelConfig config{
        "backward", Operation::backward, "sm90", KernelType::DTYPE, HEAD_DIM, HEAD_DIM, BACKWARD_TILE, STAGES, ""};
};
using T = sm90::BackwardTraits<Kernel>::T;
constexpr bool kWide = Kernel::config.dtype == KernelType::bf16_;  // bf16 has the exponent range of float
constexpr double kRounding = kWide ? 0x1p-8 : 0x1p-11;

struct Case {
    int batch, heads_q, heads_k, queries, keys, head_dim, head_dim_v;
    int left, right;  // of the window; kUnboundedWindow: none
    float size;       // of all inputs
    bool top_left, dlse;
};

std::mt19937 generator(3);

// A tensor (batch, row, head, channel) with NaN after the heads of each row.
struct Rows {
    static constexpr int kGap = 8;
    int heads, rows, dim, stride;
    std::vector<T> x;
    std::vector<double> exact;

    Rows(int batch, int count, int head_count, int channels, float size)
        : heads(head_count), rows(count), dim(channels), stride(head_count * channels + kGap), x(size_t(batch) * count * stride) {
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < x.size(); ++i) x[i] = int(i % stride) < heads * dim ? T(size * normal(generator)) : T(NAN);
        exact.assign(x.size(), 0);
    }
    size_t at(int batch, int row, int head) const { return (size_t(batch) * rows + row) * stride + head * dim; }
    const T* row(int batch, int i, int head) const { return &x[at(batch, i, head)]; }
    RowsParams params() { return {x.data(), int64_t{rows} * stride, stride, dim}; }
    void fill_with_nan() { std::fill(x.begin(), x.end(), T(NAN)); }
};

double dot(const T* a, const T* b, int count) {
    double sum = 0;
    for (int i = 0; i < count; ++i) sum += double(float(a[i])) * float(b[i]);
    return sum;
}

struct Problem {
    Case c;
    double scale;
    Rows q, k, v, out, dout, dq, dk, dv;
    std::vector<float> lse, dlse, sums;
    std::vector<SoftmaxStatistics> statistics;
    BackwardParams params{};

    explicit Problem(const Case& given)
        : c(given), scale(1 / std::sqrt(double(c.head_dim))), q(c.batch, c.queries, c.heads_q, c.head_dim, c.size),
          k(c.batch, c.keys, c.heads_k, c.head_dim, c.size), v(c.batch, c.keys, c.heads_k, c.head_dim_v, c.size),
          out(c.batch, c.queries, c.heads_q, c.head_dim_v, 0), dout(c.batch, c.queries, c.heads_q, c.head_dim_v, c.size), dq(q),
          dk(k), dv(v) {
        for (Rows* x : {&dq, &dk, &dv}) x->fill_with_nan();
        lse.resize(size_t(c.batch) * c.heads_q * c.queries);
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < lse.size(); ++i) dlse.push_back(c.dlse ? normal(generator) : 0.0f);
        for (int b = 0; b < c.batch; ++b)
            for (int h = 0; h < c.heads_q; ++h)
                for (int i = 0; i < c.queries; ++i) solve_row(b, h, i);
        fill_in();
    }

    bool sees(int i, int j) const {
        const int64_t ahead = int64_t{j} - i - (c.top_left ? 0 : c.keys - c.queries);
        return ahead <= c.right && -ahead <= c.left;
    }

    void solve_row(int b, int h, int i) {
        const int kv_head = h / (c.heads_q / c.heads_k);
        std::vector<double> s(c.keys, -INFINITY);
        double largest = -INFINITY, sum = 0;
        for (int j = 0; j < c.keys; ++j) {
            if (!sees(i, j)) continue;
            s[j] = scale * dot(q.row(b, i, h), k.row(b, j, kv_head), c.head_dim);
            largest = std::max(largest, s[j]);
        }
        for (int j = 0; j < c.keys; ++j) sum += sees(i, j) ? std::exp(s[j] - largest) : 0;
        const double log_sum = largest + std::log(sum);
        const size_t number = (size_t(b) * c.heads_q + h) * c.queries + i;
        lse[number] = sum > 0 ? static_cast<float>(log_sum) : -INFINITY;
        if (sum == 0) return;
        double* o = &out.exact[out.at(b, i, h)];
        for (int j = 0; j < c.keys; ++j)
            for (int x = 0; x < c.head_dim_v; ++x) o[x] += std::exp(s[j] - log_sum) * float(v.row(b, j, kv_head)[x]);
        // Backward gets the rounded output.
        double delta = -dlse[number];
        for (int x = 0; x < c.head_dim_v; ++x) {
            T& rounded = out.x[out.at(b, i, h) + x] = T(static_cast<float>(o[x]));
            delta += double(float(rounded)) * float(dout.row(b, i, h)[x]);
        }
        for (int j = 0; j < c.keys; ++j) {
            if (!sees(i, j)) continue;
            const double p = std::exp(s[j] - log_sum),
                         ds = p * (dot(dout.row(b, i, h), v.row(b, j, kv_head), c.head_dim_v) - delta);
            for (int x = 0; x < c.head_dim; ++x) {
                dq.exact[dq.at(b, i, h) + x] += scale * ds * float(k.row(b, j, kv_head)[x]);
                dk.exact[dk.at(b, j, kv_head) + x] += scale * ds * float(q.row(b, i, h)[x]);
            }
            for (int x = 0; x < c.head_dim_v; ++x) dv.exact[dv.at(b, j, kv_head) + x] += p * float(dout.row(b, i, h)[x]);
        }
    }

    static Sequences side(int64_t rows) {
        Sequences sequences;
        sequences.capacity = sequences.max_length = rows;
        return sequences;
    }

    void fill_in() {
        params.q = q.params(), params.k = k.params(), params.v = v.params(), params.out = out.params();
        params.dout = dout.params(), params.dq = dq.params(), params.dk = dk.params(), params.dv = dv.params();
        params.lse = {lse.data(), int64_t{c.heads_q} * c.queries, 1, c.queries};
        if (c.dlse) params.dlse = {dlse.data(), int64_t{c.heads_q} * c.queries, 1, c.queries};
        params.q_lengths = {nullptr, nullptr, c.queries}, params.k_lengths = {nullptr, nullptr, c.keys};
        params.batch = c.batch, params.heads_q = c.heads_q, params.heads_k = c.heads_k, params.group_size = c.heads_q / c.heads_k;
        params.head_dim = c.head_dim, params.head_dim_v = c.head_dim_v;
        params.softmax_scale = static_cast<float>(scale), params.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
        params.mask = {c.left, c.right, c.top_left};
        params.vector_loads = params.vector_out = true;
        params.units = (c.queries + kUnitRows - 1) / kUnitRows;
        statistics.assign(size_t(c.batch) * c.heads_q * params.units * kUnitRows, SoftmaxStatistics{NAN, NAN});
        sums.assign(statistics.size() * HEAD_DIM, NAN);
        params.softmax_statistics = statistics.data();
        params.dq_accumulator = sums.data();
        params.key_schedule = schedule_params(side(c.keys), c.batch, c.heads_k, Kernel::config.tile_k, 1e7, false);
        params.query_schedule = schedule_params(side(c.queries), c.batch, c.heads_q, kUnitRows, 1e9, false);
    }

    BackwardPlan plan() const {
        BackwardPlan plan;
        const auto launch = [](BackwardStep step, const ScheduleParams& schedule) {
            return launch_shape(blocks_of(schedule), resources_of_backward<Kernel>(int(step), 0));
        };
        plan.statistics = launch(BackwardStep::statistics, params.query_schedule);
        plan.dk_dv = launch(BackwardStep::dk_dv, params.key_schedule);
        plan.dq_conversion = launch(BackwardStep::dq_conversion, params.query_schedule);
        return plan;
    }
};

// Checks the root mean square error relative to the exact values, and that no value that bf16 can represent became 0 (fp16
// probabilities end at 2^-25).
bool near(const char* name, const Rows& got) {
    double error = 0, size = 0;
    int lost = 0;
    for (size_t i = 0; i < got.x.size(); ++i) {
        if (int(i % got.stride) >= got.heads * got.dim) {
            lost += float(got.x[i]) == float(got.x[i]);  // a gap was overwritten
            continue;
        }
        const double x = float(got.x[i]), exact = got.exact[i];
        error += (x - exact) * (x - exact);
        size += exact * exact;
        lost += kWide && x == 0 && std::fabs(exact) > 0x1p-124;
    }
    const double relative = size > 0 ? std::sqrt(error / size) : std::sqrt(error);
    const bool good = relative <= 2 * kRounding && lost == 0;
    if (!good) std::printf("WRONG %s: relative error %.2e, %d lost\n", name, relative, lost);
    return good;
}

bool check(const Case& c) {
    Problem p(c);
    launch_backward<Kernel>(p.plan(), p.params, nullptr);
    const bool good = near("dq", p.dq) & near("dk", p.dk) & near("dv", p.dv);
    std::printf("%s %d x %d heads %d/%d keys %d dims %d %d window %d %d size %g\n", good ? "ok" : "WRONG", c.batch, c.queries,
                c.heads_q, c.heads_k, c.keys, c.head_dim, c.head_dim_v, c.left, c.right, c.size);
    return good;
}

int main(int, char** argv) {
    emulation::set_disorder(std::atoi(argv[1]));
    constexpr int kAll = kUnboundedWindow, kDim = HEAD_DIM;
    const Case cases[] = {
        {1, 1, 1, 64, 128, kDim, kDim, kAll, kAll, 1, false, false},                 // one tile of each
        {1, 1, 1, 100, 90, kDim, kDim, kAll, kAll, 1, false, true},                  // partial tiles
        {1, 2, 1, 300, 333, kDim, kDim, kAll, 0, 1, false, false},                   // causal, shared key heads
        {2, 2, 2, 330, 70, kDim, kDim, kAll, 0, 1, false, false},                    // rows without keys
        {1, 1, 1, 100, 400, kDim, kDim, kAll, 0, 1, true, false},                    // keys that no row sees: zeros are written
        {1, 1, 1, 520, 520, kDim - 8, kDim, 100, 0, 1, false, false},                // a window
        {2, 4, 2, 150, 200, kDim, kDim - 16, 70, 30, 1, false, true},                // several batch entries and heads
        {1, 2, 1, 150, 200, kDim, kDim, 120, 0, kWide ? 4.0f : 2.0f, false, false},  // very small probabilities
        {1, 1, 1, 0, 130, kDim, kDim, kAll, kAll, 1, false, false},                  // no queries at all
        {1, 1, 1, 70, 0, kDim, kDim, kAll, kAll, 1, false, false},                   // no keys
    };
    bool good = true;
    for (const Case& c : cases) good &= check(c);
    return good ? 0 : 1;
}
