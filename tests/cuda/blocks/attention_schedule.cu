// Tests attention/schedule.cuh with the schedule of the host code: every tile of every sequence and head is the work tile of
// exactly one thread block, the longest first if `reversed`. Also the lengths of sequences and their workspace units.
#include <algorithm>
#include <map>
#include <tuple>

#include "check.cuh"
#include "cuda/attention/query_tiles.cuh"
#include "cuda/attention/query_units.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/host/tile_schedule.h"

using namespace libflash::cuda;

namespace {

constexpr int kWarps = 2;

struct Problem {
    int batch, heads;
    int capacity;             // of each batch entry, or of the packed tensor
    std::vector<int32_t> cu;  // empty: dense
    double head_bytes;        // determines the heads per group
    bool reversed;
};

template <int kTileRows>
__global__ void all_tiles(ScheduleParams schedule, LengthsParams lengths, int batch, TileCoordinates* out) {
    const TileCoordinates work = tile_coordinates<kTileRows>(schedule, lengths, batch);
    if (threadIdx.x % 32 == blockIdx.x % 32) out[blockIdx.x * kWarps + threadIdx.x / 32] = work;
}

std::string name_of(const char* what, const Problem& p, int tile_rows, int group) {
    char name[200];
    std::snprintf(name, sizeof name, "%s%s, %d %s of %d rows, %d heads in groups of %d, tiles of %d", what,
                  p.reversed ? ", reversed" : "", p.batch, p.cu.empty() ? "entries" : "packed sequences", p.capacity, p.heads,
                  group, tile_rows);
    return name;
}

// Rows of a sequence that are inside the tensor.
int owned_by(const Problem& p, int b) {
    if (p.cu.empty()) return p.capacity;
    const int first = std::min(std::max(p.cu[b], 0), p.capacity), last = std::min(p.cu[b + 1], p.capacity);
    return std::max(0, last - first);
}

template <int kTileRows>
void check_schedule(const Problem& p) {
    libflash::Sequences rows;
    rows.batch = p.batch;
    rows.capacity = rows.max_length = p.capacity;
    const blocks::Device<int32_t> cu(p.cu);
    if (!p.cu.empty()) {
        rows.cu = cu.get();
        rows.max_length = 0;
        for (int b = 0; b < p.batch; ++b) rows.max_length = std::max<int64_t>(rows.max_length, owned_by(p, b));
    }
    const ScheduleParams schedule = schedule_params(rows, p.batch, p.heads, kTileRows, p.head_bytes, p.reversed);
    const int count = schedule.tiles * schedule.heads, group = schedule.heads_per_group;
    const blocks::Device<TileCoordinates> there(static_cast<size_t>(count) * kWarps, TileCoordinates{-9, -9, -9});
    if (count > 0) all_tiles<kTileRows><<<count, kWarps * 32>>>(schedule, {rows.cu, nullptr, p.capacity}, p.batch, there.get());
    blocks::finish("tile_coordinates");
    const std::vector<TileCoordinates> got = there.read();

    blocks::Check check(name_of("tile_coordinates", p, kTileRows, group));
    std::map<std::tuple<int, int, int>, int> times;
    for (int i = 0; i < count; ++i) {
        const TileCoordinates& work = got[i * kWarps];
        const TileCoordinates& other = got[i * kWarps + 1];
        check.equal(other.batch, work.batch, "block %d, batch in the second warp", i);
        if (work.batch >= 0) {
            check.equal(other.head, work.head, "block %d, head in the second warp", i);
            check.equal(other.tile, work.tile, "block %d, tile in the second warp", i);
            ++times[{work.batch, work.head, work.tile}];
        }
    }
    const size_t distinct = times.size();
    size_t wanted = 0;
    for (int b = 0; b < p.batch; ++b)
        for (int h = 0; h < p.heads; ++h)
            for (int t = 0; t < (owned_by(p, b) + kTileRows - 1) / kTileRows; ++t) {
                check.equal(times[{b, h, t}], 1, "times of batch %d head %d tile %d", b, h, t);
                times.erase({b, h, t});
                ++wanted;
            }
    check.equal(static_cast<double>(distinct), static_cast<double>(wanted), "the number of tiles");
    for (const auto& entry : times)
        check.equal(entry.second, 0, "times of no tile: batch %d head %d tile %d", std::get<0>(entry.first),
                    std::get<1>(entry.first), std::get<2>(entry.first));

    // A group's heads do one tile all together, then the next tile; no head of another group comes between.
    std::tuple<int, int, int> last{-1, 0, 0};
    for (int i = 0; i < count; ++i) {
        const TileCoordinates& work = got[i * kWarps];
        if (work.batch < 0) continue;
        const int head = p.cu.empty() ? work.batch * p.heads + work.head : work.head;
        int tile = work.tile;
        if (!p.cu.empty())
            for (int b = 0; b < work.batch; ++b) tile += (owned_by(p, b) + kTileRows - 1) / kTileRows;
        const std::tuple<int, int, int> now{head / group, p.reversed ? -tile : tile, head};
        check.at_most(std::get<0>(last) < 0 || last < now ? 0 : 1, 0, "block %d: head %d tile %d is too late", i, head, tile);
        last = now;
    }
}

void check_dense() {
    for (const bool reversed : {false, true}) {
        check_schedule<64>({2, 3, 200, {}, 1e3, reversed});      // one group
        check_schedule<128>({1, 31, 300, {}, 4.5e6, reversed});  // groups of 5, and a last one of 1
        check_schedule<32>({7, 1, 95, {}, 7.9e6, reversed});     // groups of 3, and a last one of 1
        check_schedule<128>({3, 5, 1, {}, 1e9, reversed});       // one head per group
        check_schedule<64>({5, 6, 640, {}, 4.9e6, reversed});    // groups of heads across batch entries
        check_schedule<128>({2, 2, 0, {}, 1e3, reversed});       // no rows
    }
}

std::vector<int32_t> sums_of(const std::vector<int>& lengths) {
    std::vector<int32_t> cu{0};
    for (const int length : lengths) cu.push_back(cu.back() + length);
    return cu;
}

std::vector<Problem> packed_problems(bool reversed) {
    blocks::Random random(11);
    std::vector<int> many(100), late(33, 0), long_ones(64);
    for (int& length : many) length = random.between(0, 2) ? random.between(1, 300) : 0;
    late[32] = 130;
    for (int& length : long_ones) length = 128 * random.between(0, 3);
    const std::vector<int> some = {5, 0, 0, 129, 128, 1, 0}, none(40, 0);
    std::vector<Problem> problems;
    const auto add = [&](const std::vector<int>& lengths, int heads, int spare, double head_bytes) {
        const std::vector<int32_t> cu = sums_of(lengths);
        problems.push_back({static_cast<int>(lengths.size()), heads, cu.back() + spare, cu, head_bytes, reversed});
    };
    add(some, 3, 0, 1e3);
    add(some, 7, 50, 7.9e6);  // groups of 3 and a last one of 1; rows of no sequence
    add(many, 2, 0, 1e9);
    add(late, 1, 0, 1e3);
    add(long_ones, 4, 0, 1e3);
    add(none, 2, 300, 1e3);
    return problems;
}

void check_packed() {
    for (const bool reversed : {false, true})
        for (const Problem& problem : packed_problems(reversed)) {
            check_schedule<64>(problem);
            check_schedule<128>(problem);
        }
}

__global__ void rows_of(LengthsParams lengths, int batch, SequenceRows* out) {
    for (int b = threadIdx.x; b < batch; b += blockDim.x) out[b] = SequenceRows::of(lengths, b);
}

// Also invalid lengths: no row may be outside the tensor.
void check_rows() {
    blocks::Check check("SequenceRows");
    const int capacity = 100;
    const std::vector<int32_t> cu = {0, 10, 10, 60, 40, 130, -5, 90, 2000000000, -2000000000};
    const std::vector<int32_t> used = {10, 0, 20, 7, -3, 4, 1000, 5, 1};
    const int batch = static_cast<int>(used.size());
    const blocks::Device<int32_t> there_cu(cu), there_used(used);
    for (const bool packed : {false, true})
        for (const bool partly : {false, true}) {
            const blocks::Device<SequenceRows> out(batch, SequenceRows{});
            rows_of<<<1, 32>>>({packed ? there_cu.get() : nullptr, partly ? there_used.get() : nullptr, capacity}, batch,
                               out.get());
            blocks::finish("SequenceRows");
            const std::vector<SequenceRows> got = out.read();
            for (int b = 0; b < batch; ++b) {
                const int first = packed ? std::min(std::max(cu[b], 0), capacity) : 0;
                const int last = packed ? std::max(first, std::min(cu[b + 1], capacity)) : capacity;
                const int length = partly ? std::min(std::max(used[b], 0), last - first) : last - first;
                check.equal(got[b].start, first, "start, packed %d, used %d, sequence %d", packed, partly, b);
                check.equal(got[b].owned, last - first, "owned, packed %d, used %d, sequence %d", packed, partly, b);
                check.equal(got[b].length, length, "length, packed %d, used %d, sequence %d", packed, partly, b);
            }
        }
}

struct UnitOfTile {
    TileCoordinates work;
    int64_t unit;
};

__global__ void units_of_tiles(BackwardParams params, UnitOfTile* out) {
    const TileCoordinates work = tile_coordinates<kUnitRows>(params.query_schedule, params.q_lengths, params.batch);
    const int64_t unit = work.batch < 0 ? -1 : QueryUnits::in_first_kernel(params, params.query_schedule, blockIdx.x, work);
    if (threadIdx.x == 0) out[blockIdx.x] = {work, unit};
}
__global__ void first_units(BackwardParams params, int64_t* out) {
    for (int i = threadIdx.x; i < params.batch * params.heads_q; i += blockDim.x) {
        const int batch = i / params.heads_q;
        out[i] = QueryUnits::first(params, batch, i % params.heads_q, SequenceRows::of(params.q_lengths, batch));
    }
}

// No two sequences or heads share a unit, all units are within the workspace, and all kernels find the units of the first one.
void check_units() {
    blocks::Check check("QueryUnits");
    std::vector<Problem> problems = packed_problems(false);
    problems.push_back({3, 4, 300, {}, 0, false});
    for (const Problem& p : problems) {
        const bool packed = !p.cu.empty();
        libflash::Sequences rows;
        rows.batch = p.batch;
        rows.capacity = rows.max_length = p.capacity;
        const blocks::Device<int32_t> cu(p.cu), first_of_sequences(p.batch, -1);
        if (packed) rows.cu = cu.get();
        BackwardParams params{};
        params.q_lengths = {packed ? cu.get() : nullptr, nullptr, p.capacity};
        params.batch = p.batch;
        params.heads_q = p.heads;
        params.query_schedule = schedule_params(rows, p.batch, p.heads, kUnitRows, p.head_bytes, false);
        params.units = params.query_schedule.tiles;
        params.first_units = first_of_sequences.get();
        const int count = params.query_schedule.tiles * params.query_schedule.heads;
        const blocks::Device<UnitOfTile> tiles(count, UnitOfTile{});
        const blocks::Device<int64_t> out(p.batch * p.heads, -1);
        units_of_tiles<<<count, 32>>>(params, tiles.get());
        first_units<<<1, 64>>>(params, out.get());
        blocks::finish("QueryUnits");
        const std::vector<int64_t> first = out.read();
        std::vector<int> owners(static_cast<size_t>(params.units) * p.heads * (packed ? 1 : p.batch), 0);
        for (const UnitOfTile& found : tiles.read()) {
            const auto [batch, head, tile] = found.work;
            if (batch < 0 || tile * kUnitRows >= owned_by(p, batch)) continue;
            const bool inside = found.unit >= 0 && found.unit < static_cast<int64_t>(owners.size());
            check.equal(inside ? ++owners[found.unit] : -1, 1, "owners of the unit of batch %d head %d tile %d", batch, head,
                        tile);
            check.equal(first[batch * p.heads + head] + tile, found.unit, "unit of batch %d head %d tile %d", batch, head, tile);
        }
    }
}

}  // namespace

int main() {
    check_dense();
    check_packed();
    check_rows();
    check_units();
    return blocks::failed_checks() > 0;
}
