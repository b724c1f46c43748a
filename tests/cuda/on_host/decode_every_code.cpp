// Runs decode over a cache of 8-bit codes on the host, from the problem over the plan to the kernels. There are 256 sequences of
// one key and one query row. Argument: the type of the codes (1 e4m3, 2 e5m2, 3 int8).
// Checked: with keys of zeros every element of out is its code's value times the scale, bit for bit, and all codes are in every
// channel; with a query that is one channel of the key, lse is the value of its code times the scale, for all codes.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>

#include "cpu/convert.h"
#include "decode_instances.h"
#include "decode_problem.h"
#include "numbers.h"

using T = ElementOf<DecodeKernel::config.dtype>;
constexpr DType kType = std::is_same_v<T, __half> ? DType::f16 : DType::bf16;
constexpr int kDim = HEAD_DIM, kDimV = std::min(kDim, DecodeKernel::config.head_dim_v), kCodes = 256;
constexpr float kScaleOfKeys = 0.25f, kScaleOfValues = 0.5f;

float value_of(DType code, uint8_t bits) {
    if (code == DType::e4m3) return cpu::widen(cpu::e4m3{bits});
    return code == DType::e5m2 ? cpu::widen(cpu::e5m2{bits}) : static_cast<float>(static_cast<int8_t>(bits));
}

struct Problem {
    const DType code;
    std::vector<T> q, out;
    std::vector<uint8_t> k, v;
    std::vector<float> lse;
    std::vector<int32_t> table, lengths;
    float k_scale = kScaleOfKeys, v_scale = kScaleOfValues;

    explicit Problem(DType given)
        : code(given), q(kCodes * kDim, T(0.0f)), out(kCodes * kDimV), k(kCodes * kDim), v(kCodes * kDimV), lse(kCodes, NAN),
          lengths(kCodes, 1) {
        for (int b = 0; b < kCodes; ++b) table.push_back(b * 7 % kCodes);
    }
    DecodeProblem problem() {
        DecodeProblem p;
        p.device = {FLASH_DEVICE_CUDA, 0}, p.dtype = kType, p.batch = kCodes, p.heads_q = p.heads_k = 1;
        p.head_dim = kDim, p.head_dim_v = kDimV, p.softmax_scale = 1, p.causal = true, p.mask_rule.right = 0;
        p.q = view(q.data(), kType, {kCodes, 1, 1, kDim}), p.out = view(out.data(), kType, {kCodes, 1, 1, kDimV});
        p.lse = view(lse.data(), DType::f32, {kCodes, 1, 1});
        p.seqlen_q = p.q_rows.capacity = 1, p.q_rows.batch = p.new_rows.batch = kCodes;
        p.cache.dtype = code, p.cache.capacity = p.cache.page_size = 1, p.cache.pages = kCodes;
        p.cache.block_table = table.data(), p.cache.block_table_stride[0] = p.cache.block_table_stride[1] = 1;
        p.cache.k = view(k.data(), code, {kCodes, 1, 1, kDim}), p.cache.v = view(v.data(), code, {kCodes, 1, 1, kDimV});
        for (auto [scale, number] : {std::pair(&p.cache.k_scale, &k_scale), std::pair(&p.cache.v_scale, &v_scale)})
            scale->present = true, scale->data = number, scale->groups = 1;
        p.cache_seqlens = lengths.data();
        p.request.num_splits = 1;
        return p;
    }
    void run() {
        const DecodeProblem p = problem();
        const cuda::Kernel kernel = decode_kernel<DecodeKernel>();
        const DeviceProperties device = hopper(64);
        std::memset(emulation::shared_memory, 0xff, sizeof emulation::shared_memory);  // NaN
        cuda::decode(kernel, p, sm80::plan_decode(kernel, p, device, {}), nullptr, nullptr);
    }

    bool values_are_right() {
        for (int b = 0; b < kCodes; ++b)
            for (int e = 0; e < kDimV; ++e) v[table[b] * kDimV + e] = static_cast<uint8_t>(b + 37 * e);
        run();
        int wrong = 0;
        for (int b = 0; b < kCodes; ++b)
            for (int e = 0; e < kDimV; ++e)
                wrong += !equal_or_nan(wide(out[b * kDimV + e]), kScaleOfValues * value_of(code, v[table[b] * kDimV + e]));
        std::printf("%s values: %d wrong\n", wrong == 0 ? "ok" : "WRONG", wrong);
        return wrong == 0;
    }
    // The key of sequence b has code b in the channel in which its query is 1.
    bool keys_are_right() {
        for (int b = 0; b < kCodes; ++b) {
            const int channel = b * 5 % kDim;
            q[b * kDim + channel] = T(1.0f), k[table[b] * kDim + channel] = static_cast<uint8_t>(b);
        }
        run();
        int wrong = 0;
        for (int b = 0; b < kCodes; ++b) {
            const float score = kScaleOfKeys * value_of(code, static_cast<uint8_t>(b));
            wrong += std::isfinite(score) ? !(std::fabs(lse[b] - score) <= 1e-6f * std::fabs(score)) : std::isfinite(lse[b]);
        }
        std::printf("%s keys: %d wrong\n", wrong == 0 ? "ok" : "WRONG", wrong);
        return wrong == 0;
    }
};

int main(int, char** argv) {
    constexpr DType kTypes[] = {DType::e4m3, DType::e5m2, DType::i8};
    Problem p(kTypes[std::atoi(argv[1]) - 1]);
    const bool good = p.values_are_right();  // before there are keys
    return p.keys_are_right() && good ? 0 : 1;
}
