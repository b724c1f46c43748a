// A tile of doubles in shared memory, and the products of such tiles. Fragments of m8n8k4 are loaded one number per lane.
#pragma once

#include <cstdint>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/mma_f64.cuh"

namespace libflash::cuda {

// Terms of a product A B^T that are processed at once.
constexpr int kTermStep = 16;

// kCols: a power of two, 8 or more. Groups of four neighbouring numbers are permuted within 128 bytes, so that these fragments
// access each bank once: four rows by four columns, four columns by four rows, and four columns by every second of eight rows.
template <int kRows, int kCols>
struct DoubleTile {
    static constexpr int kBytes = kRows * kCols * 8, kColumns = kCols;
    static constexpr bool kIsNarrow = kCols < 16;  // two rows in 128 bytes

    double* data;

    // The number that is combined by exclusive or with the number of a group of the row.
    __device__ static __forceinline__ unsigned permutation(unsigned row) {
        return kIsNarrow ? row / 2 % 2 : row / 2 % 4 ^ row % 2 * 2;
    }

    // Unsigned numbers need fewer instructions.
    __device__ __forceinline__ double& at(unsigned row, unsigned col) const {
        return data[row * kCols + (col ^ permutation(row) * 4)];
    }

    // Loads rows [first, first + kRows) of a matrix of `rows` x `cols`; elements outside of the matrix become 0, up to the next
    // multiple of kTermStep columns. Rows of the matrix are `stride` apart and aligned to 8 bytes. No addresses are kept from
    // call to call, because registers are scarce.
    template <int kThreads>
    __device__ __forceinline__ void load_async(const double* matrix, int64_t stride, int first, int rows, int cols,
                                               int thread) const {
        const double* const source = matrix + first * stride;
        const unsigned begin = hide_from_compiler(thread), end_row = max(rows - first, 0), end_col = cols;
#pragma unroll 2
        for (unsigned i = 0; i < kRows * kCols; i += kThreads) {
            const unsigned row = (begin + i) / kCols, col = (begin + i) % kCols;
            if (col / kTermStep * kTermStep < end_col)
                cp_async_8(shared_address(&at(row, col)), source + row * stride + col, row < end_row && col < end_col);
        }
    }

    // As load_async(), but copies two numbers at a time if rows are 16-byte aligned and have an even number of columns.
    template <int kThreads>
    __device__ __forceinline__ void load_pairs_async(const double* matrix, int64_t stride, int first, int rows, int cols,
                                                     int thread) const {
        const double* const source = matrix + first * stride;
        if ((reinterpret_cast<uintptr_t>(source) | static_cast<uintptr_t>(stride * 8) | cols * 8u) % 16 != 0) {
            load_async<kThreads>(matrix, stride, first, rows, cols, thread);
            return;
        }
        const unsigned begin = hide_from_compiler(thread) * 2, end_row = max(rows - first, 0), end_col = cols;
#pragma unroll 4
        for (unsigned i = 0; i < kRows * kCols; i += 2 * kThreads) {
            const unsigned row = (begin + i) / kCols, col = (begin + i) % kCols;
            if (col / kTermStep * kTermStep < end_col)
                cp_async_16(shared_address(&at(row, col)), source + row * stride + col, row < end_row && col < end_col);
        }
    }
};

// Accumulators of blocks of 8 x 8: element e of lane 4 * g + t is in row g and column 2 * t + e.
template <int kRowBlocks, int kColBlocks>
using DoubleBlocks = double[kRowBlocks][kColBlocks][2];

template <int kRowBlocks, int kColBlocks>
__device__ __forceinline__ void clear(DoubleBlocks<kRowBlocks, kColBlocks>& c) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
        for (int n = 0; n < kColBlocks; ++n) c[r][n][0] = c[r][n][1] = 0.0;
}

// Whether rows of A are multiplied 16 at a time, in one instruction.
#if __CUDA_ARCH__ >= 900
template <int kRowBlocks>
constexpr bool kInPairs = kRowBlocks % 2 == 0;
#else
template <int kRowBlocks>
constexpr bool kInPairs = false;
#endif

// c[..][n] += A b for 4 kSteps columns of A: a[r][i] is the fragment of A's row block r and columns from 4 i on.
template <int kSteps, int kRowBlocks, int kColBlocks>
__device__ __forceinline__ void add_products(DoubleBlocks<kRowBlocks, kColBlocks>& c, int n,
                                             const double (&a)[kRowBlocks][kSteps], const double (&b)[kSteps]) {
#pragma unroll
    for (int r = 0; r + 1 < kRowBlocks; r += 2) {
        double both[2 * kSteps];
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) both[i] = a[r + i % 2][i / 2];
        mma_m16n8(c[r][n][0], c[r][n][1], c[r + 1][n][0], c[r + 1][n][1], both, b);
    }
}

