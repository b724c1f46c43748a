#include "cuda/host/decode_splits.h"

#include <algorithm>
#include <cmath>

#include "cuda/attention/few_rows.h"
#include "cuda/attention/invariant_segments.h"
#include "cuda/attention/long_sums.h"
#include "problem/check.h"

namespace libflash::cuda {

namespace {

constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;  // largest grid
// The split size of invariant rows that have no segments, if the caller gives none. Another value changes the bits of these rows.
constexpr int64_t kInvariantSplit = 1024;

int64_t requested_split_size(const DecodeSizes& sizes) {
    const int64_t given = sizes.problem.request.split_size;
    return given == 0 && sizes.problem.invariant_rows && !sizes.has_segments() ? kInvariantSplit : given;
}

// Cost model. The unit is the time that a thread block needs for one key tile. Cost: number of waves * (key tiles per thread
// block + kBlockCost), plus kCombineCost if there is more than one split.
int64_t fastest_splits(const DecodeSizes& sizes) {
    constexpr double kBlockCost = 2, kCombineCost = 3;
    constexpr int64_t kMost = 256;
    const int64_t blocks = sizes.unsplit_blocks(), at_once = sizes.blocks_at_once();
    const int64_t tiles = std::max<int64_t>(1, ceil_div(sizes.visible_keys(), sizes.config.tile_k));
    // More splits than fill about two waves only make combine longer.
    const int64_t most = std::min({tiles, kMost, kMostBlocks / sizes.launched_blocks(), ceil_div(2 * at_once, blocks) + 1});
    int64_t best = 1;
    double best_cost = 0;
    for (int64_t splits = 1; splits <= most; ++splits) {
        const int64_t each = ceil_div(tiles, splits);
        if (splits > 1 && ceil_div(tiles, each) < splits) continue;  // some splits would be empty
        const double full = static_cast<double>(blocks * splits) / static_cast<double>(at_once);
        // Thread blocks share memory bandwidth, so a partial last wave is shorter than a full one; but not in proportion, because
        // the bandwidth of a single thread block is limited. Conversion of codes limits it more.
        const double tail = sizes.has_splits_of_codes() ? 0.8 : 0.3;
        const double waves = full <= 1 ? 1 : tail * std::ceil(full) + (1 - tail) * full;
        const double cost = waves * (static_cast<double>(each) + kBlockCost) + (splits > 1 ? kCombineCost : 0);
        if (splits == 1 || cost < best_cost) best = splits, best_cost = cost;
    }
    return best;
}

bool can_take_two_heads(const DecodeSizes& sizes) {
    const KernelConfig& config = sizes.config;
    const int element = static_cast<int>(element_bytes(sizes.problem.dtype));
    return !sizes.shares_keys() && sizes.problem.heads_k % 2 == 0 &&
           decode_key_heads(config.head_dim, config.tile_k, config.stages, element) == 2 &&
           sizes.blocks_per_multiprocessor() >= 2;
}

// Two key heads per thread block are faster in two cases:
// - several waves of short thread blocks: there are fewer waves, and still enough thread blocks to fill the GPU;
// - a paged cache, because memory is faster with longer reads. The number of splits is then doubled, so that there are as many
//   thread blocks as before. This is done only if it gains more than combining twice as many splits costs.
DecodeSplits fastest(const DecodeSizes& sizes) {
    constexpr int64_t kShort = 32, kFew = 16, kLong = 64;
    const int64_t splits = fastest_splits(sizes);
    if (!can_take_two_heads(sizes)) return {splits, 1};
    const int64_t tiles = ceil_div(ceil_div(sizes.visible_keys(), sizes.config.tile_k), splits);  // per split
    const int64_t blocks = sizes.unsplit_blocks() * splits, at_once = sizes.blocks_at_once();
    const bool fewer_waves = sizes.has_splits_of_codes() ? blocks <= 2 * at_once : 5 * blocks >= 8 * at_once;
    if (blocks > at_once) return {splits, tiles <= kShort && fewer_waves ? 2 : 1};
    const bool pays = tiles >= kLong || (splits > 1 && 2 * splits <= kFew && 2 * tiles >= kShort);
    return sizes.problem.cache.paged() && pays ? DecodeSplits{2 * splits, 2} : DecodeSplits{splits, 1};
}

// Invariant rows: how many thread blocks share the segments of a row. The bits do not depend on it. A thread block loads the keys
// of the next segment while it computes the last ones of a segment, so several segments for each are faster where there are
// enough thread blocks; and with all segments in one no other kernel has to fold them. As sequences may have very different
// lengths, none gets more than about kMostKeys, or one segment.
int64_t segment_groups(const DecodeSizes& sizes, int64_t segments) {
    constexpr int64_t kMostKeys = 8192;
    return std::min(segments, std::max(fastest_splits(sizes), ceil_div(sizes.visible_keys(), kMostKeys)));
}

}  // namespace

// Packed: an upper bound; each sequence that has rows has at most one partial tile. With long chunks and segments, a short
// sequence has as many thread blocks as if it had one query row.
int64_t DecodeSizes::query_tiles() const {
    if (short_tiles() > 0) return problem.batch * (has_segments() ? tiles_of_a_row(problem.group_size()) : short_tiles());
    const int64_t of_sequence = ceil_div(group_rows(), tile_q());
    if (!problem.q_rows.packed()) return of_sequence * (ragged() ? problem.batch : 1);
    return group_rows() / tile_q() + std::min(problem.batch, problem.seqlen_q);
}

int64_t DecodeSizes::likely_tiles() const {
    const bool knows = tiles.rows > 0 || has_segments();
    if (!knows || !problem.q_rows.packed() || problem.batch == 0) return query_tiles();
    return std::min(query_tiles(), problem.batch * ceil_div(mean_rows(problem) * problem.group_size(), tile_q()));
}

int64_t DecodeSizes::longest_split(int key_heads) const {
    if (!has_long_sums(config)) return kUnboundedWindow;
    return int64_t{kKeysPerSum} * (shares_keys() || has_segments() ? 1 : config.tile_k / kDecodeSlab / key_heads);
}

bool DecodeSizes::has_splits_of_codes() const {
    return has_scales(problem.cache) && !shares_keys() && element_bytes(problem.dtype) == 2;
}

int64_t DecodeSizes::blocks_per_multiprocessor() const {
    if (tiles.rows > 0) return tiles.blocks;
    if (has_splits_of_codes()) {
        const int stages = decode_code_stages(config.head_dim, config.stages, false);
        const bool few = are_few_rows(group_rows());
        const int rows = few ? kMaxFewRows : kDecodeSlab, threads = few ? kDecodeThreadsOfFewRows : kDecodeThreadsOfCodes;
        return decode_blocks_at_once(decode_code_shared_bytes(config.head_dim, config.tile_k, stages, rows),
                                     device.shared_memory_bytes, config.tile_k / kDecodeSlab * 32, threads);
    }
    const int bytes = decode_shared_bytes(config.head_dim, config.tile_k, config.stages,
                                          static_cast<int>(element_bytes(problem.dtype)), static_cast<int>(tile_q()));
    return decode_blocks_at_once(bytes, device.shared_memory_bytes, config.tile_k / kDecodeSlab * 32);
}

int64_t DecodeSizes::visible_keys() const {
    const MaskRule& rule = problem.mask_rule;
    const int64_t right = std::min(rule.right, problem.seqlen_q);
    if (rule.left == MaskRule::kUnbounded) return problem.cache.capacity;
    return std::min(problem.cache.capacity, rule.left + right + problem.seqlen_q);
}

DecodeSplits choose_splits(const DecodeSizes& sizes) {
    const DecodeProblem& problem = sizes.problem;
    if (problem.batch == 0 || problem.heads_q == 0 || problem.seqlen_q == 0) return {1, 1};
    const Request& request = problem.request;
    const auto of_bounded_length = [&](DecodeSplits splits) {
        const int64_t fewest = ceil_div(sizes.visible_keys(), sizes.longest_split(splits.key_heads));
        splits.splits = std::max(splits.splits, std::min(fewest, kMostBlocks / sizes.launched_blocks()));
        return splits;
    };
    const int64_t requested = requested_split_size(sizes);
    if (requested == 0 && request.num_splits == 0 && !sizes.has_segments()) return of_bounded_length(fastest(sizes));
    // Splits that are shorter than requested also begin at multiples of a size that does not depend on the rest of the batch.
    const int64_t split_size = std::min(requested, sizes.longest_split(1));
    const int64_t ranges = split_size > 0         ? ceil_div(problem.cache.capacity, split_size)
                           : sizes.has_segments() ? segments_of(problem.cache.capacity)
                                                  : request.num_splits;
    const int64_t groups = sizes.has_segments() ? segment_groups(sizes, ranges) : 1;
    if (sizes.has_segments() && groups <= 1) return {1, 1, split_size};
    if ((sizes.has_segments() ? groups : ranges) > kMostBlocks / sizes.launched_blocks()) {
        refuse(FLASH_STATUS_UNSUPPORTED, requested > 0 ? "split_size" : "num_splits",
               "must leave fewer than 2^31 thread blocks on CUDA",
               text_of(ranges, " ranges of keys for each of ", sizes.unsplit_blocks()));
    }
    const DecodeSplits splits{std::max<int64_t>(1, ranges), 1, split_size, groups};
    return split_size > 0 || sizes.has_segments() ? splits : of_bounded_length(splits);
}

}  // namespace libflash::cuda
