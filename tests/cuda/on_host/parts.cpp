// Runs the sm80 forward and backward kernels on the host for a problem whose rows and keys are divided into several calls, and
// compares the whole with double precision. Arguments: 1 the size of the inputs, 2 whether softcap, dropout and a sink are used,
// 3 whether backward is deterministic. Prints the errors; exit code 0 means none is too large.
#include "attention_kernels.h"

#include <cstdio>
#include <cstdlib>

#include "cuda/host/long_sums.h"
#include "dropout_problem.h"

constexpr int kRows = 200, kKeys = 330, kHeads = 2, kLeft = 190;  // two query heads share one key head; causal
constexpr int kFirstRow = kKeys - kRows;                          // position of row 0
constexpr int kSequence = 5, kFirstHead = 1, kAllHeads = 7;       // sequence_numbers, head_begin, heads_total
constexpr double kDrop = 0.3, kCap = 9;

std::mt19937 generator(3);
template <class Number>
std::vector<Number> random(size_t count, float scale) {
    return random<Number>(count, scale, generator);
}

// Some rows or keys of the whole, ascending. `step` 0: their positions are given as an array.
struct Part {
    std::vector<int32_t> members;
    int step;
};
Part range(int first, int last, int step = 1) {
    Part part{{}, step};
    for (int i = first; i < last; i += step) part.members.push_back(i);
    return part;
}
Part two_ranges(int first, int last, int next, int end) {
    Part part = range(first, last), more = range(next, end);
    part.members.insert(part.members.end(), more.members.begin(), more.members.end());
    part.step = 0;
    return part;
}
const Part kRowParts[] = {two_ranges(0, 60, 130, kRows), range(60, 130)};
const Part kKeyParts[] = {range(0, 130), two_ranges(130, 180, 250, kKeys), range(180, 250, 2), range(181, 250, 2)};

// The rows of a matrix that belong to a part; each member has `heads` rows of kDim numbers.
template <class Number>
std::vector<Number> taken(const std::vector<Number>& whole, const Part& part, int heads) {
    std::vector<Number> x;
    const size_t size = size_t{static_cast<size_t>(heads)} * kDim;
    for (int i : part.members) x.insert(x.end(), whole.begin() + i * size, whole.begin() + (i + 1) * size);
    return x;
}
template <class Number>
void put(std::vector<Number>& whole, const Part& part, int heads, const std::vector<Number>& x) {
    const size_t size = size_t{static_cast<size_t>(heads)} * kDim;
    for (size_t n = 0; n < part.members.size(); ++n)
        std::copy(x.begin() + n * size, x.begin() + (n + 1) * size, whole.begin() + part.members[n] * size);
}

struct Problem {
    bool rare;
    double scale = 1 / std::sqrt(double{kDim});
    std::vector<T> q, k, v, dout;
    std::vector<float> sink, out, lse, dq, dk, dv, dsink;
    std::vector<double> o64, lse64, dq64, dk64, dv64, dsink64;

    Problem(float size, bool rare_options) : rare(rare_options) {
        q = random<T>(kRows * kHeads * kDim, size), k = random<T>(kKeys * kDim, size), v = random<T>(kKeys * kDim, size);
        dout = random<T>(q.size(), size), sink = random<float>(kHeads, 1);
        out.assign(q.size(), NAN), dq.assign(q.size(), NAN), dk.assign(k.size(), NAN), dv.assign(k.size(), NAN);
        lse.assign(kRows * kHeads, NAN), dsink.assign(kHeads, 0);
        o64.assign(q.size(), 0), dq64.assign(q.size(), 0), dk64.assign(k.size(), 0), dv64.assign(k.size(), 0);
        lse64.assign(lse.size(), 0), dsink64.assign(kHeads, 0);
    }

    Dropout drops() const { return dropout_of(rare ? kDrop : 0); }
    DropoutParams dropout() const { return dropout_params(drops()); }
    bool keeps(int row, int head, int key) const {
        if (!rare) return true;
        return is_kept(dropout(), kSequence * kAllHeads + kFirstHead + head, kFirstRow + row, key);
    }

