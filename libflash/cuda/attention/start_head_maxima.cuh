// The kernel that initialises the largest scores of heads to -infinity, before the atomic maxima (head_maxima.cuh).
#pragma once

#include "cuda/params.h"

namespace libflash::cuda {

constexpr int kHeadMaximaThreads = 128;

template <class Kernel, class Number>
__global__ void head_maxima_kernel(Number* maxima, int64_t stride, int heads) {
    const int head = static_cast<int>(blockIdx.x) * kHeadMaximaThreads + static_cast<int>(threadIdx.x);
    if (head < heads) maxima[head * stride] = -INFINITY;
}

// Launches the kernel, if it has thread blocks.
template <class Kernel, class Number>
void start_head_maxima(const LaunchShape& shape, Number* maxima, const ForwardStatisticsParams& params, cudaStream_t stream) {
    if (shape.blocks == 0) return;
    const auto kernel = head_maxima_kernel<Kernel, Number>;
    const int64_t stride = params.head_maxima_stride;
    const int heads = params.heads_q;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, 0, stream>>>(maxima, stride, heads);
}

}  // namespace libflash::cuda
