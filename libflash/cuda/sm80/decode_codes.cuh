// Decode over a cache of 8-bit codes: a stage holds codes. The type of the queries represents the value of every code exactly, so
// all products have the same bits as with a cache of that type that holds the values. Where each warp works on the keys that it
// loaded, codes become operands of the products in registers (decode_code_products.cuh; with few query rows decode_few_rows.cuh).
// Where warps share keys, and with rare options, each warp converts the 16 keys and values that it loaded through shared memory
// before a tile is used. With wide heads each of two warps converts half of the keys, and later half of the values.
// decode_scales.cuh has the scales. `Body`: Decode in decode_range.cuh.
#pragma once

#include "cuda/attention/cache_codes.cuh"
#include "cuda/attention/decode_params.h"
#include "cuda/sm80/decode_code_products.cuh"

#include <type_traits>

namespace libflash::cuda::sm80 {

template <class Body>
struct DecodeCodes {
    using T = typename Body::Element;
    using Slab = typename Body::Slab;
    static constexpr int kHeadDim = Body::kChannels, kChunks = kHeadDim / 16;  // chunks of 16 codes of a row
    static constexpr int kParts = Body::kParts, kWarps = Body::kThreads / 32 / kParts;

    Body& body;

    template <CodeType kCode>
    __device__ __forceinline__ void convert_slab(const char* from, char* to) const {
        constexpr int kRounds = kDecodeSlab * kChunks / 32;
        if constexpr (kParts > 1) {
#pragma unroll 1
            for (int i = body.part(); i < kRounds; i += kParts) convert_chunks<kCode>(from, to, i);
        } else {
#pragma unroll
            for (int i = 0; i < kRounds; ++i) convert_chunks<kCode>(from, to, i);
        }
    }
    // Eight lanes process four chunks of an even row and four chunks of an odd row. The chunks that they write together have the
    // same parity, but the swizzle changes the parity in the odd row, so that there are no bank conflicts.
    template <CodeType kCode>
    __device__ __forceinline__ void convert_chunks(const char* from, char* to, int round) const {
        const int eighth = round * 4 + body.lane / 8, row = eighth / (kChunks / 4) * 2 + body.lane / 4 % 2,
                  chunk = eighth % (kChunks / 4) * 4 + body.lane % 4;
        const uint4 codes = *reinterpret_cast<const uint4*>(from + Body::stored_offset(row, chunk));
        uint4 low, high;
        widen_codes<kCode>(codes, low, high, T());
        *reinterpret_cast<uint4*>(to + Slab::offset(row, 2 * chunk)) = low;
        *reinterpret_cast<uint4*>(to + Slab::offset(row, 2 * chunk + 1)) = high;
    }

    // Copies the channels of k_rope_cache, which are not codes, to the end of the converted keys, where the conversion has
    // written zeros.
    __device__ __forceinline__ void copy_rope(const char* from, char* to) const {
        constexpr int kRopeChunks = Body::kRopeChannels / 8;
        const int first = body.params.k_channels / 8, chunks = (body.params.rope.channels + 7) / 8;
        Body::synchronize_parts();
        for (int i = body.part() * 32 + body.lane; i < kDecodeSlab * chunks; i += kParts * 32) {
            const int row = i / chunks, chunk = i % chunks;
            *reinterpret_cast<uint4*>(to + Slab::offset(row, first + chunk)) =
                *reinterpret_cast<const uint4*>(from + (row * kRopeChunks + chunk) * 16);
        }
    }

    // Calls do_with with the type of the codes as an integral_constant.
    template <class DoWith>
    __device__ __forceinline__ void with_type(const DoWith& do_with) const {
        switch (body.params.code) {
            case CodeType::e4m3: do_with(std::integral_constant<CodeType, CodeType::e4m3>()); break;
            case CodeType::e5m2: do_with(std::integral_constant<CodeType, CodeType::e5m2>()); break;
            default: do_with(std::integral_constant<CodeType, CodeType::int8>());
        }
    }

    // Converts the keys and values that this warp loaded; with kConvertsInTurn only the keys. The caller waits for the loads
    // before and synchronises the warps after it.
    __device__ __forceinline__ void convert(int stage) const {
        if (body.existing(stage, body.warp) == 0) return;
        with_type([&](auto code) {
#pragma unroll 1
            for (int slab = body.warp; slab < (Body::kConvertsInTurn ? 1 : 2) * kWarps; slab += kWarps)  // of keys, of values
                convert_slab<decltype(code)::value>(body.stored_keys(stage, slab), body.keys(stage, slab));
        });
        if constexpr (Body::kHasRareOptions) {
            if (body.params.rope.channels > 0) copy_rope(body.stored_rope(stage, body.warp), body.keys(stage, body.warp));
        }
    }

    // With kConvertsInTurn: converts the values, after the products with the keys, and overwrites the converted keys.
    __device__ __forceinline__ void convert_values(int stage) const {
        if (body.params.values_in_keys) return;
        Body::synchronize_parts();
        with_type([&](auto code) {
            convert_slab<decltype(code)::value>(body.stored_values(stage, body.warp), body.values(stage, body.warp));
        });
        Body::synchronize_parts();
    }

    // The products with 16 keys or values, from codes in a stage.
    using Products = std::conditional_t<Body::kHasFewRows, typename Body::Products, DecodeCodeProducts<T, kHeadDim>>;
    __device__ __forceinline__ void multiply_keys(int stage, int group) const {
        const char* const keys = body.stored_keys(stage, group);
        with_type([&](auto code) {
            if constexpr (Body::kHasFewRows) {
                body.products.template scores<decltype(code)::value>(body.s, keys, body.lane);
            } else {
                const auto q_of = [&](int step) -> const uint32_t (&)[4] { return body.products.query_fragment(step); };
                Products::template scores<decltype(code)::value>(body.s, keys, body.lane, q_of);
            }
        });
    }
    __device__ __forceinline__ void add_values(int stage, int group) const {
        with_type([&](auto code) {
            Products::template add_values<decltype(code)::value>(body.o, body.s, body.stored_values(stage, group), body.lane);
        });
    }
};

}  // namespace libflash::cuda::sm80