    void solve_row(int row, int head) {
        const size_t at = (size_t{static_cast<size_t>(row)} * kHeads + head) * kDim;
        std::vector<double> s(kKeys, -INFINITY), slope(kKeys, 1);
        double sum = rare ? std::exp(double{sink[head]}) : 0, delta = 0;
        for (int j = std::max(0, kFirstRow + row - kLeft); j <= kFirstRow + row; ++j) {
            s[j] = scale * dot(&q[at], &k[size_t{static_cast<size_t>(j)} * kDim], kDim);
            const double tanh_z = std::tanh(s[j] / kCap);
            if (rare) slope[j] = 1 - tanh_z * tanh_z, s[j] = kCap * tanh_z;
            sum += std::exp(s[j]);
        }
        const double log_sum = lse64[row * kHeads + head] = std::log(sum), factor = drops().keep_factor();
        for (int j = 0; j < kKeys; ++j) {
            const double p = std::exp(s[j] - log_sum);
            if (p == 0 || !keeps(row, head, j)) continue;
            add_scaled(&o64[at], factor * p, &v[j * kDim], kDim);
        }
        // Backward gets the rounded output.
        for (int c = 0; c < kDim; ++c) delta += wide(T(static_cast<float>(o64[at + c]))) * wide(dout[at + c]);
        if (rare) dsink64[head] -= std::exp(sink[head] - log_sum) * delta;
        for (int j = 0; j < kKeys; ++j) {
            const double p = std::exp(s[j] - log_sum);
            if (p == 0) continue;
            const double keep = keeps(row, head, j) ? factor : 0;
            const double ds = p * (keep * dot(&dout[at], &v[j * kDim], kDim) - delta) * slope[j] * scale;
            add_scaled(&dq64[at], ds, &k[j * kDim], kDim);
            add_scaled(&dk64[j * kDim], ds, &q[at], kDim);
            add_scaled(&dv64[j * kDim], keep * p, &dout[at], kDim);
        }
    }
};

PositionsParams positions(const Part& part, const std::vector<int32_t>& positions_of_part) {
    if (part.step == 0) return {nullptr, positions_of_part.data(), 0, 0, 1};
    return {nullptr, nullptr, 0, positions_of_part[0], part.step};
}

// One call: some rows and some keys.
struct Call {
    Problem& p;
    const Part &rows, &keys;
    bool first;
    std::vector<int32_t> row_positions, sequence{kSequence};
    std::vector<T> q, k, v;

    Call(Problem& problem, const Part& row_part, const Part& key_part, bool is_first)
        : p(problem), rows(row_part), keys(key_part), first(is_first), row_positions(row_part.members),
          q(taken(p.q, rows, kHeads)), k(taken(p.k, keys, 1)), v(taken(p.v, keys, 1)) {
        for (int32_t& row : row_positions) row += kFirstRow;
    }
    int32_t row_count() const { return static_cast<int32_t>(rows.members.size()); }
    int32_t key_count() const { return static_cast<int32_t>(keys.members.size()); }

    template <class Params>
    void fill_in(Params& params, std::vector<float>& lse) {
        params.q = dense_rows(q, kHeads), params.k = dense_rows(k, 1), params.v = dense_rows(v, 1);
        params.lse = {lse.data(), 0, kHeads, 1};
        fill_in_sizes(params, row_count(), key_count(), kHeads, p.scale);
        params.mask = {kLeft, 0, false};
        params.shard = {
            positions(rows, row_positions), positions(keys, keys.members), sequence.data(), kFirstHead, kAllHeads, true};
        params.rare.dropout = p.dropout();
        if (p.rare) params.rare.softcap = kCap;
        if (p.rare && first) params.sink = {p.sink.data(), 0, 1, true};
    }

    template <class Out>
    void forward(std::vector<Out>& out, std::vector<float>& lse) {
        ForwardParams params{};
        fill_in(params, lse);
        params.out = dense_rows(out, kHeads);
        params.continues = !first, params.wide_out = std::is_same<Out, float>::value && !kFloat;
        params.schedule = schedule_params(one_sequence(row_count()), 1, kHeads, ForwardKernel::config.tile_q, 1e3, true);
        ForwardPlan plan;
        const bool long_sums = needs_long_sums(ForwardKernel::config, key_count());
        plan.instance = forward_instance_sm80(ForwardKernel::config, true, long_sums);
        plan.attention = launch_shape(blocks_of(params.schedule), resources_of_forward<ForwardKernel>(0, plan.instance.number));
        std::vector<float> sums;
        if (long_sums) {
            sums.assign(plan.attention.blocks * long_sums_bytes(ForwardKernel::config.tile_q, kDim) / sizeof(float), NAN);
            params.long_sums = sums.data();
        }
        launch_forward<ForwardKernel>(plan, params, nullptr);
    }

