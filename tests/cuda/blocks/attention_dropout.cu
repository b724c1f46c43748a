// Tests attention/dropout.cuh: Philox4x32-7 against the known answers that its authors publish (Random123), and the mask, for
// every way in which lanes share calls, against the definition in libflash.h.
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
    {{0, 0, 0, 0}, {0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
};

// Seven Philox rounds with 64-bit products.
void reference(const uint32_t (&counter)[4], const uint32_t (&key)[2], uint32_t (&words)[4]) {
    uint64_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
    for (uint64_t round = 0; round < 7; ++round) {
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

// The mask of a part of 64 x 64 probabilities. Each function computes it in patches of its own shape, by one warp.
constexpr int kSide = 64, kElements = kSide * kSide;
enum Way { kCalls, kElement, kTwoRows, kFourRows, kPairs, kSideBySide, kLongColumns, kSquare, kOneBlock, kWays };
constexpr const char* kNames[kWays] = {
    "kept_keys",
    "keep_bits_of_elements",
    "keep_bits of 2 rows",
    "keep_bits of 4 rows",
    "keep_bits_of_pairs",
    "keep_bits_transposed of 4 x 2 blocks",
    "keep_bits_transposed of 8 x 1 blocks",
    "keep_bits_transposed of 2 x 2 blocks",
    "keep_bits_transposed of 1 block",
};

struct Part {
    DropoutParams dropout;
    uint32_t head;
    int row0, col0, lane;
    uint8_t* kept;  // of each way

    __device__ void put(Way way, int row, int col, uint32_t bit) const { kept[way * kElements + row * kSide + col] = bit & 1; }

    // kBlocks blocks of 8 rows and 16 columns, kSlabs side by side.
    template <int kBlocks, int kSlabs>
    __device__ void transposed(Way way) const {
        constexpr int kHeight = kBlocks / kSlabs * 8, kWidth = kSlabs * 16;
        for (int row = 0; row < kSide; row += kHeight)
            for (int col = 0; col < kSide; col += kWidth) {
                const uint32_t keep =
                    keep_bits_transposed<kBlocks, kSlabs>(dropout, head, row0 + row + lane % 4 * 2, col0 + col, lane);
                for (int i = 0; i < kBlocks * 4; ++i)
                    put(way, row + i / 4 / kSlabs * 8 + lane % 4 * 2 + i % 2,
                        col + i / 4 % kSlabs * 16 + i % 4 / 2 * 8 + lane / 4, keep >> i);
            }
    }
    // kCount rows of the lane, 8 apart, and 16 columns.
    template <int kCount, int kRowBits, int kBlockBits>
    __device__ void rows(Way way) const {
        for (int row = lane / 4; row < kSide; row += 8 * kCount)
            for (int col = 0; col < kSide; col += 16) {
                const uint32_t keep = keep_bits<kCount, kRowBits, kBlockBits>(dropout, head, col0 + col, lane,
                                                                              [&](int r) { return row0 + row + r * 8; });
                for (int i = 0; i < kCount * 4; ++i)
                    put(way, row + i / 4 * 8, col + i / 2 % 2 * 8 + lane % 4 * 2 + i % 2,
                        keep >> (i / 4 * kRowBits + i / 2 % 2 * kBlockBits + i % 2));
            }
    }
};

__global__ void masks(DropoutParams dropout, uint32_t head, int row0, int col0, uint8_t* kept) {
    const int lane = threadIdx.x;
    const Part part{dropout, head, row0, col0, lane, kept};
    for (int row = lane; row < kSide; row += 32)
        for (int col = 0; col < kSide; col += 8) {
            const uint32_t keep = kept_keys(dropout, head, row0 + row, col0 + col);
            const uint32_t elements =
                keep_bits_of_elements<8>(dropout, head, [&](int) { return row0 + row; }, [&](int i) { return col0 + col + i; });
            for (int i = 0; i < 8; ++i)
                part.put(kCalls, row, col + i, keep >> i), part.put(kElement, row, col + i, elements >> i);
        }
    part.rows<2, 2, 4>(kTwoRows);
    part.rows<4, 4, 2>(kFourRows);
    for (int row = lane / 4; row < kSide; row += 16) {
        const uint32_t keep = keep_bits_of_pairs<2, 4>(dropout, head, col0, lane, [&](int r) { return row0 + row + r * 8; });
        for (int i = 0; i < 32; ++i)
            part.put(kPairs, row + i / 4 % 2 * 8, i / 8 * 16 + i / 2 % 2 * 8 + lane % 4 * 2 + i % 2, keep >> i);
    }
    part.transposed<8, 2>(kSideBySide);
    part.transposed<8, 1>(kLongColumns);
    part.transposed<4, 2>(kSquare);
    part.transposed<1, 1>(kOneBlock);
}

struct Place {
    int batch, heads, head, first_row, first_col;
};

// Returns how many probabilities are kept.
int check_mask(blocks::Check (&checks)[kWays], const libflash::Dropout& dropout, const Place& at, bool in_memory) {
    const blocks::Device<uint64_t> state(std::vector<uint64_t>{dropout.seed, dropout.offset});
    libflash::Dropout given = dropout;
    if (in_memory) given.seed = given.offset = 0, given.state = state.get();
    const blocks::Device<uint8_t> mask(kWays * kElements, 2);
    const uint64_t sequence_head = static_cast<uint64_t>(at.batch) * at.heads + at.head, seed = dropout.seed,
                   offset = dropout.offset;
    masks<<<1, 32>>>(dropout_params(given), static_cast<uint32_t>(sequence_head), at.first_row, at.first_col, mask.get());
    blocks::finish("dropout");
    const std::vector<uint8_t> kept = mask.read();
    const uint32_t key[2] = {static_cast<uint32_t>(seed % (uint64_t{1} << 32)), static_cast<uint32_t>(seed >> 32)};
    const uint32_t mix = static_cast<uint32_t>(offset) ^ static_cast<uint32_t>((offset >> 32) * 0x9E3779B9u);
    const double threshold = std::fmin(std::floor(dropout.p * 65536 + 0.5), 65535);
    int kept_here = 0;
    for (int i = 0; i < kElements; ++i) {
        const int row = at.first_row + i / kSide, col = at.first_col + i % kSide;
        uint32_t words[4];
        reference({static_cast<uint32_t>(col / 8), static_cast<uint32_t>(row), static_cast<uint32_t>(sequence_head), mix}, key,
                  words);
        const uint32_t word = words[col % 8 / 2], number = col % 2 ? word / 65536 : word % 65536;
        const bool expected = number >= threshold;
        kept_here += expected;
        for (int way = 0; way < kWays; ++way)
            checks[way].equal(kept[way * kElements + i], expected, "p %g seed %llx offset %llx head %llu row %d col %d",
                              dropout.p, static_cast<unsigned long long>(seed), static_cast<unsigned long long>(offset),
                              static_cast<unsigned long long>(sequence_head), row, col);
    }
    return kept_here;
}

void check_masks() {
    blocks::Check checks[kWays] = {
        blocks::Check(kNames[0]), blocks::Check(kNames[1]), blocks::Check(kNames[2]),
        blocks::Check(kNames[3]), blocks::Check(kNames[4]), blocks::Check(kNames[5]),
        blocks::Check(kNames[6]), blocks::Check(kNames[7]), blocks::Check(kNames[8]),
    };
    blocks::Check counts("how many probabilities a mask keeps");
    const uint64_t numbers[] = {0, 0x123456789abcdef0u, ~uint64_t{0}, uint64_t{1} << 32};
    const Place places[] = {{0, 1, 0, 0, 0}, {3, 5, 4, 1000, 120}, {70000, 70000, 69999, (1 << 29) - 64, (1 << 29) - 72}};
    for (const double p : {0.0, 0x1p-17, 0.1, 0.9375, 1 - 0x1p-40})
        for (const uint64_t seed : numbers)
            for (const uint64_t offset : numbers)
                for (const Place& at : places) {
                    libflash::Dropout dropout;
                    dropout.p = p, dropout.seed = seed, dropout.offset = offset;
                    for (const bool in_memory : {false, true}) {
                        const double kept = check_mask(checks, dropout, at, in_memory), mean = kElements * (1 - p);
                        counts.at_most(std::fabs(kept - mean), 6 * std::sqrt(mean * p) + 2, "p %g seed %llx offset %llx", p,
                                       static_cast<unsigned long long>(seed), static_cast<unsigned long long>(offset));
                    }
                }
}

}  // namespace

int main() {
    check_philox();
    check_masks();
    return blocks::failed_checks() > 0;
}
