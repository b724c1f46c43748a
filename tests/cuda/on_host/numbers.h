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

inline __half rounded(double x, __half) { return __double2half(x); }
inline __nv_bfloat16 rounded(double x, __nv_bfloat16) { return __double2bfloat16(x); }
inline float rounded(double x, float) { return static_cast<float>(x); }

inline bool equal_or_nan(double x, double y) { return x == y || (x != x && y != y); }

// The larger of two errors; NaN is the largest.
inline double larger_error(double x, double y) { return y <= x ? x : y; }

// Root mean square of errors, relative to the exact values. Where these are all 0: the absolute one.
struct RelativeError {
    double error = 0, size = 0;

    void add(double got, double exact) { error += (got - exact) * (got - exact), size += exact * exact; }
    double value() const { return size > 0 ? std::sqrt(error / size) : std::sqrt(error); }
};
