// Runs the kernel of cache_write on the host and compares caches and scales, bit for bit, with what cpu/quantize.h stores: all
// types of caches, all shapes of scales, all rotary embeddings, with and without rope parts. Some rows hold zeros, infinities and
// NaN; some slots are outside of the cache. Prints a line per case; exit code 0 means that all are right.
#include "emulation.h"

#include <cstdio>
#include <random>

#include "cpu/quantize.h"
#include "cuda/any/cache_write.cuh"

using namespace libflash;
using namespace libflash::cuda;

struct CacheWriteKernel {
    static constexpr KernelConfig config{"cache_write", Operation::cache_write, "any", KernelType::any_, 0, 0, 0, 0, 0, "", ""};
};
constexpr KernelType kType = KernelType::DTYPE;
// The same type for the kernel and for the CPU.
using T =
    std::conditional_t<kType == KernelType::f16_, __half, std::conditional_t<kType == KernelType::bf16_, __nv_bfloat16, float>>;
using H = std::conditional_t<kType == KernelType::f16_, cpu::half,
                             std::conditional_t<kType == KernelType::bf16_, cpu::bfloat16, float>>;
constexpr int kRows = 9, kHeads = 2, kDim = 40, kDimV = 24, kRope = 20, kCacheBlocks = 3, kBlockRows = 4;
constexpr int kPositions = 16, kPairs = 9;
constexpr int64_t kSlots[kRows] = {7, -1, 0, 12, 11, 3, int64_t{1} << 40, 5, 2};

std::mt19937 generator(7);
std::vector<H> random_rows(int channels) {
    std::normal_distribution<float> normal(0.0f, 40.0f);
    std::vector<H> x(size_t(kRows) * kHeads * channels);
    for (H& y : x) cpu::store(y, double(normal(generator)));
    for (int c = 0; c < channels; ++c) cpu::store(x[c], 0.0);                 // a row of zeros
    cpu::store(x[size_t(2 * kHeads) * channels + 3], double(NAN));            // in slot 0
    cpu::store(x[size_t(4 * kHeads + 1) * channels + 20], double(INFINITY));  // in slot 11
    cpu::store(x[size_t(5 * kHeads) * channels + 1], -0.0);
    cpu::store(x[size_t(7 * kHeads) * channels + channels - 1], -1e30);
    return x;
}

enum class Scales { none, heads, rows, groups };

// A cache of one tensor, as the kernel and as the CPU writes it.
struct Cache {
    int channels;
    size_t element;
    std::vector<uint8_t> got, wanted;
    std::vector<float> got_scales, wanted_scales;
    CacheScaleParams scale{};
    CacheScale host;

    Cache(int dim, CodeType code, Scales kind) : channels(dim), element(code == CodeType::none ? sizeof(T) : 1) {
        got.assign(size_t(kCacheBlocks) * kBlockRows * kHeads * dim * element, 0x5a);
        const int groups = kind == Scales::groups ? 2 : 1;
        got_scales.assign(size_t(kCacheBlocks) * kBlockRows * kHeads * groups, 0.0f);
        for (size_t i = 0; i < got_scales.size(); ++i) got_scales[i] = 0.37f + i;
        wanted = got, wanted_scales = got_scales;
        if (kind == Scales::none) return;
        host.present = true, host.groups = groups, host.group_stride = 1, host.head_stride = groups;
        host.of_rows = kind != Scales::heads;
        if (host.of_rows) host.row_stride = kHeads * groups, host.block_stride = kBlockRows * kHeads * groups;
        scale = {got_scales.data(), 0, host.block_stride, host.row_stride, host.head_stride, 1, groups, host.of_rows};
    }
    RowsParams params() { return {got.data(), int64_t{kBlockRows} * kHeads * channels, int64_t{kHeads} * channels, channels}; }
    template <class C>
    void write(const H* row, int64_t slot, int head) {
        float* const scales = host.present ? wanted_scales.data() + slot / kBlockRows * host.block_stride +
                                                 slot % kBlockRows * host.row_stride + head * host.head_stride
                                           : nullptr;
        cpu::write_cached(row, channels, host, scales, reinterpret_cast<C*>(wanted.data()) + (slot * kHeads + head) * channels);
    }
    void write(CodeType code, const H* row, int64_t slot, int head) {
        switch (code) {
            case CodeType::e4m3: return write<cpu::e4m3>(row, slot, head);
            case CodeType::e5m2: return write<cpu::e5m2>(row, slot, head);
            case CodeType::int8: return write<cpu::int8>(row, slot, head);
            default: return write<H>(row, slot, head);
        }
    }
    // NaN numbers of 16 or 32 bits and NaN scales may differ in their bits, and so may a NaN of e5m2 after a rotation.
    int wrong(CodeType code) const {
        int count = 0;
        const auto same = [](float x, float y) { return std::memcmp(&x, &y, 4) == 0 || (x != x && y != y); };
        for (size_t i = 0; i < got_scales.size(); ++i) count += !same(got_scales[i], wanted_scales[i]);
        for (size_t i = 0; i < got.size(); i += element) {
            if (element == 1) {
                const bool nan = code == CodeType::e5m2 && (got[i] & 0x7f) > 0x7c && (wanted[i] & 0x7f) > 0x7c;
                count += got[i] != wanted[i] && !nan;
            } else {
                H x, y;
                std::memcpy(&x, &got[i], sizeof x), std::memcpy(&y, &wanted[i], sizeof y);
                count += !same(cpu::widen(x), cpu::widen(y));
            }
        }
        return count;
    }
};

