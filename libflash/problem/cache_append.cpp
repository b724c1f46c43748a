#include "problem/cache_append.h"

#include <algorithm>
#include <vector>

#include "problem/cache.h"
#include "problem/check.h"

namespace libflash {

namespace {

// Rows [first, last) of a cache entry or page, which a sequence writes or reads.
struct RowRange {
    int64_t page, first, last, sequence;  // page: the page or the entry
    bool operator<(const RowRange& other) const { return page != other.page ? page < other.page : first < other.first; }
};

std::vector<RowRange> appended_rows(const DecodeProblem& p) {
    std::vector<RowRange> ranges;
    ranges.reserve(static_cast<size_t>(p.batch));
    for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t first = p.shard.row_of(p.cached(b)), last = p.rows_k(b);
        if (!p.cache.paged()) {
            if (first == last) continue;
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

const char* table_of(const DecodeProblem& p) { return p.cache.paged() ? "block_table" : "cache_batch_idx"; }
const char* block_name(const DecodeProblem& p) { return p.cache.paged() ? "page " : "entry "; }

// `appended`: in ascending order.
void check_appended_once(const DecodeProblem& p, const std::vector<RowRange>& appended) {
    for (size_t i = 1; i < appended.size(); ++i) {
        const RowRange &one = appended[i - 1], &two = appended[i];
        if (one.page == two.page && two.first < one.last) {
            invalid(table_of(p), "two sequences must not append to the same row", "sequences ",
                    std::min(one.sequence, two.sequence), " and ", std::max(one.sequence, two.sequence), ", ", block_name(p),
                    one.page, ", row ", two.first);
        }
    }
}

// Checks that none of the rows `read`, which are in one page, is among the rows `appended`, of which no row occurs twice. A
// sequence can overwrite a key that it reads itself, if its block table has a page twice.
void check_not_appended(const DecodeProblem& p, const std::vector<RowRange>& appended, const RowRange& read) {
    const auto comes_before = [](const RowRange& range, const RowRange& rows) {
        return range.page != rows.page ? range.page < rows.page : range.last <= rows.first;
    };
    const auto range = std::lower_bound(appended.begin(), appended.end(), read, comes_before);
    if (range != appended.end() && range->page == read.page && range->first < read.last) {
        invalid(table_of(p), "an append must not overwrite a key that a sequence reads", "sequence ", range->sequence,
                " appends to ", block_name(p), read.page, ", row ", std::max(range->first, read.first), ", which sequence ",
                read.sequence, " reads");
    }
}

// An append would overwrite a key of another sequence, for example, where both share a page that is not full.
void check_no_key_is_overwritten(const DecodeProblem& p, const std::vector<RowRange>& appended) {
    std::vector<bool> grows(static_cast<size_t>(p.cache.k.shape[0]));
    for (const RowRange& range : appended) grows[static_cast<size_t>(range.page)] = true;
    const int64_t rows_of_block = p.cache.k.shape[1];
    for (int64_t b = 0; b < p.batch; ++b) {
        const SequenceKeys::Range touched = touched_keys(p, b);
        const int64_t end = std::min(touched.last, p.shard.row_of(p.cached(b)));
        for (int64_t row = touched.first, next = 0; row < end; row = next) {
            const int64_t column = row / rows_of_block, start = column * rows_of_block;
            next = std::min(end, start + rows_of_block);
            const int64_t page = p.cache.paged() ? page_of(p, b, column) : p.cache.batch_idx[b];
            if (grows[static_cast<size_t>(page)]) check_not_appended(p, appended, {page, row - start, next - start, b});
        }
    }
}

}  // namespace

void check_appended_rows(const DecodeProblem& p) {
    std::vector<RowRange> appended = appended_rows(p);
    std::sort(appended.begin(), appended.end());
    check_appended_once(p, appended);
    if (!appended.empty()) check_no_key_is_overwritten(p, appended);
}

}  // namespace libflash