    void backward(std::vector<T>& out, std::vector<float>& lse, std::vector<float>& delta, std::vector<float>& dq,
                  std::vector<float>& dk, std::vector<float>& dv, std::vector<float>& dsink, bool deterministic) {
        BackwardParams params{};
        fill_in(params, lse);
        std::vector<T> dout = taken(p.dout, rows, kHeads), none(out.size(), T(NAN));
        params.out = dense_rows(first ? out : none, kHeads), params.dout = dense_rows(dout, kHeads);
        params.dq = dense_rows(dq, kHeads), params.dk = dense_rows(dk, 1), params.dv = dense_rows(dv, 1);
        params.delta = {delta.data(), 0, kHeads, 1};
        params.adds = !first;
        params.wide_dq = params.wide_dk = params.wide_dv = !kFloat;
        BackwardLaunch launch(params, kGeneralInstance, true, deterministic);
        BackwardPlan& plan = launch.plan;
        if (p.rare && first) params.dsink = {dsink.data(), 1, true}, plan.dsink = launch.shape(BackwardStep::dsink, kHeads);
        launch_backward<BackwardKernel>(plan, params, nullptr);
    }
};

void run(Problem& p, bool deterministic) {
    for (const Part& rows : kRowParts) {
        const bool second = &rows != kRowParts;
        std::vector<float> out(rows.members.size() * kHeads * kDim, NAN), lse(rows.members.size() * kHeads, NAN), delta = lse,
                                                                                                                  dq = out;
        for (const Part& keys : kKeyParts) {
            Call call(p, rows, keys, &keys == kKeyParts);
            if (second && !call.first) {  // an earlier result of 16 bits
                std::vector<T> rounded(out.begin(), out.end());
                call.forward(rounded, lse);
                for (size_t i = 0; i < out.size(); ++i) out[i] = to_float(rounded[i]);
            } else {
                call.forward(out, lse);
            }
        }
        put(p.out, rows, kHeads, out);
        for (size_t i = 0; i < rows.members.size(); ++i)
            for (int h = 0; h < kHeads; ++h) p.lse[rows.members[i] * kHeads + h] = lse[i * kHeads + h];
        std::vector<double> exact = taken(p.o64, rows, kHeads);
        std::vector<T> rounded(exact.size());
        for (size_t i = 0; i < exact.size(); ++i) rounded[i] = T(static_cast<float>(exact[i]));
        for (const Part& keys : kKeyParts) {
            Call call(p, rows, keys, &keys == kKeyParts);
            std::vector<float> before_dk = taken(p.dk, keys, 1), before_dv = taken(p.dv, keys, 1), dsink(kHeads, 0);
            if (!second) before_dk.assign(before_dk.size(), 0), before_dv.assign(before_dv.size(), 0);
            std::vector<float> dk = before_dk, dv = before_dv;  // added to
            if (call.first) dk.assign(dk.size(), NAN), dv.assign(dv.size(), NAN);
            call.backward(rounded, lse, delta, dq, dk, dv, dsink, deterministic);
            for (size_t i = 0; i < dk.size() && call.first; ++i) dk[i] += before_dk[i], dv[i] += before_dv[i];
            for (int h = 0; h < kHeads; ++h) p.dsink[h] += dsink[h];
            put(p.dk, keys, 1, dk), put(p.dv, keys, 1, dv);
        }
        put(p.dq, rows, kHeads, dq);
    }
}

// Checks the root mean square of the relative error.
bool near(const char* name, const std::vector<float>& got, const std::vector<double>& exact, double limit) {
    RelativeError error;
    for (size_t i = 0; i < got.size(); ++i) error.add(wide(got[i]), exact[i]);
    const double relative = error.value();
    const bool good = relative <= limit;
    std::printf("%s %s: relative error %.2e, limit %.1e\n", good ? "ok" : "WRONG", name, relative, limit);
    return good;
}

int main(int, char** argv) {
    late_copies = true;
    emulation::set_random_order(1);
    const double size = std::atof(argv[1]);
    Problem p(static_cast<float>(size), std::atoi(argv[2]) != 0);
    for (int head = 0; head < kHeads; ++head)
        for (int row = 0; row < kRows; ++row) p.solve_row(row, head);
    run(p, std::atoi(argv[3]) != 0);
    // Three of four calls of the second part of the rows round their result.
    const double limit = kFloat ? kRounding * size * size : kRounding;
    bool good = near("out", p.out, p.o64, 2 * limit) & near("lse", p.lse, p.lse64, 0x1p-18);
    good &= near("dq", p.dq, p.dq64, 2 * limit) & near("dk", p.dk, p.dk64, 2 * limit) & near("dv", p.dv, p.dv64, limit);
    if (p.rare) good &= near("dsink", p.dsink, p.dsink64, 4 * limit);
    return good ? 0 : 1;
}
