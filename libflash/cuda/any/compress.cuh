// Compress: a dense block mask as lists of the kept blocks, of each row and of each column.
//
// A warp makes one list, 32 entries of the line at a time: a ballot says which are kept, and the bits below a lane's own how many
// of them come before it, so the list ascends. Neighbouring warps make the lists of neighbouring columns and find each other's bytes
// in the cache. Entries past a count are 0, as on the CPU.
#pragma once

#include <cuda_runtime.h>

#include "cuda/params.h"

namespace libflash::cuda::compress {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerMultiprocessor = 4;  // leaves 64 registers a thread; at 32, the compiler's own choice, it spills

// A row or a column of one matrix, and where its list goes.
struct Line {
    const uint8_t* entries;
    int64_t step;  // from one entry to the next
    int64_t length;
    int32_t* count;
    int32_t* indices;
};

__host__ __device__ __forceinline__ int64_t row_lines(const CompressParams& p) { return p.row_counts ? p.matrices * p.rows : 0; }
__host__ __device__ __forceinline__ int64_t col_lines(const CompressParams& p) { return p.col_counts ? p.matrices * p.cols : 0; }

// The rows of all matrices, then their columns.
__device__ __forceinline__ Line line_of(const CompressParams& p, int64_t index) {
    const int64_t rows = row_lines(p);
    if (index < rows) return {p.mask + index * p.cols, 1, p.cols, p.row_counts + index, p.row_indices + index * p.cols};
    const int64_t col = index - rows;
    const uint8_t* matrix = p.mask + col / p.cols * p.rows * p.cols;
    return {matrix + col % p.cols, p.cols, p.rows, p.col_counts + col, p.col_indices + col * p.rows};
}

__device__ __forceinline__ void warp_list_line(const Line& line, int lane) {
    const unsigned before = (1u << lane) - 1;
    int64_t count = 0;
    for (int64_t first = 0; first < line.length; first += 32) {
        const int64_t at = first + lane;
        const bool kept = at < line.length && __ldg(line.entries + at * line.step) != 0;
        const unsigned ballot = __ballot_sync(0xffffffffu, kept);
        if (kept) line.indices[count + __popc(ballot & before)] = static_cast<int32_t>(at);
        count += __popc(ballot);
    }
    for (int64_t at = count + lane; at < line.length; at += 32) line.indices[at] = 0;
    if (lane == 0) *line.count = static_cast<int32_t>(count);
}

template <class Kernel>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) compress_kernel(const __grid_constant__ CompressParams p) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t lines = row_lines(p) + col_lines(p);
    for (int64_t index = int64_t{blockIdx.x} * kWarps + warp; index < lines; index += int64_t{gridDim.x} * kWarps)
        warp_list_line(line_of(p, index), lane);
}

}  // namespace libflash::cuda::compress

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_compress(int, int) {
    return {compress::kThreads, 0};
}

// Enqueues the work on `stream` and returns what cudaGetLastError() then says.
template <class Kernel>
int launch_compress(const CompressPlan& plan, const CompressParams& p, void* stream) {
    const LaunchShape& shape = plan.compress;
    if (shape.blocks == 0) return cudaSuccess;
    const auto kernel = compress::compress_kernel<Kernel>;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, static_cast<cudaStream_t>(stream)>>>(p);
    return cudaGetLastError();
}

}  // namespace libflash::cuda
