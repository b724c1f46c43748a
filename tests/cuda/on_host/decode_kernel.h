// The decode kernel that a program runs, chosen by its macros, and what the programs have in common.
#pragma once

#include "emulation.h"

#include "cuda/host/tile_schedule.h"
#include "decode_instances.h"
#include "numbers.h"

using namespace libflash;
using namespace libflash::cuda;

using T = ElementOf<DecodeKernel::config.dtype>;
constexpr int kDim = HEAD_DIM, kHeadsK = 2, kGroup = 3, kHeads = kHeadsK * kGroup, kCapacity = 200, kPage = 16;
constexpr int kColumns = (kCapacity + kPage - 1) / kPage;  // of the block table
constexpr double kRounding = sizeof(T) == 4 ? 0x1p-21 : (std::is_same<T, __half>::value ? 0x1p-11 : 0x1p-8);

inline std::mt19937 generator(5);
inline std::vector<T> random(size_t count) { return random<T>(count, 1, generator); }

// Rotary embedding of pairs from the two halves of the channels.
struct Rotary {
    std::vector<float> cos, sin;

    explicit Rotary(int positions) {
        for (int i = 0; i < positions * kDim / 2; ++i) {
            cos.push_back(static_cast<float>(std::cos(i * 0.01)));
            sin.push_back(static_cast<float>(std::sin(i * 0.01)));
        }
    }
    void rotate(const T* from, T* to, int position) const {
        for (int n = 0; n < kDim / 2; ++n) {
            const double x = wide(from[n]), y = wide(from[n + kDim / 2]);
            const double c = cos[position * kDim / 2 + n], s = sin[position * kDim / 2 + n];
            to[n] = rounded(x * c - y * s, T());
            to[n + kDim / 2] = rounded(x * s + y * c, T());
        }
    }
};

inline LaunchShape decode_shape(DecodeStep step, const DecodePlan& plan, int64_t blocks) {
    return launch_shape(blocks, resources_of_decode<DecodeKernel>(int(step), plan.instance.number));
}

// Elements of caches that differ; NaN equals NaN.
inline int count_differences(const std::vector<T>& x, const std::vector<T>& y) {
    int count = 0;
    for (size_t i = 0; i < x.size(); ++i) count += !equal_or_nan(wide(x[i]), wide(y[i]));
    return count;
}

// Prints a row whose error is larger than its limit.
inline bool is_within(double worst, int sequence, int row, int head) {
    if (worst <= 1) return true;
    std::printf("WRONG sequence %d row %d head %d: %.2g times the limit\n", sequence, row, head, worst);
    return false;
}
