// Decode over a cache with scales. A scale of keys multiplies a column of scores. A scale of values multiplies P after the row
// sum has been computed, so that it costs nothing per channel. P * scale has to fit `half`. So scales are divided by a power of
// two, the base of the warp, which is at most the largest magnitude of a scale so far. At the end the accumulators are multiplied
// by the base, which is exact.
//
// Only the general instance supports scales of groups of channels. They multiply partial scores, and P once for each group.
// `Body`: Decode in decode_range.cuh.
#pragma once

#include "cuda/attention/decode_keys.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm80 {

// The most groups of channels: a group has 16 channels or more.
constexpr int most_scale_groups(int head_dim, bool general) { return general ? head_dim / 16 : 1; }
// How many scales belong to 16 keys and their values: first those of the keys, then those of the values, each group by group.
constexpr int decode_slab_scales(int head_dim, int head_dim_v, bool general) {
    return (most_scale_groups(head_dim, general) + most_scale_groups(head_dim_v, general)) * kDecodeSlab;
}

template <class Body>
struct DecodeScales {
    static constexpr int kHeadDim = Body::kChannels;
    static constexpr int kMostGroups = most_scale_groups(kHeadDim, Body::kHasRareOptions);
    static constexpr int kOfSlab = decode_slab_scales(kHeadDim, Body::kValueChannels, Body::kHasRareOptions);
    // With few rows P is also multiplied by this factor (decode_few_rows.cuh).
    static constexpr float weight_scale() {
        if constexpr (Body::kHasFewRows) return Body::Products::kWeightScale;
        return 1.0f;
    }
    static constexpr float kWeightScale = weight_scale();
    static constexpr float kSmallestBase = 1.17549435e-38f * kWeightScale;  // 2^-126: the inverse times kWeightScale is finite

    Body& body;

    // The scales of the 16 keys and then of the 16 values of a slab.
    __device__ __forceinline__ float* scales(int stage, int group) const {
        return body.scales() + (stage * Body::kThreads / 32 / Body::kParts + group) * kOfSlab;
    }
    __device__ __forceinline__ const float* value_scales(int stage, int group) const {
        return scales(stage, group) + kMostGroups * kDecodeSlab;
    }

    // Whether all keys have the same scales, so that the scales of a stage need to be loaded only once.
    static __device__ __forceinline__ bool stay(const DecodeParams& params) {
        const auto same = [](const CacheScaleParams& scale) { return !scale.data || (scale.block == 0 && scale.row == 0); };
        return same(params.k_scale) && same(params.v_scale);
    }

    // Starts to load the scales of the keys that this warp loads to a stage. `location`: of key `lane`, in the first 16 lanes.
    // `first`: this is the first tile in the stage. Scales that are the same for all keys are loaded only then.
    __device__ __forceinline__ void load_scales(int head_k, int stage, const KeyLocation& location, bool first) const {
        const bool of_values = body.lane >= kDecodeSlab;
        const CacheScaleParams& scale = of_values ? body.params.v_scale : body.params.k_scale;
        // With unsigned numbers, 64-bit products take fewer instructions.
        const uint32_t page = __shfl_sync(0xffffffffu, location.page, body.lane % kDecodeSlab);
        const uint32_t row = __shfl_sync(0xffffffffu, location.row, body.lane % kDecodeSlab);
        const uint32_t batch = body.work_tile.batch, head = head_k;
        const bool same = scale.block == 0 && scale.row == 0;
        if (!scale.data || (same && !first)) return;
        float* to = scales(stage, body.warp) + body.lane;
        if constexpr (Body::kHasRareOptions) to += of_values ? (kMostGroups - 1) * kDecodeSlab : 0;
        const bool exists = same || page < static_cast<uint32_t>(body.params.cache.pages);
        const float* const from = scale.data + batch * scale.batch + page * scale.block + row * scale.row + head * scale.head;
        const int groups = Body::kHasRareOptions ? scale.groups : 1;
#pragma unroll 1
        for (int group = body.part(); group < groups; group += Body::kParts) {
            if (exists) {
                cp_async_4(shared_address(to + group * kDecodeSlab), from + group * scale.group);
            } else {
                to[group * kDecodeSlab] = 0.0f;
            }
        }
    }

