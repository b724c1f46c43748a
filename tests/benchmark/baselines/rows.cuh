// Softmax over the rows of a matrix in memory and its gradient: a thread block per row, which it reads once, keeps in registers
// and writes once.
#pragma once

#include "device.cuh"

namespace baselines::BASELINE_TYPE {

constexpr int kRowThreads = 256, kLongestRow = 16384;  // the most threads and columns
constexpr int kEdge = 128;                             // tile of the products, which read beyond the diagonal up to its end

// The columns of a row: [0, visible) are visible, [visible, end) are written as zeros. No product reads later columns.
struct Row {
    int visible, end;
    int64_t first;  // element
    __device__ explicit Row(const Problem& p) {
        const int row = blockIdx.x;
        visible = p.causal ? row + 1 : p.seqlen;
        end = p.causal ? min(p.pitch, (row / kEdge + 1) * kEdge) : p.pitch;
        first = (int64_t{blockIdx.y} * p.seqlen + row) * p.pitch;
    }
};

// The same value for all threads of the block. `scratch`: a float for each warp.
template <class Combine>
__device__ __forceinline__ float over_block(float x, float* scratch, const Combine& combine) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[0];
    for (int warp = 1; warp < blockDim.x / 32; ++warp) x = combine(x, scratch[warp]);
    return x;
}

// kVectors: vectors of 8 columns per thread.
template <int kVectors>
__global__ void __launch_bounds__(kRowThreads) standard_softmax_kernel(const T* scores, T* weights, float scale_log2, Problem p) {
    __shared__ float largest_of[kRowThreads / 32], sum_of[kRowThreads / 32];
    const Row row(p);
    float x[kVectors][8], largest = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int col = (threadIdx.x + i * blockDim.x) * 8;
        if (col < row.visible) widen(x[i], *reinterpret_cast<const uint4*>(scores + row.first + col));
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            if (col + e >= row.visible) x[i][e] = -INFINITY;
            largest = fmaxf(largest, x[i][e]);
        }
    }
    largest = over_block(largest, largest_of, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            x[i][e] = libflash::cuda::exp2_approx((x[i][e] - largest) * scale_log2);
            sum += x[i][e];
        }
    const float factor = 1.0f / over_block(sum, sum_of, [](float a, float b) { return a + b; });
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int col = (threadIdx.x + i * blockDim.x) * 8;
        if (col >= row.end) continue;
#pragma unroll
        for (int e = 0; e < 8; ++e) x[i][e] *= factor;
        *reinterpret_cast<uint4*>(weights + row.first + col) = narrow(x[i]);
    }
}

// dS = P * (dP - sum(P * dP))
template <int kVectors>
__global__ void __launch_bounds__(kRowThreads)
    standard_softmax_gradient_kernel(const T* weights, const T* dweights, T* dscores, Problem p) {
    __shared__ float sum_of[kRowThreads / 32];
    const Row row(p);
    uint4 w[kVectors], dw[kVectors];
    float sum = 0.0f, x[8], dx[8];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int col = (threadIdx.x + i * blockDim.x) * 8;
        w[i] = dw[i] = {0, 0, 0, 0};
        if (col >= row.end) continue;
        w[i] = *reinterpret_cast<const uint4*>(weights + row.first + col);
        dw[i] = *reinterpret_cast<const uint4*>(dweights + row.first + col);
        widen(x, w[i]);
        widen(dx, dw[i]);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum += x[e] * dx[e];
    }
    sum = over_block(sum, sum_of, [](float a, float b) { return a + b; });
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int col = (threadIdx.x + i * blockDim.x) * 8;
        if (col >= row.end) continue;
        widen(x, w[i]);
        widen(dx, dw[i]);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] *= dx[e] - sum;
        *reinterpret_cast<uint4*>(dscores + row.first + col) = narrow(x);
    }
}

}  // namespace baselines::BASELINE_TYPE
