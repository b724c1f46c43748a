// Rows of floats in shared memory, from which they are written to rows of any type and alignment in global memory. A loop that is
// not unrolled writes them: code that writes wide rows from registers would be long, and needed for each type.
#pragma once

#include "cuda/ptx/math.cuh"

#include <cstdint>

namespace libflash::cuda {

template <int kRows, int kChannels, int kThreads>
struct FloatRows {
    static constexpr int kBytes = kRows * kChannels * 4, kChunks = kChannels / 8;

    char* shared;

    // The address of eight channels (a chunk) of a row. The chunks of four neighbouring rows are permuted, so that the lanes of
    // an accumulator block write to different banks.
    __device__ __forceinline__ float* chunk(int row, int number) const {
        return reinterpret_cast<float*>(shared) + row * kChannels + (number ^ (row & 3)) * 8;
    }

    // Writes `rows` rows with `channels` channels each: x + weight(row) * old. With a weight of 0 it writes x, even if the old
    // value is NaN. `vectors`: rows can be written 16 bytes at a time. All threads call it.
    template <class Out, class WeightOf>
    __device__ __forceinline__ void store(Out* to, int64_t stride, int rows, int channels, bool vectors, const WeightOf& weight,
                                          int thread) const {
#pragma unroll 1
        for (int i = thread; i < rows * kChunks; i += kThreads) {
            const int row = i / kChunks, number = i % kChunks;
            store_chunk(to + row * stride + number * 8, channels - number * 8, vectors, weight(row), chunk(row, number));
        }
    }

private:
    // Writes eight channels, of which `cols` exist.
    template <class Out>
    static __device__ __forceinline__ void store_chunk(Out* to, int cols, bool vectors, float weight, const float* from) {
        constexpr int kAtOnce = 16 / sizeof(Out);
        float x[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            x[c] = from[c];
            if (weight != 0.0f && c < cols) x[c] = fmaf(weight, to_float(to[c]), x[c]);
        }
#pragma unroll
        for (int first = 0; first < 8; first += kAtOnce) {
            if (first >= cols) return;
            if (vectors) {
                alignas(16) Out vector[kAtOnce];
#pragma unroll
                for (int c = 0; c < kAtOnce; ++c) vector[c] = from_float(x[first + c], Out());
                *reinterpret_cast<uint4*>(to + first) = *reinterpret_cast<const uint4*>(vector);
            } else {
#pragma unroll
                for (int c = first; c < first + kAtOnce; ++c)
                    if (c < cols) to[c] = from_float(x[c], Out());
            }
        }
    }
};

}  // namespace libflash::cuda
