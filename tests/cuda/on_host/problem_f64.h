// The problem of the float64 programs, its options, and its solution with at least the bits of long double.
#pragma once

#include "emulation.h"

#include <cstdio>
#include <cstdlib>

#include "cuda/host/tile_schedule.h"
#include "cuda/params.h"
#include "cuda/sm80/score_f64.cuh"
#include "dropout_problem.h"
#include "exact_sums.h"

using namespace libflash;
using namespace libflash::cuda;
using Numbers = std::vector<double>;
using Exact = std::vector<Real>;

// Q and K have fewer channels than the kernel, V has another number of channels. With an odd number of channels, rows are not
// aligned to 16 bytes.
constexpr int kDim = HEAD_DIM - CHANNELS_LEFT_OUT, kDimV = HEAD_DIM / 2 + 2 + CHANNELS_LEFT_OUT;
// Several key heads where they do not take long.
constexpr int kBatch = 2, kKeyHeads = HEAD_DIM > 256 ? 1 : 2, kGroup = 2, kHeads = kGroup * kKeyHeads;
constexpr int kRows = 150, kKeys = 200;  // of each sequence, if they are not packed
constexpr double kDrop = 0.3;

std::mt19937 generator(5);
inline Numbers random(size_t count, double scale) {
    std::normal_distribution<double> normal;
    Numbers x(count);
    for (double& y : x) y = scale * normal(generator);
    return x;
}

struct Problem {
    bool rare, drops, packed, blocked, parted;
    double scale, cap = 9;
    int left, right = 0;
    // Of each sequence: where its rows and keys begin, how many it has, and how many of them exist.
    std::vector<int32_t> cu_q, cu_k, used_q, used_k;
    Numbers q, k, v, dout, dlse, bias, slopes, sink;
    std::vector<uint8_t> mask, block_mask;
    Numbers out, lse, dq, dk, dv, dbias, dsink, delta;
    Exact exact_lse, exact_dbias, exact_dsink;
    ExactSums exact_out, exact_dq, exact_dk, exact_dv;

    Problem(int options, double size)
        : rare(options & 1), drops(options & 2), packed(options & 4), blocked(options & 8), parted(options & 16) {
        scale = rare ? -0.3 / size : 1 / std::sqrt(double{kDim});
        left = rare ? 90 : kUnboundedWindow;
        cu_q = packed ? std::vector<int32_t>{0, 61, kRows * 2} : std::vector<int32_t>{0, kRows, 2 * kRows};
        cu_k = packed ? std::vector<int32_t>{0, 230, kKeys * 2} : std::vector<int32_t>{0, kKeys, 2 * kKeys};
        used_q = {packed ? 53 : kRows, packed ? 239 : kRows}, used_k = {packed ? 201 : kKeys, packed ? 170 : kKeys};
        q = random(2 * kRows * kHeads * kDim, size), k = random(2 * kKeys * kKeyHeads * kDim, size);
        v = random(2 * kKeys * kKeyHeads * kDimV, size), dout = random(2 * kRows * kHeads * kDimV, size);
        dlse = random(2 * kRows * kHeads, size);
        bias = random(kHeads * 2 * kRows * 2 * kKeys, 1), slopes = {0.01, 0.02, 0.5, 0.0}, sink = random(kHeads, 1);
        for (size_t i = 0; i < bias.size(); ++i) mask.push_back(generator() % 8 != 0);
        for (int i = 0; i < 3 * 4; ++i) block_mask.push_back(i % 5 != 1);
        out.assign(dout.size(), NAN), lse.assign(dlse.size(), NAN), dq.assign(q.size(), NAN), dk.assign(k.size(), NAN);
        dv.assign(v.size(), NAN), dbias.assign(bias.size(), NAN), dsink.assign(kHeads, NAN), delta.assign(lse.size(), NAN);
        exact_out.assign(out.size()), exact_dq.assign(q.size()), exact_dk.assign(k.size()), exact_dv.assign(v.size());
        exact_lse.assign(lse.size(), -INFINITY), exact_dbias.assign(bias.size(), 0), exact_dsink.assign(kHeads, 0);
    }

    int parts() const { return parted ? 2 : 1; }
    Sequences rows_of_queries() const {
        Sequences rows;
        rows.capacity = packed ? 2 * kRows : kRows, rows.max_length = packed ? 239 : kRows;
        rows.cu = packed ? cu_q.data() : nullptr;
        return rows;
    }
    Sequences rows_of_keys(int keys) const {
        Sequences rows;
        rows.capacity = packed ? 2 * keys : keys, rows.max_length = packed ? 230 : keys;
        rows.cu = packed ? cu_k.data() : nullptr;
        return rows;
    }

