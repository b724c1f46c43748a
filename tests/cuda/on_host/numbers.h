// Random numbers of the types of the kernels, conversions to double and back with one rounding, and errors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <random>
#include <vector>

#include "cuda/ptx/math.cuh"

template <class Number>
std::vector<Number> random(size_t count, float scale, std::mt19937& generator) {
    std::normal_distribution<float> normal;
    std::vector<Number> x(count);
    for (Number& y : x) y = Number(scale * normal(generator));
    return x;
}

template <class Number>
double wide(Number x) {
    return libflash::cuda::to_float(x);
}
inline double wide(double x) { return x; }

template <class Number>
std::vector<double> wide(const std::vector<Number>& x) {
    std::vector<double> widened(x.size());
    for (size_t i = 0; i < x.size(); ++i) widened[i] = wide(x[i]);
    return widened;
}

// The sums of the checks. With the compiler options of the programs (emulated_programs.py) they would take half of a run.
template <class A, class B>
__attribute__((optimize("O3"))) double dot(const A* a, const B* b, int count) {
    constexpr int kSums = 16;  // several vectors, because each addition waits for the one before it
    double sums[kSums] = {}, sum = 0;
    int i = 0;
    for (; i + kSums <= count; i += kSums)
        for (int n = 0; n < kSums; ++n) sums[n] += wide(a[i + n]) * wide(b[i + n]);
    for (; i < count; ++i) sum += wide(a[i]) * wide(b[i]);
    for (int n = 0; n < kSums; ++n) sum += sums[n];
    return sum;
}
template <class Number>
__attribute__((optimize("O3"))) void add_scaled(double* sums, double factor, const Number* x, int count) {
    for (int i = 0; i < count; ++i) sums[i] += factor * wide(x[i]);
}
// The same with the absolute values of the terms.
template <class Number>
__attribute__((optimize("O3"))) void add_absolute(double* sums, double factor, const Number* x, int count) {
    for (int i = 0; i < count; ++i) sums[i] += std::fabs(factor * wide(x[i]));
}

inline __half rounded(double x, __half) { return __double2half(x); }
inline __nv_bfloat16 rounded(double x, __nv_bfloat16) { return __double2bfloat16(x); }
inline float rounded(double x, float) { return static_cast<float>(x); }

inline bool equal_or_nan(double x, double y) { return x == y || (x != x && y != y); }

// The larger of two errors; NaN is the largest.
inline double larger_error(double x, double y) { return y <= x ? x : y; }

// Root mean square of errors, relative to that of the exact values; absolute if all of these are 0.
struct RelativeError {
    double error = 0, size = 0;

    void add(double got, double exact) { error += (got - exact) * (got - exact), size += exact * exact; }
    double value() const { return size > 0 ? std::sqrt(error / size) : std::sqrt(error); }
};
