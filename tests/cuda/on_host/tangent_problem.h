// What the programs on tangents share: sizes, the options of a problem, and the comparison of results. The program defines
// TangentKernel, the kernel's configuration, before it includes this header.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "numbers.h"

using T = ElementOf<TangentKernel::config.dtype>;
// Two query heads share a key head; causal with a window; the last rows are not in use. Rows before kUsed - kKeys see no key.
constexpr int kDim = HEAD_DIM - 8, kDimV = HEAD_DIM, kRows = 150, kUsed = 141, kKeys = 130, kHeads = 2, kLeft = 70;
constexpr int kBefore = 5;  // packed: rows that belong to no sequence
constexpr bool kFloat = TangentKernel::config.dtype == KernelType::f32_;
constexpr double kRounding16 = TangentKernel::config.dtype == KernelType::f16_ ? 0x1p-10 : 0x1p-7;

inline std::mt19937 generator(7);
template <class Number>
std::vector<Number> random(size_t count, float scale) {
    return random<Number>(count, scale, generator);
}

// The options: a block mask whose last rows do not see the last keys, a mask, ALiBi, softcap, dropout.
struct TangentProblem {
    bool rare, without_keys = false;
    int given;  // a bit for each tangent
    double scale = 1 / std::sqrt(double{kDim}), cap = 9;
    std::vector<uint8_t> mask, blocks{1, 1, 1, 0};
    std::vector<float> slopes{0.02f, 0.1f};
    DropoutParams dropout{};

    TangentProblem(bool rare_options, int which) : rare(rare_options), given(which) {
        for (int i = 0; i < kRows * kKeys; ++i) mask.push_back(generator() % 8 != 0);
        dropout.keep_factor = rare ? 1 / 0.75f : 1, dropout.threshold = 1u << 30, dropout.active = rare;
        dropout.seed_low = 3, dropout.seed_high = 4, dropout.offset_mix = 5;
    }

    static size_t at(int row, int head, int dim) { return (size_t(row) * kHeads + head) * dim; }
    bool sees(int row, int key) const {
        const int diagonal = row + kKeys - kUsed;
        if (without_keys || row >= kUsed || key > diagonal || key < diagonal - kLeft) return false;
        return !rare || (mask[row * kKeys + key] && blocks[row / 128 * 2 + key / 128]);
    }
    // The factor of dropout.
    double keep(int row, int key, int head) const {
        if (!rare) return 1;
        return is_kept(dropout, head, row, key) ? 1 / 0.75 : 0;
    }
};

inline RowsParams rows_of(std::vector<T>& x, int heads, int dim) { return {x.data(), 0, int64_t{heads} * dim, dim}; }
inline RowStatisticsParams numbers_of(std::vector<float>& x) { return {x.data(), int64_t{kHeads} * kRows, 1, kRows}; }

inline Sequences side(int64_t rows, const int32_t* cu) {
    Sequences sequences;
    sequences.capacity = sequences.max_length = rows;
    sequences.cu = cu;
    return sequences;
}

// Checks the root mean square of the error relative to that of the values, and that results whose exact value is 0 are 0.
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