// c += A B^T over kTermStep columns from `first` on: the rows of A from `row` on, the rows of B from `col` on. The lane is 4 * g
// + t.
template <int kRowBlocks, int kColBlocks, class A, class B>
__device__ __forceinline__ void add_terms(DoubleBlocks<kRowBlocks, kColBlocks>& c, const A& a, int row, const B& b, int col,
                                          int first, unsigned g, unsigned t) {
    constexpr int kSteps = kInPairs<kRowBlocks> ? 4 : 1;
#pragma unroll
    for (int k = first; k < first + kTermStep; k += 4 * kSteps) {
        double left[kRowBlocks][kSteps];
#pragma unroll
        for (int i = 0; i < kRowBlocks * kSteps; ++i)
            left[i / kSteps][i % kSteps] = a.at(row + i / kSteps * 8 + g, k + i % kSteps * 4 + t);
#pragma unroll
        for (int n = 0; n < kColBlocks; ++n) {
            double right[kSteps];
#pragma unroll
            for (int i = 0; i < kSteps; ++i) right[i] = b.at(col + n * 8 + g, k + i * 4 + t);
            if constexpr (kInPairs<kRowBlocks>) {
                add_products(c, n, left, right);
            } else {
#pragma unroll
                for (int r = 0; r < kRowBlocks; ++r) mma_m8n8k4(c[r][n], left[r][0], right[0]);
            }
        }
    }
}

// The number of warps of forward that share the channels of a score; each has every second (fourth) block of 16 channels. The
// other kernels add in the same order as forward: where a score is large, exp(score - LSE) is more accurate if score and LSE have
// the same rounding errors.
template <int kHeadDim>
constexpr int kScoreParts = kHeadDim > 256 ? 4 : (kHeadDim > 128 ? 2 : 1);

// c += A B^T over `terms` columns.
template <int kRowBlocks, int kColBlocks, class A, class B>
__device__ __forceinline__ void add_scores(DoubleBlocks<kRowBlocks, kColBlocks>& c, const A& a, int row, const B& b, int col,
                                           int terms, int lane) {
    static_assert(kScoreParts<A::kColumns> <= 2, "");
    const unsigned at = hide_from_compiler(lane), g = at / 4, t = at % 4;
    if constexpr (kScoreParts<A::kColumns> == 2) {
        DoubleBlocks<kRowBlocks, kColBlocks> other;
        clear(other);
#pragma unroll 1
        for (int first = 0; first < terms; first += 2 * kTermStep) {
            add_terms(c, a, row, b, col, first, g, t);
            if (first + kTermStep < terms) add_terms(other, a, row, b, col, first + kTermStep, g, t);
        }
#pragma unroll
        for (int i = 0; i < kRowBlocks * kColBlocks * 2; ++i)
            c[i / (kColBlocks * 2)][i / 2 % kColBlocks][i % 2] += other[i / (kColBlocks * 2)][i / 2 % kColBlocks][i % 2];
    } else {
#pragma unroll 1
        for (int first = 0; first < terms; first += kTermStep) add_terms(c, a, row, b, col, first, g, t);
    }
}

// The columns of a matrix as wide as the head are divided among the warps of a thread block: each warp has every kWarps-th block
// of 8.
template <int kWarps>
__device__ __forceinline__ int column_of_warp(int block, int warp) {
    return (block * kWarps + warp) * 8;
}

// c += A B, or A^T B with kTransposed, over kTerms rows of B, for this warp's columns of B below `cols`.
template <bool kTransposed, int kTerms, int kWarps, int kRowBlocks, int kColBlocks, class A, class B>
__device__ __forceinline__ void add_values(DoubleBlocks<kRowBlocks, kColBlocks>& c, const A& a, const B& b, int cols, int warp,
                                           int lane) {
    const unsigned at = hide_from_compiler(lane), g = at / 4, t = at % 4;
    constexpr int kSteps = !kInPairs<kRowBlocks> ? 1 : kTerms < 16 ? 2 : 4;
#pragma unroll(kSteps == 1 ? 2 : 1)
    for (int k = 0; k < kTerms; k += 4 * kSteps) {
        double left[kRowBlocks][kSteps];
#pragma unroll
        for (int i = 0; i < kRowBlocks * kSteps; ++i) {
            const int term = k + i % kSteps * 4 + t, row = i / kSteps * 8 + g;
            left[i / kSteps][i % kSteps] = kTransposed ? a.at(term, row) : a.at(row, term);
        }
#pragma unroll
        for (int n = 0; n < kColBlocks; ++n) {
            const int col = column_of_warp<kWarps>(n, warp);
            if (col >= cols) break;
            double right[kSteps];
#pragma unroll
            for (int i = 0; i < kSteps; ++i) right[i] = b.at(k + i * 4 + t, col + g);
            if constexpr (kInPairs<kRowBlocks>) {
                add_products(c, n, left, right);
            } else {
#pragma unroll
                for (int r = 0; r < kRowBlocks; ++r) mma_m8n8k4(c[r][n], left[r][0], right[0]);
            }
        }
    }
}

// Writes the accumulator of add_values() to a tile, from which rows can be stored with little code.
template <int kWarps, int kRowBlocks, int kColBlocks, class Tile>
__device__ __forceinline__ void stage(const DoubleBlocks<kRowBlocks, kColBlocks>& c, const Tile& tile, int warp, int lane) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
        for (int i = 0; i < kColBlocks * 2; ++i)
            tile.at(r * 8 + lane / 4, column_of_warp<kWarps>(i / 2, warp) + lane % 4 * 2 + i % 2) = c[r][i / 2][i % 2];
}

// Calls rule(element, row, col) for the elements of a tile below `rows` and `cols`, each by one thread.
template <int kThreads, int kRows, int kCols, class Rule>
__device__ __forceinline__ void for_elements(const DoubleTile<kRows, kCols>& tile, int rows, int cols, int thread,
                                             const Rule& rule) {
#pragma unroll 1
    for (int i = thread; i < kRows * kCols; i += kThreads) {
        const int row = i / kCols, col = i % kCols;
        if (row < rows && col < cols) rule(tile.at(row, col), row, col);
    }
}

}  // namespace libflash::cuda