enum class Rotary { none, halves, interleaved };

void rotate(H* row, const std::vector<float>& cos, const std::vector<float>& sin, int position, bool interleaved) {
    for (int n = 0; n < kPairs; ++n) {
        H &first = row[interleaved ? 2 * n : n], &second = row[interleaved ? 2 * n + 1 : n + kPairs];
        const double x = cpu::widen(first), y = cpu::widen(second);
        const double c = cos[position * kPairs + n], s = sin[position * kPairs + n];
        cpu::store(first, x * c - y * s), cpu::store(second, x * s + y * c);
    }
}

// `parts`: whether the keys have a rope part, which is then rotated.
bool run(CodeType code, Scales kind, Rotary rotary, bool parts) {
    std::vector<H> k = random_rows(kDim), v = random_rows(kDimV), rope = random_rows(kRope);
    Cache keys(kDim, code, kind), values(kDimV, code, kind), ropes(kRope, CodeType::none, Scales::none);
    std::vector<float> cos, sin;
    std::vector<int32_t> positions;
    for (int i = 0; i < kPositions * kPairs; ++i) cos.push_back(std::cos(0.1f * i)), sin.push_back(std::sin(0.1f * i));
    for (int i = 0; i < kRows; ++i) positions.push_back(i * 3);  // the last ones are past the end of the tables
    const auto rows = [](std::vector<H>& x, int channels) {
        return RowsParams{x.data(), 0, int64_t{kHeads} * channels, channels};
    };
    CacheWriteParams p{};
    p.k_new = rows(k, kDim), p.v_new = rows(v, kDimV);
    p.k = keys.params(), p.v = values.params();
    if (parts) p.rope_new = rows(rope, kRope), p.rope = ropes.params();
    p.k_scale = keys.scale, p.v_scale = values.scale;
    if (rotary != Rotary::none)
        p.rotary = {cos.data(), sin.data(), kPairs, kPairs, kPositions, kPairs, rotary == Rotary::interleaved, true};
    p.slots = kSlots, p.wide_slots = true, p.positions = positions.data();
    p.rows = kRows, p.cache_blocks = kCacheBlocks, p.cache_block_rows = kBlockRows, p.heads = kHeads, p.parts = 2 + parts;
    p.channels = kDim, p.channels_v = kDimV, p.channels_rope = kRope, p.code = code;
    CacheWritePlan plan;
    plan.rows_type = kType;
    plan.write = {4, resources_of_cache_write<CacheWriteKernel>(0, 0).threads, 0};
    launch_cache_write<CacheWriteKernel>(plan, p, nullptr);
    for (int i = 0; i < kRows; ++i) {
        if (kSlots[i] < 0 || kSlots[i] >= kCacheBlocks * kBlockRows) continue;
        for (int h = 0; h < kHeads; ++h) {
            const size_t row = size_t(i) * kHeads + h;
            std::vector<H> key(&k[row * kDim], &k[row * kDim] + kDim), own(&rope[row * kRope], &rope[row * kRope] + kRope);
            std::vector<H>& turned = parts ? own : key;
            if (rotary != Rotary::none)
                rotate(turned.data(), cos, sin, std::min(positions[i], kPositions - 1), rotary == Rotary::interleaved);
            keys.write(code, key.data(), kSlots[i], h);
            values.write(code, &v[row * kDimV], kSlots[i], h);
            if (parts) ropes.write(CodeType::none, own.data(), kSlots[i], h);
        }
    }
    const int wrong = keys.wrong(code) + values.wrong(code) + ropes.wrong(CodeType::none);
    const bool changed = keys.got != Cache(kDim, code, kind).got;
    std::printf("%s code %d scales %d rotary %d parts %d: %d wrong\n", wrong == 0 && changed ? "ok" : "WRONG", int(code),
                int(kind), int(rotary), int(parts), wrong);
    return wrong == 0 && changed;
}

// Compares the codes of many numbers: every `half`, and floats with all upper 16 bits and with lower 16 bits around a tie.
bool codes_are_those_of_the_cpu() {
    int wrong = 0;
    const auto compare = [&](float x) {
        cpu::e4m3 a;
        cpu::e5m2 b;
        cpu::int8 c;
        cpu::store(a, double(x)), cpu::store(b, double(x)), cpu::store(c, double(x));
        wrong += code_of(x, CodeType::e4m3) != a.bits;
        wrong += code_of(x, CodeType::e5m2) != b.bits;
        wrong += code_of(x, CodeType::int8) != static_cast<uint8_t>(c.value);
    };
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        compare(cpu::widen(cpu::half{static_cast<uint16_t>(bits)}));
        for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) compare(__uint_as_float(bits << 16 | low));
    }
    std::printf("%s codes: %d wrong\n", wrong == 0 ? "ok" : "WRONG", wrong);
    return wrong == 0;
}

int main() {
    bool good = codes_are_those_of_the_cpu();
    for (const CodeType code : {CodeType::none, CodeType::e4m3, CodeType::e5m2, CodeType::int8})
        for (const Scales kind : {Scales::none, Scales::heads, Scales::rows, Scales::groups}) {
            if (code == CodeType::none && kind > Scales::heads) continue;  // scales of rows need codes
            for (const Rotary rotary : {Rotary::none, Rotary::halves, Rotary::interleaved})
                for (const bool parts : {false, true}) good &= run(code, kind, rotary, parts);
        }
    return good ? 0 : 1;
}
