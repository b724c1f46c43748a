// The kernels count rows, heads and thread blocks in 32 bits; larger problems are refused here.
#include "cuda/host/limits.h"

#include <initializer_list>

#include "cuda/attention/params.h"
#include "problem/check.h"

namespace libflash::cuda {
namespace {

void check_below(const char* argument, const char* what, int64_t size, int64_t limit) {
    if (size < limit) return;
    refuse(FLASH_STATUS_UNSUPPORTED, argument, "is too large for the CUDA kernels",
           text_of(what, " is ", size, ", it must be below ", limit));
}

// Checks the number of thread blocks, for tiles of at least 32 rows.
void check_blocks(const char* argument, const Sequences& rows, int64_t batch, int64_t heads) {
    constexpr int64_t kSmallestTile = 32;
    const int64_t tiles = rows.capacity / kSmallestTile + 1 + (rows.packed() ? batch : 0);
    int64_t blocks = 0;
    if (__builtin_mul_overflow(tiles, heads, &blocks) || (!rows.packed() && __builtin_mul_overflow(blocks, batch, &blocks)))
        blocks = INT64_MAX;
    check_below(argument, "the number of its tiles", blocks, int64_t{1} << 31);
}

void check_products(const char* argument, const char* what, std::initializer_list<int64_t> sizes, int64_t limit) {
    int64_t product = 1;
    for (const int64_t size : sizes) {
        if (__builtin_mul_overflow(product, size, &product)) product = INT64_MAX;
    }
    check_below(argument, what, product, limit);
}

}  // namespace

void check_block_count(const char* argument, int64_t blocks) {
    check_below(argument, "the number of its tiles", blocks, int64_t{1} << 31);
}

void check_sizes(const AttentionProblem& problem) {
    check_below("q", "the batch", problem.batch, int64_t{1} << 31);
    check_below("q", "its number of rows", problem.q_rows.capacity, kUnboundedWindow);
    check_below("k", "its number of rows", problem.k_rows.capacity, kUnboundedWindow);
    check_blocks("q", problem.q_rows, problem.batch, problem.heads_q);
    check_blocks("k", problem.k_rows, problem.batch, problem.heads_k);
}

void check_sizes(const DecodeProblem& problem) {
    check_below("q", "the batch", problem.batch, int64_t{1} << 31);
    check_below("q", "its number of rows", problem.seqlen_q, kUnboundedWindow);
    check_below("k_cache", "the capacity of a sequence", problem.cache.capacity, kUnboundedWindow);
    check_below("k_cache", "its number of entries or pages", problem.cache.k.shape[0], int64_t{1} << 31);
    if (problem.rotary_cos.present)
        check_below("rotary_cos", "its number of rows", problem.rotary_cos.shape[0], int64_t{1} << 31);
    // The append kernel counts the rows of q and k_new together.
    const auto sequences = [&](const Sequences& rows) { return rows.packed() ? 1 : problem.batch; };
    check_products("q", "the number of its rows of all heads", {sequences(problem.q_rows), problem.heads_q, problem.seqlen_q},
                   int64_t{1} << 30);
    check_products("k_new", "the number of its rows of all heads",
                   {sequences(problem.new_rows), problem.heads_k, problem.seqlen_new}, int64_t{1} << 30);
    check_below("tree_mask", "its number of rows", problem.tree.rows.capacity, int64_t{1} << 30);
    check_below("tree_mask", "its number of words", problem.tree.words, int64_t{1} << 26);
}

}  // namespace libflash::cuda
