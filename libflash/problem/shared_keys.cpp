#include "problem/shared_keys.h"

#include <algorithm>

#include "problem/cache.h"
#include "problem/lengths.h"

namespace libflash {

void build_shared_keys(DecodeProblem& p, const TensorView& groups, const TensorView& lens) {
    if (!groups.present && !lens.present) return;
    if (!lens.present) invalid("shared_lens", "must be given together with shared_groups", "it is missing");
    if (!groups.present) invalid("shared_groups", "must be given together with shared_lens", "it is missing");
    check_ndim(groups, "shared_groups", 1, "(groups + 1,)");
    if (groups.shape[0] < 1) invalid("shared_groups", "must have groups + 1 entries, so at least one", "it has none");
    p.shared.count = groups.shape[0] - 1;
    p.shared.groups = read_int32_vector(groups, "shared_groups", groups.shape[0], p.device, "(groups + 1,)");
    p.shared.lens = read_int32_vector(lens, "shared_lens", p.shared.count, p.device, "(groups,)");
}

namespace {

void check_groups(const DecodeProblem& p) {
    const int32_t* groups = p.shared.groups;
    if (groups[0] < 0) invalid("shared_groups", "must not have negative numbers", "entry 0 is ", groups[0]);
    for (int64_t i = 0; i < p.shared.count; ++i)
        if (groups[i + 1] < groups[i])
            invalid("shared_groups", "must not descend", "entries ", i, " and ", i + 1, " are ", groups[i], " and ",
                    groups[i + 1]);
    if (groups[p.shared.count] > p.batch)
        invalid("shared_groups", "must not end past the sequences", "the last entry is ", groups[p.shared.count], ", batch ",
                p.batch);
}

int64_t entry_of(const DecodeProblem& p, int64_t b) { return p.cache.batch_idx ? p.cache.batch_idx[b] : b; }

// Checks that the shared keys that sequence b reads are in the same rows of the cache as those of sequence `first`.
void check_same_places(const DecodeProblem& p, int64_t first, int64_t b, int64_t length) {
    SequenceKeys::Range keys = touched_keys(p, b);
    keys.last = std::min(keys.last, p.shard.row_of(length));
    if (keys.empty()) return;
    if (!p.cache.paged()) {
        if (entry_of(p, b) == entry_of(p, first)) return;
        invalid("shared_groups", "sequences of a group must have the same cache entry", "sequences ", first, " and ", b, " have ",
                entry_of(p, first), " and ", entry_of(p, b));
    }
    for (int64_t column = keys.first / p.cache.page_size; column * p.cache.page_size < keys.last; ++column) {
        const int64_t page = page_of(p, b, column), of_first = page_of(p, first, column);
        if (page == of_first) continue;
        invalid("shared_groups", "sequences of a group must have the same pages for their shared keys", "sequences ", first,
                " and ", b, " have ", of_first, " and ", page, " in column ", column);
    }
}

}  // namespace

void check_shared_keys(const DecodeProblem& p) {
    if (!p.shared.groups) return;
    check_groups(p);
    for (int64_t i = 0; i < p.shared.count; ++i) {
        const int64_t first = p.shared.groups[i], last = p.shared.groups[i + 1], length = p.shared.lens[i];
        if (length < 0) invalid("shared_lens", "must not have negative numbers", "entry ", i, " is ", length);
        for (int64_t b = first; b < last; ++b) {
            if (length > p.cached(b))
                invalid("shared_lens", "must be at most cache_seqlens of each sequence of the group", "entry ", i, " is ", length,
                        ", sequence ", b, " has ", p.cached(b));
            check_same_places(p, first, b, length);
        }
    }
}

}  // namespace libflash
