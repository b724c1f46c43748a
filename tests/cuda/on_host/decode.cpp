// Runs the decode kernels of one instance on the host and compares them with double precision. Arguments:
// 1 the number of query rows; 2 the number of splits (negative: the split size); 3 whether the cache is paged; 4 what is
// appended, with rotary embedding (1: two rows by the append kernel, 2: one row by the attention kernel, if it can); 5 by how
// many the stages in use are fewer than the kernel's; 6 the key heads of a thread block; 7 whether copies complete late.
// Prints the errors; exit code 0 means none is too large.
#include "decode_kernel.h"

#include <cstdio>
#include <cstdlib>

constexpr int kBatch = 5, kPages = kBatch * kColumns + 2;
// The new keys of the first sequence are in two tiles, two pages and two splits of 128; one new key of the fourth sequence
// fits, none of the fifth.
constexpr int kLengths[kBatch] = {127, 0, 77, kCapacity - 1, kCapacity};
constexpr int kPositions = kCapacity + 40;

struct Problem {
    const int rows, splits;
    const bool paged, append, within;
    const int news;  // appended rows per sequence
    std::vector<T> q, new_k, new_v, k, v, out, turned;
    const Rotary rotary{kPositions};
    std::vector<float> lse, partial_out, partial_lse;
    std::vector<int32_t> table;
    std::vector<T> dense_k, dense_v;  // of each sequence, the expected contents after the append

    Problem(int query_rows, int ranges, bool pages, int appended)
        : rows(query_rows), splits(ranges), paged(pages), append(appended != 0), within(appended == 2), news(within ? 1 : 2),
          q(random(size_t(kBatch) * rows * kHeads * kDim)), new_k(random(size_t(kBatch) * news * kHeadsK * kDim)),
          new_v(random(new_k.size())), k(size_t(kPages) * kPage * kHeadsK * kDim, from_float(NAN, T())), v(k),
          out(q.size(), from_float(NAN, T())), turned(q.size()), lse(size_t(kBatch) * kHeads * rows, NAN),
          dense_k(random(size_t(kBatch) * kCapacity * kHeadsK * kDim)), dense_v(random(dense_k.size())) {
        for (int c = 0; c < kBatch * kColumns; ++c) table.push_back((c * 7 + 3) % (kBatch * kColumns));
        for (int b = 0; b < kBatch; ++b)
            for (int j = 0; j < kLengths[b]; ++j)
                for (int e = 0; e < kHeadsK * kDim; ++e) {
                    k[cache_row(b, j) + e] = dense_k[at(b, j) + e];
                    v[cache_row(b, j) + e] = dense_v[at(b, j) + e];
                }
        if (append) append_exactly();
    }

    size_t at(int b, int j) const { return (size_t(b) * kCapacity + j) * kHeadsK * kDim; }
    size_t cache_row(int b, int j) const {
        const size_t row = paged ? size_t(table[b * kColumns + j / kPage]) * kPage + j % kPage : size_t(b) * kCapacity + j;
        return row * kHeadsK * kDim;
    }
    // Whether the attention kernel appends.
    bool appends_inside() const { return within && decode_can_append(kDim, DecodeKernel::config.tile_k); }
    int length(int b) const { return kLengths[b] + (append ? news : 0); }
    int existing(int b) const { return std::min(length(b), kCapacity); }

    void append_exactly() {
        for (int b = 0; b < kBatch; ++b)
            for (int i = 0; i < news && kLengths[b] + i < kCapacity; ++i)
                for (int h = 0; h < kHeadsK; ++h) {
                    const size_t from = ((size_t(b) * news + i) * kHeadsK + h) * kDim, to = at(b, kLengths[b] + i) + h * kDim;
                    rotary.rotate(&new_k[from], &dense_k[to], kLengths[b] + i);
                    for (int c = 0; c < kDim; ++c) dense_v[to + c] = new_v[from + c];
                }
    }

