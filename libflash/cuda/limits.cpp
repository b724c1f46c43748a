// Sizes that the CUDA kernels cannot count: they number rows, heads and thread blocks in 32 bits.
#include "cuda/attention/params.h"
#include "cuda/kernels.h"
#include "problem/check.h"

namespace libflash::cuda {
namespace {

void check_below(const char* argument, const char* what, int64_t size, int64_t limit) {
    if (size < limit) return;
    refuse(FLASH_STATUS_UNSUPPORTED, argument, "is too large for the CUDA kernels",
           text_of(what, " is ", size, ", it must be below ", limit));
}

// Thread blocks of tiles of at least 32 rows.
void check_blocks(const char* argument, const Sequences& rows, int64_t batch, int64_t heads) {
    constexpr int64_t kSmallestTile = 32;
    const int64_t tiles = rows.capacity / kSmallestTile + 1 + (rows.packed() ? batch : 0);
    int64_t blocks = 0;
    if (__builtin_mul_overflow(tiles, heads, &blocks) || (!rows.packed() && __builtin_mul_overflow(blocks, batch, &blocks)))
        blocks = INT64_MAX;
    check_below(argument, "the number of its tiles", blocks, int64_t{1} << 31);
}

}  // namespace

void check_sizes(const AttentionProblem& problem) {
    check_below("q", "the batch", problem.batch, int64_t{1} << 31);
    check_below("q", "its number of rows", problem.q_rows.capacity, kUnboundedWindow);
    check_below("k", "its number of rows", problem.k_rows.capacity, kUnboundedWindow);
    check_blocks("q", problem.q_rows, problem.batch, problem.heads_q);
    check_blocks("k", problem.k_rows, problem.batch, problem.heads_k);
}

}  // namespace libflash::cuda
