// Decode over a cache of 8-bit codes: a stage holds codes; before a tile is used each warp converts the 16 keys and values that
// it loaded to the type of the queries. Every value is exact, so all products have the bits of a cache of that type with the same
// values. decode_scales.cuh has the scales. `Body`: Decode in decode_range.cuh.
#pragma once

#include "cuda/attention/cache_codes.cuh"
#include "cuda/attention/decode_params.h"

#include <type_traits>

namespace libflash::cuda::sm80 {

template <class Body>
struct DecodeCodes {
    using T = typename Body::Element;
    using Slab = typename Body::Slab;
    static constexpr int kHeadDim = Body::kChannels, kChunks = kHeadDim / 16;  // of 16 codes

    Body& body;

    template <CodeType kCode>
    __device__ __forceinline__ void convert_slab(const char* from, char* to) const {
        constexpr int kRounds = kDecodeSlab * kChunks / 32;
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            // Eight lanes take four chunks of an even and an odd row. They write chunks of the same parity, which the swizzle of
            // the odd row turns into the other one, so that there are no bank conflicts.
            const int eighth = i * 4 + body.lane / 8, row = eighth / (kChunks / 4) * 2 + body.lane / 4 % 2,
                      chunk = eighth % (kChunks / 4) * 4 + body.lane % 4;
            const uint4 codes = *reinterpret_cast<const uint4*>(from + Body::stored_offset(row, chunk));
            uint4 low, high;
            widen_codes<kCode>(codes, low, high, T());
            *reinterpret_cast<uint4*>(to + Slab::offset(row, 2 * chunk)) = low;
            *reinterpret_cast<uint4*>(to + Slab::offset(row, 2 * chunk + 1)) = high;
        }
    }

    // The last channels of the keys are no codes: after those of the tile, which are zeros there.
    __device__ __forceinline__ void copy_rope(const char* from, char* to) const {
        constexpr int kRopeChunks = Body::kRopeChannels / 8;
        const int first = body.params.k_channels / 8, chunks = (body.params.rope.channels + 7) / 8;
        __syncwarp();
        for (int i = body.lane; i < kDecodeSlab * chunks; i += 32) {
            const int row = i / chunks, chunk = i % chunks;
            *reinterpret_cast<uint4*>(to + Slab::offset(row, first + chunk)) =
                *reinterpret_cast<const uint4*>(from + (row * kRopeChunks + chunk) * 16);
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
            case CodeType::e4m3: both(std::integral_constant<CodeType, CodeType::e4m3>()); break;
            case CodeType::e5m2: both(std::integral_constant<CodeType, CodeType::e5m2>()); break;
            default: both(std::integral_constant<CodeType, CodeType::int8>());
        }
        if constexpr (Body::kHasRareOptions) {
            if (body.params.rope.channels > 0) copy_rope(body.stored_rope(stage, body.warp), body.keys(stage, body.warp));
        }
    }
};

}  // namespace libflash::cuda::sm80
