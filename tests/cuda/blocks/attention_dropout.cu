// Tests attention/dropout.cuh: Philox4x32-10 against the known answers that its authors publish (Random123), and the words of
// scores, for every way in which lanes share calls, against the definition in libflash.h.
#include <cmath>

#include "check.cuh"
#include "cuda/attention/dropout.cuh"
#include "cuda/host/problem_params.h"

using namespace libflash::cuda;

namespace {

struct Known {
    uint32_t counter[4], key[2], words[4];
};

const Known kKnown[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

// Ten Philox rounds with 64-bit products.
void reference(const uint32_t (&counter)[4], const uint32_t (&key)[2], uint32_t (&words)[4]) {
    uint64_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
    for (uint64_t round = 0; round < 10; ++round) {
        const uint64_t left = c[0] * 0xD2511F53u, right = c[2] * 0xCD9E8D57u;
        const auto key_of = [&](int i, uint64_t step) { return static_cast<uint32_t>(key[i] + round * step); };
        const uint64_t next[4] = {(right >> 32) ^ c[1] ^ key_of(0, 0x9E3779B9u), right & 0xffffffffu,
                                  (left >> 32) ^ c[3] ^ key_of(1, 0xBB67AE85u), left & 0xffffffffu};
        std::memcpy(c, next, sizeof c);
    }
    for (int i = 0; i < 4; ++i) words[i] = static_cast<uint32_t>(c[i]);
}

__global__ void generate(const Known* known, uint4* out) {
    const Known& k = known[threadIdx.x];
    out[threadIdx.x] = philox(make_uint4(k.counter[0], k.counter[1], k.counter[2], k.counter[3]), k.key[0], k.key[1]);
}

void check_philox() {
    const std::vector<Known> known(std::begin(kKnown), std::end(kKnown));
    const blocks::Device<Known> there(known);
    const blocks::Device<uint4> out(known.size(), uint4{});
    generate<<<1, static_cast<unsigned>(known.size())>>>(there.get(), out.get());
    blocks::finish("philox");
    const std::vector<uint4> got = out.read();
    blocks::Check check("philox"), check_reference("the reference of this program");
    for (size_t i = 0; i < known.size(); ++i) {
        const uint32_t words[4] = {got[i].x, got[i].y, got[i].z, got[i].w};
        uint32_t expected[4];
        reference(known[i].counter, known[i].key, expected);
        for (int w = 0; w < 4; ++w) {
            check.equal(words[w], known[i].words[w], "vector %d word %d", static_cast<int>(i), w);
            check_reference.equal(expected[w], known[i].words[w], "vector %d word %d", static_cast<int>(i), w);
        }
    }
}

constexpr int kRows = 24, kCols = 80, kWords = kRows * kCols;  // computed in patches of 8 x 16
enum Way { kPlain, kOfRow, kTransposed, kWays };
constexpr const char* kNames[kWays] = {"dropout_words", "dropout_words_of_row", "dropout_words_transposed"};

// The words of kRows rows from `row0` on and kCols columns from `col0` on, one patch per warp, and whether they are kept. Each
// function has its own array.
__global__ void words_of_scores(DropoutParams dropout, uint32_t head, int row0, int col0, uint32_t* words, uint8_t* kept) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    const int patch_row = blockIdx.x / (kCols / 16) * 8, patch_col = blockIdx.x % (kCols / 16) * 16;
    const int row = row0 + patch_row, col = col0 + patch_col;
    const auto put = [&](Way way, int r, int c, uint32_t word) {
        const int at = way * kWords + (patch_row + r) * kCols + patch_col + c;
        words[at] = word;
        kept[at] = word >= dropout.threshold;
    };
    const uint4 plain = dropout_words(dropout, head, row + g, col + t * 4);
    put(kPlain, g, t * 4, plain.x);
    put(kPlain, g, t * 4 + 1, plain.y);
    put(kPlain, g, t * 4 + 2, plain.z);
    put(kPlain, g, t * 4 + 3, plain.w);
    uint2 of_row[2];
    dropout_words_of_row(dropout, head, row + g, col, lane, of_row);
    for (int n = 0; n < 2; ++n) {
        put(kOfRow, g, n * 8 + t * 2, of_row[n].x);
        put(kOfRow, g, n * 8 + t * 2 + 1, of_row[n].y);
    }
    uint32_t transposed[4];
    dropout_words_transposed(dropout, head, row + t * 2, col, lane, transposed);
    for (int e = 0; e < 4; ++e) put(kTransposed, t * 2 + e % 2, e / 2 * 8 + g, transposed[e]);
}

struct Place {
    int batch, heads, head, first_row, first_col;
};

// Returns how many probabilities are kept.
int check_mask(blocks::Check& check_kept, blocks::Check (&checks)[kWays], const libflash::Dropout& dropout, const Place& at,
               bool in_memory) {
    const blocks::Device<uint64_t> state(std::vector<uint64_t>{dropout.seed, dropout.offset});
    libflash::Dropout given = dropout;
    if (in_memory) given.seed = given.offset = 0, given.state = state.get();
    const blocks::Device<uint32_t> words(kWays * kWords, 0);
    const blocks::Device<uint8_t> mask(kWays * kWords, 2);
    const uint64_t sequence_head = static_cast<uint64_t>(at.batch) * at.heads + at.head, seed = dropout.seed,
                   offset = dropout.offset;
    words_of_scores<<<kWords / 128, 32>>>(dropout_params(given), static_cast<uint32_t>(sequence_head), at.first_row, at.first_col,
                                          words.get(), mask.get());
    blocks::finish("dropout");
    const std::vector<uint32_t> got = words.read();
    const std::vector<uint8_t> kept = mask.read();
    const uint32_t key[2] = {static_cast<uint32_t>(seed % (uint64_t{1} << 32)), static_cast<uint32_t>(seed >> 32)};
    const uint32_t mix = static_cast<uint32_t>(offset) ^ static_cast<uint32_t>((offset >> 32) * 0x9E3779B9u);
    int kept_here = 0;
    for (int i = 0; i < kWords; ++i) {
        const int row = at.first_row + i / kCols, col = at.first_col + i % kCols;
        uint32_t expected[4];
        reference({static_cast<uint32_t>(col / 4), static_cast<uint32_t>(row), static_cast<uint32_t>(sequence_head), mix}, key,
                  expected);
        const bool is_kept = expected[col % 4] >= std::floor(dropout.p * 4294967296.0);
        kept_here += is_kept;
        for (int way = 0; way < kWays; ++way) {
            checks[way].equal(got[way * kWords + i], expected[col % 4], "seed %llx offset %llx head %llu row %d col %d",
                              static_cast<unsigned long long>(seed), static_cast<unsigned long long>(offset),
                              static_cast<unsigned long long>(sequence_head), row, col);
            check_kept.equal(kept[way * kWords + i], is_kept, "p %g: row %d col %d, %s", dropout.p, row, col, kNames[way]);
        }
    }
    return kept_here;
}

void check_masks() {
    blocks::Check checks[kWays] = {blocks::Check(kNames[kPlain]), blocks::Check(kNames[kOfRow]),
                                   blocks::Check(kNames[kTransposed])};
    blocks::Check mask("the mask of dropout");
    const uint64_t numbers[] = {0, 0x123456789abcdef0u, ~uint64_t{0}, uint64_t{1} << 32};
    const Place places[] = {{0, 1, 0, 0, 0}, {3, 5, 4, 1000, 120}, {70000, 70000, 69999, (1 << 29) - 24, (1 << 29) - 104}};
    int some = 0, problems = 0;
    for (const double p : {0.0, 0x1p-33, 0.1, 0.9375, 1 - 0x1p-40})
        for (const uint64_t seed : numbers)
            for (const uint64_t offset : numbers)
                for (const Place& at : places) {
                    libflash::Dropout dropout;
                    dropout.p = p, dropout.seed = seed, dropout.offset = offset;
                    for (const bool in_memory : {false, true}) {
                        const int count = check_mask(mask, checks, dropout, at, in_memory);
                        some += count > 0 && count < kWords;
                        problems += p >= 0.1 && p < 0.99;
                    }
                }
    mask.at_most(problems - some, 0, "masks of medium p that keep all entries or drop all");
}

}  // namespace

int main() {
    check_philox();
    check_masks();
    return blocks::failed_checks() > 0;
}
