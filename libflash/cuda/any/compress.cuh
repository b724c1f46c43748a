// Compress: lists of the kept blocks of a dense block mask, for each row and each column.
//
// A warp makes the list of one line (a row or a column) and reads 32 entries of the line at a time. A ballot tells which blocks
// are kept; the number of bits below a lane's own bit is the position of the lane's block in the list, so the list ascends.
// Neighbouring warps process neighbouring columns and share their bytes through the cache. Entries after the count are 0, as on
// the CPU.
#pragma once

#include <cuda_runtime.h>

#include "cuda/params.h"

namespace libflash::cuda::compress {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerMultiprocessor = 4;  // allows 64 registers per thread; with the compiler's own choice of 32 it spills

// A row or a column of one mask matrix, and where its list is written.
struct Line {
    const uint8_t* entries;
    int64_t step;  // between entries
    int64_t length;
    int32_t* count;
    int32_t* indices;
};

__host__ __device__ __forceinline__ int64_t row_lines(const CompressParams& p) { return p.row_counts ? p.matrices * p.rows : 0; }
__host__ __device__ __forceinline__ int64_t col_lines(const CompressParams& p) { return p.col_counts ? p.matrices * p.cols : 0; }

// Line `index`: the rows of all matrices come first, then their columns.
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

// Enqueues the kernel on `stream` and returns the result of cudaGetLastError().
template <class Kernel>
int launch_compress(const CompressPlan& plan, const CompressParams& p, void* stream) {
    const LaunchShape& shape = plan.compress;
    if (shape.blocks == 0) return cudaSuccess;
    const auto kernel = compress::compress_kernel<Kernel>;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, static_cast<cudaStream_t>(stream)>>>(p);
    return cudaGetLastError();
}

}  // namespace libflash::cuda
