#include "problem/cache.h"

#include <algorithm>

#include "problem/cache_append.h"
#include "problem/check.h"
#include "problem/sequence_keys.h"

namespace libflash {

namespace {

void check_cache_seqlens(const DecodeProblem& p) {
    for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t rows = p.shard.row_of(p.cached(b));
        if (p.cached(b) < 0 || rows > p.cache.capacity) {
            invalid("cache_seqlens", "must be at least 0 and at most the capacity", "entry ", b, " is ", p.cached(b),
                    p.shard.whole() ? "" : text_of(", on this shard ", rows), ", capacity ", p.cache.capacity);
        }
        if (p.rows_k(b) > p.cache.capacity) {
            invalid("k_new", "its rows must fit into the cache after cache_seqlens", "sequence ", b, ": ", rows, " + ",
                    p.rows_k(b) - rows, ", capacity ", p.cache.capacity);
        }
        if (p.leftpad && (p.leftpad[b] < 0 || p.leftpad[b] > p.cached(b))) {
            invalid("cache_leftpad", "must be at least 0 and at most cache_seqlens", "entry ", b, " is ", p.leftpad[b], " of ",
                    p.cached(b));
        }
        if (!p.shard.whole() && p.packed() && p.k_new.present && p.new_rows.length(b) < p.q_rows.length(b)) {
            invalid("k_new", "must have at least as many rows of a sequence as q with shard_count: those of all shards",
                    "sequence ", b, ": ", p.new_rows.length(b), " of ", p.q_rows.length(b));
        }
    }
}

using KeyRange = SequenceKeys::Range;

// All keys that rows of the sequence see.
KeyRange seen_keys(const DecodeProblem& p, int64_t b) {
    const SequenceKeys keys(p, b);
    const int64_t last = p.q_rows.length(b) - 1;
    KeyRange seen{keys.range(0).first, keys.range(last).last};
    for (int64_t row = 0; keys.has_gaps() && row <= last; ++row) {
        const KeyRange own = keys.range(row);
        seen = {std::min(seen.first, own.first), std::max(seen.last, own.last)};
    }
    return seen;
}

}  // namespace

KeyRange touched_keys(const DecodeProblem& p, int64_t b) {
    const int64_t length = p.rows_k(b);
    const KeyRange appended{p.shard.row_of(p.cached(b)), length};
    if (p.q_rows.length(b) == 0 || p.heads_q == 0) return appended;
    const KeyRange seen = seen_keys(p, b);
    if (appended.empty()) return seen;
    return seen.empty() ? appended : KeyRange{std::min(seen.first, appended.first), length};
}

int64_t page_of(const DecodeProblem& p, int64_t b, int64_t column) {
    return p.cache.block_table[b * p.cache.block_table_stride[0] + column * p.cache.block_table_stride[1]];
}

namespace {

void check_entries(const DecodeProblem& p) {
    const int64_t entries = p.cache.k.shape[0];
    for (int64_t b = 0; b < p.batch; ++b) {
        if (touched_keys(p, b).empty()) continue;
        if (p.cache.batch_idx[b] < 0 || p.cache.batch_idx[b] >= entries) {
            invalid("cache_batch_idx", "must be at least 0 and below the entries of the cache", "entry ", b, " is ",
                    p.cache.batch_idx[b], " of ", entries);
        }
    }
}

// Checks only the pages of keys that the call reads or writes; other entries of the table are not used.
void check_pages(const DecodeProblem& p) {
    for (int64_t b = 0; b < p.batch; ++b) {
        const KeyRange keys = touched_keys(p, b);
        for (int64_t column = keys.first / p.cache.page_size; !keys.empty() && column * p.cache.page_size < keys.last; ++column) {
            const int64_t page = page_of(p, b, column);
            if (page < 0 || page >= p.cache.pages) {
                invalid("block_table", "a page must be at least 0 and below the number of pages", "entry (", b, ", ", column,
                        ") is ", page, " of ", p.cache.pages);
            }
        }
    }
}

void check_positions(const DecodeProblem& p) {
    const int64_t positions = p.rotary_cos.shape[0];
    for (int64_t b = 0; b < p.batch; ++b) {
        int64_t needed = 0;
        for (int64_t row = 0; row < p.q_rows.length(b); ++row) needed = std::max(needed, p.rotary_position(b, row) + 1);
        for (int64_t n = 0; n < p.new_rows.length(b); ++n) needed = std::max(needed, p.new_key_position(b, n) + 1);
        if (needed > positions) {
            invalid("rotary_cos", "must have a row for every position", "sequence ", b, " needs ", needed, ", there are ",
                    positions);
        }
    }
}

}  // namespace

void check_cache_contents(const DecodeProblem& p) {
    check_cache_seqlens(p);
    if (p.cache.batch_idx) check_entries(p);
    if (p.cache.paged()) check_pages(p);
    if (p.seqlen_new > 0 && (p.cache.batch_idx || p.cache.paged())) check_appended_rows(p);
    if (p.rotary_cos.present) check_positions(p);
}

}  // namespace libflash
