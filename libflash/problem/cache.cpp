#include "problem/cache.h"

#include <algorithm>
#include <vector>

#include "problem/check.h"

namespace libflash {

namespace {

void check_cache_seqlens(const DecodeProblem& p) {
    for (int64_t b = 0; b < p.batch; ++b) {
        if (p.cached(b) < 0 || p.cached(b) > p.cache.capacity) {
            invalid("cache_seqlens", "must be at least 0 and at most the capacity", "entry ", b, " is ", p.cached(b),
                    ", capacity ", p.cache.capacity);
        }
        if (p.cached(b) + p.seqlen_new > p.cache.capacity) {
            invalid("k_new", "its rows must fit into the cache after cache_seqlens", "sequence ", b, ": ", p.cached(b), " + ",
                    p.seqlen_new, ", capacity ", p.cache.capacity);
        }
        if (p.leftpad && (p.leftpad[b] < 0 || p.leftpad[b] > p.cached(b))) {
            invalid("cache_leftpad", "must be at least 0 and at most cache_seqlens", "entry ", b, " is ", p.leftpad[b], " of ",
                    p.cached(b));
        }
    }
}

int64_t page_of(const DecodeProblem& p, int64_t b, int64_t column) {
    return p.cache.block_table[b * p.cache.block_table_stride[0] + column * p.cache.block_table_stride[1]];
}

void check_entries(const DecodeProblem& p) {
    const int64_t entries = p.cache.k.shape[0];
    for (int64_t b = 0; b < p.batch; ++b) {
        if (p.cache.batch_idx[b] < 0 || p.cache.batch_idx[b] >= entries) {
            invalid("cache_batch_idx", "must be at least 0 and below the entries of the cache", "entry ", b, " is ",
                    p.cache.batch_idx[b], " of ", entries);
        }
    }
}

// Checks only the pages that hold keys; other entries of the table, before cache_leftpad or after the last key, are not used.
void check_pages(const DecodeProblem& p) {
    for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t length = p.cached(b) + p.seqlen_new, pad = p.leftpad ? p.leftpad[b] : 0;
        for (int64_t column = pad / p.cache.page_size; pad < length && column * p.cache.page_size < length; ++column) {
            const int64_t page = page_of(p, b, column);
            if (page < 0 || page >= p.cache.pages) {
                invalid("block_table", "a page must be at least 0 and below the number of pages", "entry (", b, ", ", column,
                        ") is ", page, " of ", p.cache.pages);
            }
        }
    }
}

// Rows [first, last) of a cache entry or page, to which a sequence appends.
struct RowRange {
    int64_t page, first, last, sequence;  // page: or entry
    bool operator<(const RowRange& other) const { return page != other.page ? page < other.page : first < other.first; }
};

std::vector<RowRange> appended_rows(const DecodeProblem& p) {
    std::vector<RowRange> ranges;
    ranges.reserve(static_cast<size_t>(p.batch));
    for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t first = p.cached(b), last = first + p.seqlen_new;
        if (!p.cache.paged()) {
            ranges.push_back({p.cache.batch_idx[b], first, last, b});
            continue;
        }
        for (int64_t row = first; row < last;) {
            const int64_t column = row / p.cache.page_size, start = column * p.cache.page_size;
            const int64_t end = std::min(last, start + p.cache.page_size);
            ranges.push_back({page_of(p, b, column), row - start, end - start, b});
            row = end;
        }
    }
    return ranges;
}

void check_appended_once(const DecodeProblem& p) {
    std::vector<RowRange> ranges = appended_rows(p);
    std::sort(ranges.begin(), ranges.end());
    for (size_t i = 1; i < ranges.size(); ++i) {
        const RowRange &one = ranges[i - 1], &two = ranges[i];
        if (one.page == two.page && two.first < one.last) {
            invalid(p.cache.paged() ? "block_table" : "cache_batch_idx", "two sequences must not append to the same row",
                    "sequences ", std::min(one.sequence, two.sequence), " and ", std::max(one.sequence, two.sequence), ", ",
                    p.cache.paged() ? "page " : "entry ", one.page, ", row ", two.first);
        }
    }
}

void check_positions(const DecodeProblem& p) {
    const int64_t positions = p.rotary_cos.shape[0];
    const int64_t query_rows = p.mask_rule.bounded() ? p.seqlen_q : std::min<int64_t>(p.seqlen_q, 1);
    for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t needed = p.cached(b) + std::max(query_rows, p.seqlen_new);
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
    if (p.seqlen_new > 0 && (p.cache.batch_idx || p.cache.paged())) check_appended_once(p);
    if (p.rotary_cos.present) check_positions(p);
}

}  // namespace libflash
