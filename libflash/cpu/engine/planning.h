// Tile sizes, cost estimates and numbers of threads.
#pragma once

#include "cpu/cancel.h"
#include "cpu/engine/vector.h"
#include "cpu/kernels.h"
#include "cpu/parallel_for.h"
#include "cpu/thread_count.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kForwardKeys = 128;
constexpr int64_t kBackwardKeys = 128;

// The requested tile size or the default `usual`, but not larger than the longest sequence, which keeps the workspace of small
// problems small. With a block mask it is a power of two, so that no tile crosses a block boundary, except if one tile holds the
// whole sequence and the sequence fits in one block.
FLASH_INLINE int64_t tile_size(const AttentionProblem& problem, const Sequences& sequences, int64_t requested, int64_t usual,
                               int64_t most) {
    int64_t size = requested > 0 ? (requested < most ? requested : most) : usual;
    if (size > sequences.max_length && sequences.max_length > 0) size = sequences.max_length;
    const bool whole = size == sequences.max_length && size <= FLASH_BLOCK_SIZE;
    if (!problem.block_mask.present || whole) return size;
    int64_t power = 1;
    while (2 * power <= size && power < FLASH_BLOCK_SIZE) power *= 2;
    return power;
}

// An upper bound of the floating-point operations, which does not read the lengths of sequences. `products`: the number of pairs
// of matrix products; the forward pass has one pair, Q K^T and P V.
FLASH_INLINE double attention_flops(const AttentionProblem& problem, double products) {
    const double rows =
        static_cast<double>(problem.q_rows.packed() ? problem.q_rows.capacity : problem.batch * problem.q_rows.capacity);
    double keys = static_cast<double>(problem.k_rows.max_length);
    const MaskRule& rule = problem.mask_rule;
    const double band = static_cast<double>(rule.left) + static_cast<double>(rule.right) + 1;
    if (band < keys) keys = band;
    return 2 * products * rows * keys * static_cast<double>(problem.heads_q * (problem.head_dim + problem.head_dim_v));
}

// Waking a thread takes about 10 us, so each thread gets at least about 100 us of work.
FLASH_INLINE int choose_threads(int most, int64_t tasks, double flops) {
    const double worth = flops / 8e6 + 1;
    int threads = worth < most ? static_cast<int>(worth) : most;
    if (threads > tasks) threads = tasks > 1 ? static_cast<int>(tasks) : 1;
    return threads;
}

template <class Body>
FLASH_INLINE void run_parallel(int64_t tasks, int threads, const Body& body) {
    run_tasks(
        tasks, threads, [](const void* context, int64_t task, int thread) { (*static_cast<const Body*>(context))(task, thread); },
        &body);
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