    DecodeParams params() {
        DecodeParams p{};
        p.q = p.out = {q.data(), int64_t{rows} * kHeads * kDim, int64_t{kHeads} * kDim, kDim};
        p.out.data = out.data();
        p.lse = {lse.data(), int64_t{kHeads} * rows, 1, rows};
        const int64_t entry = int64_t{paged ? kPage : kCapacity} * kHeadsK * kDim;
        p.cache.k = p.cache.v = {k.data(), entry, int64_t{kHeadsK} * kDim, kDim};
        p.cache.v.data = v.data();
        p.cache.seqlens = kLengths;
        if (paged) p.cache.table = table.data(), p.cache.table_batch = kColumns, p.cache.table_column = 1;
        p.cache.page_size = divisor_params(kPage);
        p.shard.most_keys = kCapacity, p.k_channels = kDim;
        p.cache.capacity = kCapacity, p.cache.pages = paged ? kPages : kBatch;
        p.batch = kBatch, p.seqlen_q = rows, p.heads_q = kHeads, p.heads_k = kHeadsK, p.group_size = kGroup;
        p.head_dim = p.head_dim_v = kDim;
        p.softmax_scale = 0.2f, p.scale_log2 = 0.2f * 1.4426950408889634f;
        p.left = kUnboundedWindow;
        p.splits = splits > 0 ? splits : (kCapacity - splits - 1) / -splits;
        p.split_size = splits > 0 ? 0 : -splits;
        const int tile = decode_shares_keys(rows * kGroup) ? DecodeKernel::config.tile_k : kDecodeSlab;
        p.by_tiles = divisor_params((rows * kGroup + tile - 1) / tile), p.by_splits = divisor_params(p.splits);
        p.by_heads = divisor_params(kHeadsK), p.by_group = divisor_params(kGroup);
        partial_out.assign(size_t(kBatch) * kHeads * rows * p.splits * kDim, NAN);
        partial_lse.assign(size_t(kBatch) * kHeads * rows * p.splits, NAN);
        p.partial_out = partial_out.data(), p.partial_lse = partial_lse.data();
        p.vector_q = p.vector_kv = p.vector_out = true;
        if (append) append_params(p);
        return p;
    }
    DecodePlan plan(const DecodeParams& p, int key_heads) const {
        DecodePlan plan;
        plan.splits = p.splits;
        plan.instance.number = int(decode_kind(decode_shares_keys(rows * kGroup), key_heads, appends_inside()));
        const auto launch = [&](DecodeStep step, int64_t blocks) { return decode_shape(step, plan, blocks); };
        plan.attention =
            launch(DecodeStep::attention, int64_t{p.by_tiles.divisor} * p.by_head_groups.divisor * p.splits * kBatch);
        if (p.splits > 1) plan.combine = launch(DecodeStep::combine, int64_t{kBatch} * kHeads * rows);
        if (!append || appends_inside()) return plan;
        plan.append_rows = kBatch * news * kHeadsK;
        plan.append_threads_per_row = kDim / 2;
        plan.append =
            launch(DecodeStep::append, ceil_div(plan.append_rows + int64_t{kBatch} * rows * kHeads, kAppendThreads * 2 / kDim));
        return plan;
    }
    void append_params(DecodeParams& p) {
        const RowsParams given{new_k.data(), int64_t{news} * kHeadsK * kDim, int64_t{kHeadsK} * kDim, kDim};
        p.append.k_new = p.append.v_new = given;
        p.append.v_new.data = new_v.data();
        p.append.q = p.q;
        if (!appends_inside()) {
            p.append.rotated_q = p.q;
            p.q.data = p.append.rotated_q.data = turned.data();
        }
        p.append.cos = rotary.cos.data(), p.append.sin = rotary.sin.data();
        p.append.cos_row = p.append.sin_row = kDim / 2;
        p.append.positions = kPositions, p.append.pairs = kDim / 2;
        p.append.is_float = p.append.query_rows_advance = true;
        p.cache.seqlen_new = news;
    }

    // The largest error of a row, in units of its error bound.
    double worst(int b, int i, int h) const {
        std::vector<T> query(kDim);
        const size_t row = ((size_t(b) * rows + i) * kHeads + h) * kDim;
        if (append) {
            rotary.rotate(&q[row], query.data(), kLengths[b] + i);
        } else {
            std::copy_n(&q[row], kDim, query.begin());
        }
        double sum = 0, o[kDim] = {}, size[kDim] = {};
        for (int j = 0; j <= length(b) - rows + i && j < existing(b); ++j) {
            double score = 0;
            for (int c = 0; c < kDim; ++c) score += wide(query[c]) * wide(dense_k[at(b, j) + h / kGroup * kDim + c]);
            const double p = std::exp(0.2 * score);
            sum += p;
            for (int c = 0; c < kDim; ++c) {
                o[c] += p * wide(dense_v[at(b, j) + h / kGroup * kDim + c]);
                size[c] += p * std::fabs(wide(dense_v[at(b, j) + h / kGroup * kDim + c]));
            }
        }
        const double got_lse = lse[(size_t(b) * kHeads + h) * rows + i];
        double worst = sum == 0 ? (got_lse == -INFINITY ? 0 : INFINITY) : std::fabs(got_lse - std::log(sum)) / 1e-5;
        for (int c = 0; c < kDim; ++c) {
            const double exact = sum == 0 ? 0 : o[c] / sum, limit = sum == 0 ? 1e-30 : 8 * kRounding * size[c] / sum;
            const double error = std::fabs(wide(out[row + c]) - exact) / limit;
            worst = larger_error(worst, error);
        }
        return worst;
    }

    // The number of wrong elements in the cache: appended rows that differ, or other elements that changed.
    int wrong_bits() const {
        std::vector<T> wanted_k(k.size(), from_float(NAN, T())), wanted_v(wanted_k);
        for (int b = 0; b < kBatch; ++b)
            for (int j = 0; j < existing(b); ++j)
                for (int e = 0; e < kHeadsK * kDim; ++e) {
                    wanted_k[cache_row(b, j) + e] = dense_k[at(b, j) + e];
                    wanted_v[cache_row(b, j) + e] = dense_v[at(b, j) + e];
                }
        return count_differences(k, wanted_k) + count_differences(v, wanted_v);
    }
};

int main(int, char** argv) {
    Problem p(std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3]) != 0, std::atoi(argv[4]));
    DecodeParams params = p.params();
    params.stages = DecodeKernel::config.stages - std::atoi(argv[5]);
    const int key_heads = std::atoi(argv[6]);
    params.by_head_groups = divisor_params(kHeadsK / key_heads);
    params.fetch_early = true;
    const DecodePlan plan = p.plan(params, key_heads);
    late_copies = std::atoi(argv[7]) != 0;
    launch_decode<DecodeKernel>(plan, params, nullptr);
    bool good = p.wrong_bits() == 0;
    std::printf("%s cache: %d wrong\n", good ? "ok" : "WRONG", p.wrong_bits());
    for (int b = 0; b < kBatch; ++b)
        for (int i = 0; i < p.rows; ++i)
            for (int h = 0; h < kHeads; ++h) good &= is_within(p.worst(b, i, h), b, i, h);
    return good ? 0 : 1;
}
