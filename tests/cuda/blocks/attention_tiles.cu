// Tests KeyTiles and QueryTiles against every pair of row and key: the visited tiles are those with a visible pair, each once
// and in order, and tiles that are not edge tiles have no hidden pair. Random lengths, causal masks, windows and block masks.
#include "check.cuh"
#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/query_tiles.cuh"

using namespace libflash::cuda;

namespace {

constexpr int kCases = 240, kLongest = 520, kBatch = 2, kHeads = 3;
constexpr int kMostBlocks = (kLongest + 127) / 128;
constexpr int kSlots = 20;  // the most tiles that one tile visits, and a last entry of -1
constexpr int kEdge = 1 << 16;

enum BlockForm { kNoBlocks, kDense, kLists, kForms };

// A problem as the kernels see it. The block masks of all cases share one array, kMostBlocks in each dimension, for each batch
// entry and head.
struct Case {
    MaskParams mask;
    BlockMaskParams by_row, by_col;
    int batch, head, length_q, length_k, spare_q, spare_k;  // spare: rows after the used length
    BlockForm form;
};

template <int kM, int kN>
__global__ void loop_over_keys(const Case* cases, int tiles, int* out) {
    const int tile = threadIdx.x;
    const Case c = cases[blockIdx.x];
    if (tile >= tiles) return;
    int* mine = out + (blockIdx.x * tiles + tile) * kSlots;
    KeyTiles<kM, kN> keys;
    keys.init(c.mask, c.by_row, {c.batch, c.head, tile}, {0, c.length_q + c.spare_q, c.length_q},
              {0, c.length_k + c.spare_k, c.length_k});
    int cursor = keys.list_count, n = 0;
    for (int at = keys.previous(keys.end, cursor); at >= 0 && n < kSlots; at = keys.previous(at, cursor))
        mine[n++] = keys.is_edge(at) ? at | kEdge : at;
}

template <int kM, int kN>
__global__ void loop_over_queries(const Case* cases, int tiles, int* out) {
    const int tile = threadIdx.x;
    const Case c = cases[blockIdx.x];
    if (tile >= tiles) return;
    int* mine = out + (blockIdx.x * tiles + tile) * kSlots;
    BackwardParams params{};
    params.mask = c.mask;
    params.part.end_row = INT32_MAX;
    QueryTiles<kM, kN> queries;
    queries.init(params, {c.batch, c.head, tile}, c.length_q, c.length_k);
    int cursor = 0, n = 0;
    for (int at = queries.next(c.by_col, c.head, queries.begin - 1, cursor); at >= 0 && n < kSlots;
         at = queries.next(c.by_col, c.head, at, cursor))
        mine[n++] = queries.is_edge(at) ? at | kEdge : at;
}

// Whether a block is kept, for all cases.
struct Blocks {
    std::vector<uint8_t> kept;
    std::vector<int32_t> counts, indices;  // by row of blocks, then by column; list entries have a stride of 2