    // Rows and heads are counted over all sequences. lse is [head][row].
    size_t row_at(int b, int i) const { return cu_q[b] + i; }
    size_t key_at(int b, int j) const { return cu_k[b] + j; }
    size_t lse_at(int b, int h, int i) const { return h * 2 * kRows + row_at(b, i); }
    size_t score_at(int h, int i, int j) const { return (size_t{static_cast<size_t>(h)} * 2 * kRows + i) * 2 * kKeys + j; }
    // With parts, rows and keys are counted by position.
    int position(int b, int i) const { return i + used_k[b] - used_q[b]; }

    bool sees(int b, int h, int i, int j) const {
        if (j > position(b, i) + right || j < position(b, i) - left) return false;
        if (blocked && !block_mask[i / 128 * 4 + j / 128]) return false;
        return !rare || parted || mask[score_at(h, i, j)];
    }
    DropoutParams dropout() const { return dropout_params(dropout_of(drops ? kDrop : 0)); }
    double keep_factor() const { return dropout_of(drops ? kDrop : 0).keep_factor(); }
    bool keeps(int b, int h, int i, int j) const {
        if (!drops) return true;
        const uint32_t row = parted ? position(b, i) : i;
        return is_kept(dropout(), b * kHeads + h, row, j);
    }

    const double* key(int b, int h, int j) const { return &k[(key_at(b, j) * kKeyHeads + h / kGroup) * kDim]; }
    const double* value(int b, int h, int j) const { return &v[(key_at(b, j) * kKeyHeads + h / kGroup) * kDimV]; }

    // Scores of a row, and tanh(z / cap) of each.
    void score(int b, int h, int i, Exact& s, Exact& tanh_z) const {
        for (int j = 0; j < used_k[b]; ++j) {
            s[j] = -INFINITY, tanh_z[j] = 0;
            if (!sees(b, h, i, j)) continue;
            s[j] = scale * exact_dot(&q[(row_at(b, i) * kHeads + h) * kDim], key(b, h, j), kDim);
            if (!rare) continue;
            tanh_z[j] = std::tanh(s[j] / cap);
            s[j] = cap * tanh_z[j];
            if (!parted) s[j] += bias[score_at(h, i, j)] - slopes[h] * std::fabs(position(b, i) - j);
        }
    }

    void solve() {
        for (int b = 0; b < kBatch; ++b)
            for (int h = 0; h < kHeads; ++h)
                for (int i = 0; i < used_q[b]; ++i) solve_row(b, h, i);
    }
    void solve_row(int b, int h, int i) {
        Exact s(used_k[b]), tanh_z(used_k[b]);
        score(b, h, i, s, tanh_z);
        Real sum = rare ? std::exp(Real{sink[h]}) : 0, of_out = 0;
        for (Real x : s) sum += std::exp(x);
        if (sum == 0) return;
        const Real log_sum = exact_lse[lse_at(b, h, i)] = std::log(sum);
        const size_t row = row_at(b, i) * kHeads + h;
        Exact p(used_k[b]), keep(used_k[b]);  // probabilities, and the factors of dropout
        for (int j = 0; j < used_k[b]; ++j) {
            p[j] = std::exp(s[j] - log_sum), keep[j] = p[j] > 0 && keeps(b, h, i, j) ? keep_factor() : 0;
            if (keep[j] != 0) exact_out.add(row * kDimV, keep[j] * p[j], value(b, h, j), kDimV);
        }
        // Backward gets the rounded output.
        for (int c = 0; c < kDimV; ++c) of_out += Real{static_cast<double>(exact_out[row * kDimV + c])} * dout[row * kDimV + c];
        of_out -= dlse[lse_at(b, h, i)];
        if (rare) exact_dsink[h] -= std::exp(sink[h] - log_sum) * of_out;
        for (int j = 0; j < used_k[b]; ++j) {
            if (p[j] == 0) continue;
            const Real ds = p[j] * (keep[j] * exact_dot(&dout[row * kDimV], value(b, h, j), kDimV) - of_out),
                       dz = ds * (1 - tanh_z[j] * tanh_z[j]) * scale;
            exact_dbias[score_at(h, i, j)] += ds;
            const size_t key_row = key_at(b, j) * kKeyHeads + h / kGroup;
            exact_dq.add(row * kDim, dz, &k[key_row * kDim], kDim);
            exact_dk.add(key_row * kDim, dz, &q[row * kDim], kDim);
            if (keep[j] != 0) exact_dv.add(key_row * kDimV, keep[j] * p[j], &dout[row * kDimV], kDimV);
        }
    }
};