    // Calls rule(score, scale) for all scores of this lane, with the scales of their keys.
    template <class Rule>
    static __device__ __forceinline__ void with_scales(float (&scores)[2][4], const float* of_slab, int lane, const Rule& rule) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float2 scale = *reinterpret_cast<const float2*>(of_slab + 8 * n + lane % 4 * 2);
#pragma unroll
            for (int e = 0; e < Body::kElements; ++e) rule(scores[n][e], e % 2 ? scale.y : scale.x);
        }
    }

    // s = Q K^T, times the scales of the keys.
    __device__ __forceinline__ void scaled_products(int stage, int group) const {
        const CacheScaleParams& scale = body.params.k_scale;
        const auto multiply_by = [](float& score, float factor) { score *= factor; };
        if constexpr (Body::kHasRareOptions) {
            if (scale.data && (scale.groups > 1 || body.params.rope.channels > 0)) {
                const int steps = body.params.k_channels / scale.groups / 16;  // of the channels that have a scale
                body.products.scores_of_groups(body.s, body.keys(stage, group), body.lane, steps, [&](auto& part, int of_group) {
                    if (of_group >= scale.groups) return;  // the channels of k_rope_cache have no scale
                    with_scales(part, scales(stage, group) + of_group * kDecodeSlab, body.lane, multiply_by);
                });
                return;
            }
        }
        body.multiply_keys(stage, group);
        if (scale.data) with_scales(body.s, scales(stage, group), body.lane, multiply_by);
    }

    __device__ __forceinline__ void begin() const {
#pragma unroll
        for (int r = 0; r < Body::kValueBases; ++r) body.value_base[r] = kSmallestBase;
    }

    // o += P V, with P times the scales of the values.
    __device__ __forceinline__ void add_scaled_values(int stage, int group) const {
        const float* const of_values = value_scales(stage, group);
        if constexpr (Body::kHasRareOptions) {
            if (body.params.v_scale.data) return add_values_of_rows(of_values, body.values(stage, group));
        } else if (body.params.v_scale.data) {
            float largest = 0.0f;
            with_scales(body.s, of_values, body.lane, [&](float&, float scale) { largest = fmaxf(largest, fabsf(scale)); });
            if (!Body::kHasFewRows || !body.scales_stay) largest = quad_max(largest);  // of all 16, the same in all lanes
            if (largest >= 2.0f * body.value_base[0]) raise_base(largest);
            const float factor = inverse(body.value_base[0]) * kWeightScale;
            with_scales(body.s, of_values, body.lane, [&](float& weight, float scale) { weight *= scale * factor; });
        } else if constexpr (kWeightScale != 1.0f) {
            body.for_all_scores(0, [](float& weight, int, int) { weight *= kWeightScale; });
        }
        body.add_values(stage, group);
    }

    // The same for the general instance: with groups, and with a separate base for each of the lane's rows, because the base of
    // an invariant row may depend only on the keys that the row sees.
    __device__ __forceinline__ void add_values_of_rows(const float* of_values, const char* values) const {
        const int groups = body.params.v_scale.groups;
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float largest = quad_max(largest_scale(of_values, groups, r));
            float ratio = 1.0f;
            if (largest >= 2.0f * body.value_base[r]) {
                const float base = base_for(largest);
                ratio = body.value_base[r] / base;
                body.value_base[r] = base;
            }
            if (__any_sync(0xffffffffu, ratio != 1.0f)) multiply_row(r, ratio);
            factor[r] = inverse(body.value_base[r]);
        }
        const auto weight = [&](int group, int key, int r) { return of_values[group * kDecodeSlab + key] * factor[r]; };
        if (groups > 1) {
            const int steps = body.params.head_dim_v / groups / 16;
            body.products.add_values_of_groups(body.o, body.s, values, body.lane, steps, weight, body.part());
            return;
        }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) body.s[n][e] *= weight(0, 8 * n + body.lane % 4 * 2 + e % 2, e / 2);
        body.products.add_values(body.o, body.s, values, body.lane, body.part());
    }
    __device__ __forceinline__ float largest_scale(const float* of_values, int groups, int r) const {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (body.params.invariant && body.s[i / 2][2 * r + i % 2] == 0.0f) continue;
#pragma unroll 1
            for (int group = 0; group < groups; ++group)
                largest = fmaxf(largest, fabsf(of_values[group * kDecodeSlab + i / 2 * 8 + body.lane % 4 * 2 + i % 2]));
        }
        return largest;
    }

    // The largest power of two that is not greater than `largest`, but at most 2^126, so that its inverse is a normal float.
    static __device__ __forceinline__ float base_for(float largest) {
        return float_of(min(bits_of(largest) & 0x7f800000u, 0x7e800000u));
    }
    static __device__ __forceinline__ float inverse(float base) { return float_of(0x7f000000u - bits_of(base)); }

    __device__ __forceinline__ void raise_base(float largest) const {
        const float base = base_for(largest);
        multiply(body.value_base[0] / base);
        body.value_base[0] = base;
    }

    // Called after the last tile.
    __device__ __forceinline__ void finish() const {
        if (!body.params.v_scale.data) {
            if constexpr (kWeightScale != 1.0f) multiply(1.0f / kWeightScale);
            return;
        }
        if constexpr (Body::kHasRareOptions) {
            multiply_row(0, body.value_base[0]);
            multiply_row(1, body.value_base[1]);
        } else {
            multiply(body.value_base[0] / kWeightScale);
        }
    }

    __device__ __forceinline__ void multiply(float factor) const {
#pragma unroll
        for (int n = 0; n < Body::kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) body.o[n][e] *= factor;
    }
    __device__ __forceinline__ void multiply_row(int r, float factor) const {
#pragma unroll
        for (int n = 0; n < Body::kBlocks; ++n) body.o[n][2 * r] *= factor, body.o[n][2 * r + 1] *= factor;
    }
};

}  // namespace libflash::cuda::sm80