    static size_t at(int c, int batch, int head) { return (size_t(c) * kBatch + batch) * kHeads + head; }
    bool keeps(size_t mask, int row, int col) const { return kept[(mask * kMostBlocks + row) * kMostBlocks + col]; }
};

Blocks random_blocks(blocks::Random& random) {
    constexpr size_t kMasks = size_t(kCases) * kBatch * kHeads, kLine = kMostBlocks;
    Blocks b;
    b.kept.resize(kMasks * kLine * kLine);
    b.counts.resize(2 * kMasks * kLine);
    b.indices.assign(2 * kMasks * kLine * kLine * 2, -7);  // entries after a count must not be read
    for (size_t mask = 0; mask < kMasks; ++mask) {
        const int share = random.between(0, 4);  // of 4: no block, some, all
        for (size_t i = 0; i < kLine * kLine; ++i) b.kept[mask * kLine * kLine + i] = random.between(1, 4) <= share;
        for (size_t side = 0; side < 2; ++side)
            for (size_t line = 0; line < kLine; ++line) {
                int32_t& count = b.counts[(side * kMasks + mask) * kLine + line];
                for (size_t other = 0; other < kLine; ++other) {
                    const bool keep = b.keeps(mask, static_cast<int>(side ? other : line), static_cast<int>(side ? line : other));
                    if (keep)
                        b.indices[(((side * kMasks + mask) * kLine + line) * kLine + count++) * 2] = static_cast<int>(other);
                }
            }
    }
    return b;
}

BlockMaskParams params_of(int c, bool by_col, BlockForm form, const uint8_t* kept, const int32_t* counts,
                          const int32_t* indices) {
    constexpr int64_t kLine = kMostBlocks, kSide = int64_t{kCases} * kBatch * kHeads;
    const int64_t first = static_cast<int64_t>(Blocks::at(c, 0, 0)), list = first + (by_col ? kSide : 0);
    BlockMaskParams params{};
    if (form == kDense) {
        params.mask = kept + first * kLine * kLine;
        const int64_t strides[] = {kHeads * kLine * kLine, kLine * kLine, kLine, 1};
        for (int i = 0; i < 4; ++i) params.mask_stride[i] = strides[i];
    }
    if (form == kLists) {
        params.counts = counts + list * kLine;
        params.indices = indices + list * kLine * kLine * 2;
        const int64_t strides[] = {kHeads * kLine, kLine, 1};
        for (int i = 0; i < 3; ++i) params.counts_stride[i] = strides[i], params.indices_stride[i] = strides[i] * kLine * 2;
        params.indices_stride[3] = 2;
    }
    return params;
}

int random_length(blocks::Random& random) {
    const int kind = random.between(0, 5);
    if (kind == 0) return random.between(0, 3);
    if (kind == 1) return 64 * random.between(1, kLongest / 64);
    return random.between(1, kLongest);
}

int random_side(blocks::Random& random) {
    const int kind = random.between(0, 4);
    return kind == 0 ? kUnboundedWindow : kind == 1 ? 0 : kind == 2 ? random.between(0, kLongest) : random.between(0, 100);
}

Case random_case(blocks::Random& random) {
    Case c{};
    c.length_q = random_length(random);
    c.length_k = random.between(0, 3) ? random_length(random) : c.length_q;
    c.spare_q = random.between(0, 1) * random.between(0, 150);
    c.spare_k = random.between(0, 1) * random.between(0, 150);
    const int kind = random.between(0, 3);  // no mask, causal, window, causal window
    c.mask = {kind < 2 ? kUnboundedWindow : random_side(random),
              kind == 0   ? kUnboundedWindow
              : kind == 2 ? random_side(random)
                          : 0,
              random.between(0, 1) == 1};
    c.batch = random.between(0, kBatch - 1);
    c.head = random.between(0, kHeads - 1);
    return c;
}

bool visible_by_position(const Case& c, int row, int key) {
    const int64_t diagonal = int64_t{row} + (c.mask.top_left ? 0 : c.length_k - c.length_q);
    return key >= diagonal - c.mask.left && key <= diagonal + c.mask.right;
}

// A tile of kM rows and kN keys, judged pair by pair.
struct Pairs {
    bool any;    // it has a visible pair of an existing row and key
    bool whole;  // all its keys exist and no pair is hidden by position, also for rows that do not exist
};

Pairs pairs_of(const Case& c, int first_row, int rows, int first_key, int keys) {
    Pairs pairs{false, true};
    for (int row = first_row; row < first_row + rows; ++row)
        for (int key = first_key; key < first_key + keys; ++key) {
            const bool visible = key < c.length_k && visible_by_position(c, row, key);
            pairs.any |= visible && row < c.length_q;
            pairs.whole &= visible;
        }
    return pairs;
}

// Compares the tiles that one tile visited (`got`) with the expected list, with edge flags.
void compare(blocks::Check& check, const int* got, const std::vector<int>& expected, int number, const Case& c, int tile) {
    for (int n = 0; n < kSlots; ++n) {
        const int wanted = n < static_cast<int>(expected.size()) ? expected[n] : -1;
        check.equal(
            got[n], wanted,
            "case %d (%d queries, %d keys, window %d, %d, top left %d, blocks %d), tile %d, visit %d; %d is the mark of edges",
            number, c.length_q, c.length_k, c.mask.left, c.mask.right, c.mask.top_left, c.form, tile, n, kEdge);
        if (got[n] != wanted || wanted < 0) return;
    }
}

template <int kM, int kN>
void check_tiles(const std::vector<Case>& cases, const Blocks& all_blocks) {
    const int q_tiles = (kLongest + 150) / kM + 1, k_tiles = (kLongest + 150) / kN + 1;
    const size_t count = cases.size();
    const blocks::Device<Case> there(cases);
    const blocks::Device<int> keys(count * q_tiles * kSlots, -1), queries(count * k_tiles * kSlots, -1);
    loop_over_keys<kM, kN><<<kCases, 64>>>(there.get(), q_tiles, keys.get());
    loop_over_queries<kM, kN><<<kCases, 64>>>(there.get(), k_tiles, queries.get());
    blocks::finish("KeyTiles and QueryTiles");
    const std::vector<int> got_keys = keys.read(), got_queries = queries.read();
    const std::string size = " " + std::to_string(kM) + "x" + std::to_string(kN);
    blocks::Check check_keys("KeyTiles" + size), check_queries("QueryTiles" + size);
    int whole = 0, edges = 0;
    for (int i = 0; i < kCases; ++i) {
        const Case& c = cases[i];
        std::vector<std::vector<int>> of_row(q_tiles), of_key(k_tiles);
        for (int m = 0; m * kM < c.length_q; ++m)
            for (int n = 0; n * kN < c.length_k; ++n) {
                const bool kept = all_blocks.keeps(Blocks::at(i, c.batch, c.head), m * kM / 128, n * kN / 128);
                if (c.form != kNoBlocks && !kept) continue;
                const Pairs pairs = pairs_of(c, m * kM, kM, n * kN, kN);
                if (!pairs.any) continue;
                of_row[m].insert(of_row[m].begin(), pairs.whole ? n : n | kEdge);
                const bool rows_exist = (m + 1) * kM <= c.length_q;  // QueryTiles checks rows, too
                of_key[n].push_back(pairs.whole && rows_exist ? m : m | kEdge);
                ++(pairs.whole ? whole : edges);
            }
        for (int m = 0; m < q_tiles; ++m) compare(check_keys, &got_keys[(i * q_tiles + m) * kSlots], of_row[m], i, c, m);
        for (int n = 0; n < k_tiles; ++n) compare(check_queries, &got_queries[(i * k_tiles + n) * kSlots], of_key[n], i, c, n);
    }
    check_keys.at_most(whole < 100 || edges < 100, 0, "%d whole tiles and %d edges: too few to mean anything", whole, edges);
    check_keys.note(std::to_string(whole) + " whole tiles, " + std::to_string(edges) + " edges");
}

}  // namespace

int main() {
    blocks::Random random(2024);
    const Blocks all_blocks = random_blocks(random);
    const blocks::Device<uint8_t> kept(all_blocks.kept);
    const blocks::Device<int32_t> counts(all_blocks.counts), indices(all_blocks.indices);
    std::vector<Case> cases;
    for (int i = 0; i < kCases; ++i) {
        Case c = random_case(random);
        c.form = static_cast<BlockForm>(i % kForms);
        c.by_row = params_of(i, false, c.form, kept.get(), counts.get(), indices.get());
        c.by_col = params_of(i, true, c.form, kept.get(), counts.get(), indices.get());
        cases.push_back(c);
    }
    check_tiles<128, 128>(cases, all_blocks);
    check_tiles<128, 64>(cases, all_blocks);
    check_tiles<64, 128>(cases, all_blocks);
    check_tiles<64, 64>(cases, all_blocks);
    check_tiles<32, 32>(cases, all_blocks);
    return blocks::failed_checks() > 0;
}