// One call: all rows and all keys, or those of a part (every second one).
struct Call {
    Problem& p;
    int part;
    bool first;
    Numbers k, v;

    Call(Problem& problem, int number)
        : p(problem), part(number), first(number == 0), k(taken(p.k, kDim)), v(taken(p.v, kDimV)) {}

    int keys() const { return kKeys / p.parts(); }
    // The rows of this part of a matrix of keys.
    Numbers taken(const Numbers& whole, int channels) const {
        Numbers x;
        const size_t size = kKeyHeads * channels;
        for (int j = part; j < 2 * kKeys; j += p.parts()) x.insert(x.end(), &whole[j * size], &whole[j * size] + size);
        return x;
    }
    void put(Numbers& whole, const Numbers& x, int channels) const {
        const size_t size = kKeyHeads * channels;
        for (int j = part, n = 0; j < 2 * kKeys; j += p.parts(), ++n)
            std::copy(&x[n * size], &x[n * size] + size, &whole[j * size]);
    }
    RowsParams rows(const Numbers& x, int count, int heads, int channels) const {
        return {const_cast<double*>(x.data()), p.packed ? 0 : int64_t{count} * heads * channels, heads * channels, channels};
    }
    RowStatisticsParams numbers(Numbers& x) const {
        return {reinterpret_cast<float*>(x.data()), p.packed ? 0 : kRows, 1, 2 * kRows};
    }
    BlockMaskParams blocks() const {
        BlockMaskParams params{};
        if (p.blocked) params.mask = p.block_mask.data(), params.mask_stride[2] = 4, params.mask_stride[3] = 1;
        return params;
    }

    template <class Params>
    void fill_in(Params& params) const {
        params.q = rows(p.q, kRows, kHeads, kDim), params.k = rows(k, keys(), kKeyHeads, kDim);
        params.v = rows(v, keys(), kKeyHeads, kDimV), params.out = rows(p.out, kRows, kHeads, kDimV);
        params.lse = numbers(p.lse);
        params.q_lengths = {p.packed ? p.cu_q.data() : nullptr, p.used_q.data(), p.packed ? 2 * kRows : kRows};
        params.k_lengths = {p.packed ? p.cu_k.data() : nullptr, p.parted ? nullptr : p.used_k.data(),
                            p.packed ? 2 * kKeys : keys()};
        params.batch = kBatch, params.heads_q = kHeads, params.group_size = kGroup;
        params.head_dim = kDim, params.head_dim_v = kDimV;
        params.mask = {p.left, p.right, false};
        params.in_double = {p.scale, p.rare ? p.cap : 0, p.keep_factor()};
        params.rare.dropout = p.dropout();
        if (!p.rare) return;
        if (first) params.sink = {p.sink.data(), 0, 1, false};
        if (p.parted) return;
        params.rare.alibi_slopes = {p.slopes.data(), 0, 1, false};
        params.rare.bias = {p.bias.data(), {0, int64_t{2} * kRows * 2 * kKeys, 2 * kKeys, 1}, false};
        params.rare.mask = {p.mask.data(), {0, int64_t{2} * kRows * 2 * kKeys, 2 * kKeys, 1}, false};
    }
    template <class Params>
    void fill_in_shard(Params& params) const {
        params.shard.heads_total = kHeads;
        if (!p.parted) return;
        params.shard.rows = {nullptr, nullptr, 0, kKeys - kRows, 1};
        params.shard.columns = {nullptr, nullptr, 0, part, 2};
        params.shard.has_positions = true;
    }
};

// The limit for a sum over all rows, whose terms cancel.
constexpr double kSumsOfRows = 0x1p-42;

// Checks the root mean square of the relative error. Rows that belong to no sequence or do not exist are 0 or -infinity in both.
template <class Wanted>
bool near(const char* name, const Numbers& got, const Wanted& exact, double limit = 0x1p-46) {
    Real error = 0, size = 0;
    int wrong = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        const Real wanted = exact[i];
        if (std::isinf(wanted)) {
            wrong += got[i] != wanted;
            continue;
        }
        error += (got[i] - wanted) * (got[i] - wanted), size += wanted * wanted;
    }
    const double relative = static_cast<double>(std::sqrt(error / (size > 0 ? size : 1)));
    const bool good = relative <= limit && wrong == 0;
    std::printf("%s %s: relative error %.2e, %d wrong\n", good ? "ok" : "WRONG", name, relative, wrong);
    return good;
}
