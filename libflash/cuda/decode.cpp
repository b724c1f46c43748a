// Decode: from the problem to the parameters of the kernels, the number of ranges that the keys are cut into, the workspace, and the launch.
#include "problem/decode.h"
#include "cuda/attention/fill_params.h"
#include "cuda/attention/fill_schedule.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "plan/device.h"
#include "plan/workspace.h"
#include "problem/check.h"

#include <algorithm>

namespace libflash::cuda {
namespace {

constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;  // of a launch

int64_t rows_of_group(const DecodeProblem& problem) { return problem.seqlen_q * problem.group_size(); }

int64_t tile_rows(const KernelConfig& config, const DecodeProblem& problem) {
    return decode_shares_keys(rows_of_group(problem)) ? config.tile_k : kDecodeSlab;
}

// Thread blocks with the keys of a sequence in one piece.
int64_t unsplit_blocks(const KernelConfig& config, const DecodeProblem& problem) {
    return ceil_div(rows_of_group(problem), tile_rows(config, problem)) * problem.heads_k * problem.batch;
}

int shared_bytes(const KernelConfig& config, const DecodeProblem& problem) {
    return decode_shared_bytes(config.head_dim, config.tile_k, config.stages, static_cast<int>(element_bytes(problem.dtype)),
                               static_cast<int>(tile_rows(config, problem)));
}

// Thread blocks that a multiprocessor, and that the device runs at the same time.
int64_t blocks_of_multiprocessor(const KernelConfig& config, const DecodeProblem& problem) {
    return decode_blocks_at_once(shared_bytes(config, problem), device_facts(problem.device.id).shared_memory_bytes,
                                 config.tile_k / kDecodeSlab * 32);
}
int64_t blocks_at_once(const KernelConfig& config, const DecodeProblem& problem) {
    return device_facts(problem.device.id).multiprocessors * blocks_of_multiprocessor(config, problem);
}

// Keys that the rows of one tile can see at most.
int64_t visible_keys(const DecodeProblem& problem) {
    const MaskRule& rule = problem.mask_rule;
    const int64_t right = std::min(rule.right, problem.seqlen_q);
    if (rule.left == MaskRule::kUnbounded) return problem.cache.capacity;
    return std::min(problem.cache.capacity, rule.left + right + problem.seqlen_q);
}

// By what a call takes: so many rounds of thread blocks, each as long as its tiles of keys and what a thread block costs beyond them, and
// the end where results are put together. In units of one tile of one thread block.
int64_t choose_splits(const KernelConfig& config, const DecodeProblem& problem) {
    constexpr double kBlockCost = 2, kCombineCost = 3, kTail = 0.3;
    constexpr int64_t kMost = 256;
    const int64_t blocks = unsplit_blocks(config, problem), at_once = blocks_at_once(config, problem);
    const int64_t tiles = std::max<int64_t>(1, ceil_div(visible_keys(problem), config.tile_k));
    // More than some two rounds only adds to the end.
    const int64_t most = std::min({tiles, kMost, kMostBlocks / blocks, ceil_div(2 * at_once, blocks) + 1});
    int64_t best = 1;
    double best_cost = 0;
    for (int64_t splits = 1; splits <= most; ++splits) {
        const int64_t each = ceil_div(tiles, splits);
        if (splits > 1 && ceil_div(tiles, each) < splits) continue;  // some would be empty
        const double rounds = static_cast<double>(blocks * splits) / static_cast<double>(at_once);
        // Memory is shared: the last round, if it is not full, is faster, but a lone thread block has its own pace.
        const double waves = rounds <= 1 ? 1 : kTail * std::ceil(rounds) + (1 - kTail) * rounds;
        const double cost = waves * (static_cast<double>(each) + kBlockCost) + (splits > 1 ? kCombineCost : 0);
        if (splits == 1 || cost < best_cost) best = splits, best_cost = cost;
    }
    return best;
}

bool can_take_two_heads(const KernelConfig& config, const DecodeProblem& problem) {
    const int element = static_cast<int>(element_bytes(problem.dtype));
    return !decode_shares_keys(rows_of_group(problem)) && problem.heads_k % 2 == 0 &&
           decode_heads_beside(config.head_dim, config.tile_k, config.stages, element) == 2 &&
           blocks_of_multiprocessor(config, problem) >= 2;
}

// Two key heads a thread block, measured on an H200, are a gain
//   where that makes fewer rounds of short thread blocks, and leaves enough of these;
//   with pages, in whose disorder memory likes to be asked for longer pieces: in ranges half as long, unless putting more of them together
//   takes longer than that gives.
DecodeCut choose_cut(const KernelConfig& config, const DecodeProblem& problem) {
    constexpr int64_t kShort = 32, kFew = 16, kLong = 64;
    const int64_t splits = choose_splits(config, problem);
    if (!can_take_two_heads(config, problem)) return {splits, 1};
    const int64_t tiles = ceil_div(ceil_div(visible_keys(problem), config.tile_k), splits);  // of a range
    const int64_t blocks = unsplit_blocks(config, problem) * splits, at_once = blocks_at_once(config, problem);
    if (blocks > at_once) return {splits, tiles <= kShort && 5 * blocks >= 8 * at_once ? 2 : 1};
    const bool pays = tiles >= kLong || (splits > 1 && 2 * splits <= kFew && 2 * tiles >= kShort);
    return problem.cache.paged() && pays ? DecodeCut{2 * splits, 2} : DecodeCut{splits, 1};
}

int64_t padded_channels(const DecodeProblem& problem) {
    const int64_t vector = 16 / element_bytes(problem.dtype);
    return ceil_div(problem.head_dim, vector) * vector;
}

// A step of one row a sequence, which thread blocks of decode take in by themselves. The new key is seen, so it is in one range.
bool takes_in_new(const KernelConfig& config, const DecodeProblem& problem) {
    return decode_takes_in_rows(config.head_dim, config.tile_k) && (problem.k_new.present || problem.rotary_cos.present) &&
           problem.seqlen_q == 1 && problem.seqlen_new <= 1 && problem.heads_q > 0 &&
           !decode_shares_keys(rows_of_group(problem)) && !problem.leftpad;
}

bool turns_ahead(const KernelConfig& config, const DecodeProblem& problem) {
    return problem.rotary_cos.present && !takes_in_new(config, problem);
}

Workspace workspace_of(const Row& row, const DecodeProblem& problem, int64_t splits) {
    Workspace regions;
    const int64_t rows = problem.batch * problem.heads_q * problem.seqlen_q;
    if (turns_ahead(row.config, problem)) {
        regions.add("turned_q", static_cast<size_t>(rows * padded_channels(problem) * element_bytes(problem.dtype)));
    }
    if (splits > 1) {
        regions.add("partial_out", static_cast<size_t>(rows * splits * row.config.head_dim) * sizeof(float));
        regions.add("partial_lse", static_cast<size_t>(rows * splits) * sizeof(float));
    }
    return regions;
}

CacheParams cache_params(const DecodeProblem& problem) {
    const KvCache& cache = problem.cache;
    CacheParams params{};
    params.k = rows_params(cache.k);
    params.v = rows_params(cache.v);
    params.seqlens = problem.cache_seqlens;
    params.entries = cache.batch_idx;
    params.table = cache.block_table;
    params.table_batch = cache.block_table_stride[0];
    params.table_column = cache.block_table_stride[1];
    params.leftpad = problem.leftpad;
    params.default_seqlen = static_cast<int32_t>(problem.default_seqlen);
    params.seqlen_new = static_cast<int32_t>(problem.seqlen_new);
    params.capacity = static_cast<int32_t>(cache.capacity);
    params.places = static_cast<int32_t>(cache.k.shape[0]);
    if (cache.paged()) params.page = divisor_params(cache.page_size);
    return params;
}

AppendParams append_params(const DecodeProblem& problem, void* turned) {
    AppendParams params{};
    params.q = rows_params(problem.q);
    if (problem.k_new.present && problem.seqlen_new > 0) {
        params.k_new = rows_params(problem.k_new);
        params.v_new = rows_params(problem.v_new);
    }
    if (!problem.rotary_cos.present) return params;
    const int64_t channels = padded_channels(problem);
    if (turned) params.turned = {turned, problem.seqlen_q * problem.heads_q * channels, problem.heads_q * channels, channels};
    params.cos = problem.rotary_cos.data;
    params.sin = problem.rotary_sin.data;
    params.cos_row = problem.rotary_cos.stride[0];
    params.sin_row = problem.rotary_sin.stride[0];
    params.positions = static_cast<int32_t>(problem.rotary_cos.shape[0]);
    params.pairs = static_cast<int32_t>(problem.rotary_cos.shape[1]);
    params.interleaved = problem.rotary_interleaved;
    params.is_float = problem.rotary_cos.dtype == DType::f32;
    params.query_rows_advance = problem.mask_rule.bounded();
    return params;
}

// Whether two elements of a row can be written at once.
bool in_pairs(const RowsParams& rows, int64_t channels, int64_t element) {
    const auto even = [](int64_t elements) { return elements % 2 == 0; };
    return reinterpret_cast<uintptr_t>(rows.data) % static_cast<uintptr_t>(2 * element) == 0 && even(rows.batch) &&
           even(rows.row) && even(rows.head) && even(channels);
}

void fill_in_rules(DecodeParams& params, const DecodeProblem& problem) {
    constexpr double kLog2e = 1.4426950408889634;
    params.softmax_scale = static_cast<float>(problem.softmax_scale);
    params.scale_log2 = static_cast<float>(problem.softmax_scale * kLog2e);
    params.softcap = static_cast<float>(problem.softcap);
    params.left = window_side(problem.mask_rule.left);
    params.right = window_side(problem.mask_rule.right);
    params.alibi_slopes = head_params(problem.alibi_slopes);
    params.sink = head_params(problem.sink);
}

// Several rounds of thread blocks. Those that begin together also end together, and then memory is idle until the next ones have begun: a part of
// them begins a little later. And as others cover for the one that waits, fewer copies under way are enough, with which memory is faster.
void pace_rounds(DecodeParams& params, const KernelConfig& config, const DecodeProblem& problem, int64_t blocks) {
    constexpr int kEnoughBytes = 128 << 10;  // of a multiprocessor
    const int64_t of_each = blocks_of_multiprocessor(config, problem),
                  multiprocessors = device_facts(problem.device.id).multiprocessors;
    params.stages = config.stages;
    if (blocks <= of_each * multiprocessors || of_each < 2) return;
    params.late_begin = static_cast<uint32_t>(multiprocessors);
    params.late_count = static_cast<uint32_t>((of_each - 1) * multiprocessors);
    const int64_t tile_bytes = 2 * config.tile_k * config.head_dim * element_bytes(problem.dtype);
    const bool shares = decode_shares_keys(rows_of_group(problem));
    if (!shares && (config.stages - 1) * tile_bytes * of_each >= kEnoughBytes) params.stages = config.stages - 1;
}

DecodeParams make_params(const KernelConfig& config, const DecodeProblem& problem, const Workspace& regions, DecodeCut cut,
                         char* workspace) {
    DecodeParams params{};
    params.out = rows_params(problem.out);
    params.lse = row_numbers_params(problem.lse);
    params.cache = cache_params(problem);
    params.append = append_params(problem, turns_ahead(config, problem) ? workspace + regions.offset("turned_q") : nullptr);
    params.append.within = takes_in_new(config, problem);
    params.q = params.append.turned.data ? params.append.turned : rows_params(problem.q);
    params.batch = static_cast<int32_t>(problem.batch);
    params.seqlen_q = static_cast<int32_t>(problem.seqlen_q);
    params.heads_q = static_cast<int32_t>(problem.heads_q);
    params.heads_k = static_cast<int32_t>(problem.heads_k);
    params.group_size = static_cast<int32_t>(problem.group_size());
    params.head_dim = static_cast<int32_t>(problem.head_dim);
    params.head_dim_v = static_cast<int32_t>(problem.head_dim_v);
    params.by_tiles = divisor_params(std::max<int64_t>(1, ceil_div(rows_of_group(problem), tile_rows(config, problem))));
    params.by_heads = divisor_params(problem.heads_k);
    params.heads_beside = cut.heads;
    params.by_head_groups = divisor_params(problem.heads_k / cut.heads);
    params.by_splits = divisor_params(cut.splits);
    params.by_group = divisor_params(std::max<int64_t>(1, problem.group_size()));
    fill_in_rules(params, problem);
    params.splits = static_cast<int32_t>(cut.splits);
    params.split_size = static_cast<int32_t>(std::min<int64_t>(problem.request.split_size, kUnboundedWindow));
    if (cut.splits > 1) {
        params.partial_out = reinterpret_cast<float*>(workspace + regions.offset("partial_out"));
        params.partial_lse = reinterpret_cast<float*>(workspace + regions.offset("partial_lse"));
    }
    const int64_t element = element_bytes(problem.dtype);
    params.vector_q = in_vectors(params.q, problem.head_dim, element);
    params.vector_kv =
        in_vectors(params.cache.k, problem.head_dim, element) && in_vectors(params.cache.v, problem.head_dim_v, element);
    params.vector_out = in_pairs(params.out, problem.head_dim_v, element);
    pace_rounds(params, config, problem, unsplit_blocks(config, problem) * cut.splits / cut.heads);
    params.overlap = device_facts(problem.device.id).arch >= 90;
    params.fetch_early = params.overlap;
    return params;
}

}  // namespace

DecodeCut decode_cut(const Row& row, const DecodeProblem& problem) {
    if (problem.batch == 0 || problem.heads_q == 0 || problem.seqlen_q == 0) return {1, 1};
    const Request& request = problem.request;
    if (request.split_size == 0 && request.num_splits == 0) return choose_cut(row.config, problem);
    const int64_t ranges = request.split_size > 0 ? ceil_div(problem.cache.capacity, request.split_size) : request.num_splits;
    if (ranges > kMostBlocks / unsplit_blocks(row.config, problem)) {
        refuse(FLASH_STATUS_UNSUPPORTED, request.split_size > 0 ? "split_size" : "num_splits",
               "must leave fewer than 2^31 thread blocks on CUDA",
               text_of(ranges, " ranges of keys for each of ", unsplit_blocks(row.config, problem)));
    }
    return {std::max<int64_t>(1, ranges), 1};
}

size_t decode_workspace_bytes(const Row& row, const DecodeProblem& problem, DecodeCut cut) {
    return workspace_of(row, problem, cut.splits).bytes();
}

void decode(const Row& row, const DecodeProblem& problem, DecodeCut cut, void* workspace, void* stream) {
    if (problem.batch == 0 || problem.heads_k == 0) return;
    const Workspace regions = workspace_of(row, problem, cut.splits);
    const DecodeParams params = make_params(row.config, problem, regions, cut, static_cast<char*>(workspace));
    const DeviceGuard guard(problem.device.id);
    check(row.decode(params, stream), row.config.name);
}

}  // namespace libflash::cuda
