// Decode over a cache of 8-bit codes: a stage holds codes; before a tile is used each warp converts the 16 keys and values that
// it loaded to the type of the queries. Every value is exact, so all products have the bits of a cache of that type with the same
// values. `Body`: Decode in decode_range.cuh.
//
// A scale of keys multiplies a column of scores. A scale of values multiplies P, after the row sum, so that it costs nothing per
// channel. P * scale has to fit `half`: scales are divided by a power of two, the base of the warp, at most the largest magnitude
// of a scale so far; the accumulators are multiplied by it at the end, which is exact.
#pragma once

#include "cuda/attention/cache_codes.cuh"
#include "cuda/attention/decode_keys.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/quad.cuh"

#include <type_traits>

namespace libflash::cuda::sm80 {

template <class Body>
struct DecodeCodes {
    using T = typename Body::Element;
    using Slab = typename Body::Slab;
    static constexpr int kHeadDim = Body::kChannels, kChunks = kHeadDim / 16;  // of 16 codes
    static constexpr float kSmallestBase = 1.17549435e-38f;                    // 2^-126

    Body& body;

    // The scales of the 16 keys and then of the 16 values of a slab.
    __device__ __forceinline__ float* scales(int stage, int group) const {
        return body.scales() + (stage * Body::kThreads / 32 + group) * 2 * kDecodeSlab;
    }

    // Starts to load the scales of the keys that this warp loads to a stage. `location`: of key `lane`, in the first 16 lanes.
    __device__ __forceinline__ void load_scales(int head_k, int stage, const KeyLocation& location) const {
        const bool of_values = body.lane >= kDecodeSlab;
        const CacheScaleParams& scale = of_values ? body.params.v_scale : body.params.k_scale;
        const int64_t page = __shfl_sync(0xffffffffu, location.page, body.lane % kDecodeSlab);
        const int64_t row = __shfl_sync(0xffffffffu, location.row, body.lane % kDecodeSlab);
        if (!scale.data) return;
        float* const to = scales(stage, body.warp) + body.lane;
        if (static_cast<uint64_t>(page) < static_cast<uint64_t>(body.params.cache.pages)) {
            cp_async_4(shared_address(to), scale.data + body.work_tile.batch * scale.batch + page * scale.place +
                                               row * scale.row + head_k * scale.head);
        } else {
            *to = 0.0f;
        }
    }

    template <CodeType kCode>
    __device__ __forceinline__ void convert_slab(const char* from, char* to) const {
        constexpr int kRounds = kDecodeSlab * kChunks / 32;
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            const int at = i * 32 + body.lane, row = at / kChunks, chunk = at % kChunks;
            const uint4 codes = *reinterpret_cast<const uint4*>(from + at * 16);
            uint4 low, high;
            widen_codes<kCode>(codes, low, high, T());
            // Neighbouring groups of four lanes write odd and even chunks in turn, so that eight lanes have no bank conflicts.
            const int odd = chunk / 4 % 2;
            *reinterpret_cast<uint4*>(to + Slab::offset(row, 2 * chunk + odd)) = odd ? high : low;
            *reinterpret_cast<uint4*>(to + Slab::offset(row, 2 * chunk + 1 - odd)) = odd ? low : high;
        }
    }

    // Converts the keys and values that this warp loaded. Before, the warp has waited for them; after, the caller synchronises.
    __device__ __forceinline__ void convert(int stage) const {
        if (body.existing(stage, body.warp) == 0) return;
        const auto both = [&](auto code) {
            convert_slab<decltype(code)::value>(body.stored_keys(stage, body.warp), body.keys(stage, body.warp));
            convert_slab<decltype(code)::value>(body.stored_values(stage, body.warp), body.values(stage, body.warp));
        };
        switch (body.params.code) {
            case CodeType::e4m3: return both(std::integral_constant<CodeType, CodeType::e4m3>());
            case CodeType::e5m2: return both(std::integral_constant<CodeType, CodeType::e5m2>());
            default: return both(std::integral_constant<CodeType, CodeType::int8>());
        }
    }

    // Calls rule(score, scale) for all scores of this lane, with the scales of their keys.
    template <class Rule>
    __device__ __forceinline__ void with_scales(const float* of_slab, const Rule& rule) const {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float2 scale = *reinterpret_cast<const float2*>(of_slab + 8 * n + body.lane % 4 * 2);
#pragma unroll
            for (int e = 0; e < 4; ++e) rule(body.s[n][e], e % 2 ? scale.y : scale.x);
        }
    }

    __device__ __forceinline__ void scale_scores(int stage, int group) const {
        if (!body.params.k_scale.data) return;
        with_scales(scales(stage, group), [](float& score, float scale) { score *= scale; });
    }

    __device__ __forceinline__ void begin() const { body.value_base = kSmallestBase; }

    __device__ __forceinline__ void scale_weights(int stage, int group) const {
        if (!body.params.v_scale.data) return;
        const float* const of_values = scales(stage, group) + kDecodeSlab;
        float largest = 0.0f;
        with_scales(of_values, [&](float&, float scale) { largest = fmaxf(largest, fabsf(scale)); });
        largest = quad_max(largest);  // of all 16, the same in all lanes
        if (largest >= 2.0f * body.value_base) raise_base(largest);
        const float factor = float_of(0x7f000000u - bits_of(body.value_base));  // its inverse
        with_scales(of_values, [&](float& weight, float scale) { weight *= scale * factor; });
    }

    __device__ __forceinline__ void raise_base(float largest) const {
        const float base = float_of(min(bits_of(largest) & 0x7f800000u, 0x7e800000u));  // at most 2^126: its inverse is normal
        multiply(body.value_base / base);
        body.value_base = base;
    }

    // After the last tile.
    __device__ __forceinline__ void finish() const {
        if (body.params.v_scale.data) multiply(body.value_base);
    }

    __device__ __forceinline__ void multiply(float factor) const {
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) body.o[n][e] *= factor;
    }
};

}  // namespace libflash::cuda::sm80
