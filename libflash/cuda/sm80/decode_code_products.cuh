// The two products of decode for 16 query rows and 16 keys of a warp, from 8-bit codes in shared memory. Codes are converted to
// operands of mma.sync in registers. Fragments hold the same numbers in the same places as those of DecodeProducts, so all sums
// have the same bits as with a cache of the type of the queries that holds the values of the codes.
#pragma once

#include "cuda/attention/cache_codes.cuh"
#include "cuda/attention/decode_params.h"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/tile/product.cuh"

namespace libflash::cuda::sm80 {

// The layout of the codes of 16 keys or values in shared memory. Chunks of 16 codes are permuted within 128 bytes, so that the
// same chunk of eight rows is in eight different groups of four banks.
template <int kHeadDim>
struct CodeSlab {
    static __device__ __forceinline__ int swizzle(int row) { return kHeadDim == 64 ? row / 2 % 4 : row % 8; }
    static __device__ __forceinline__ int offset(int row, int chunk) { return row * kHeadDim + (chunk ^ swizzle(row)) * 16; }
};

template <class T, int kHeadDim>
struct DecodeCodeProducts {
    using Slab = CodeSlab<kHeadDim>;
    static_assert(kHeadDim == 64 || kHeadDim % 128 == 0);
    static constexpr int kSteps = kHeadDim / 16;

    // s = Q K^T. q_of(step): the fragment of Q.
    template <CodeType kCode, class QueriesOf>
    static __device__ __forceinline__ void scores(float (&s)[2][4], const char* keys, int lane, const QueriesOf& q_of) {
        const int row = lane / 4, first = Slab::offset(row, 0) + lane % 4 * 2;
        float odd[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = odd[n][e] = 0.0f;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const char* const from = keys + (first ^ step * 16);
            const auto& q = q_of(step);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const auto pair_at = [&](int at) {
                    const uint32_t codes = *reinterpret_cast<const uint16_t*>(from + n * 8 * kHeadDim + at);
                    return values_of_codes<kCode, 0>(codes, T());
                };
                mma_m16n8k16((step % 2 ? odd : s)[n], q, pair_at(0), pair_at(8), T());
            }
        }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] += odd[n][e];
    }

    // o += P V. ldmatrix.trans transposes pairs of bytes, so a register holds codes of two channels and two keys. Of each 16
    // channels the even ones are the columns of a block of o, and the odd ones those of the next block: first_channel().
    template <CodeType kCode>
    static __device__ __forceinline__ void add_values(float (&o)[kHeadDim / 8][4], const float (&p)[2][4], const char* values,
                                                      int lane) {
        const int key = lane / 8 % 2 * 8 + lane % 8, first = Slab::offset(key, lane / 16);
        uint32_t pf[4];
        to_fragment<T>(pf, p[0], p[1]);
#pragma unroll
        for (int chunk = 0; chunk < kSteps; chunk += 2) {
            uint32_t codes[4];  // keys 0 to 7 and 8 to 15 of a chunk, then of the next one
            ldmatrix_x4_trans(codes, shared_address(values + (first ^ chunk * 16)));
#pragma unroll
            for (int i = 0; i < 4; ++i) codes[i] = select_bytes(codes[i], 0, 0x3120);  // ordered by channel
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float (&even)[4] = o[2 * (chunk + i)], (&odd)[4] = o[2 * (chunk + i) + 1];
                const uint32_t low = codes[2 * i], high = codes[2 * i + 1];
                mma_m16n8k16(even, pf, values_of_codes<kCode, 0>(low, T()), values_of_codes<kCode, 0>(high, T()), T());
                mma_m16n8k16(odd, pf, values_of_codes<kCode, 1>(low, T()), values_of_codes<kCode, 1>(high, T()), T());
            }
        }
    }

    // o[n][e] and o[n + 1][e], n even, are channels first_channel(n, lane) + e % 2 * 2 and the next one.
    static __device__ __forceinline__ int first_channel(int n, int lane) { return n * 8 + lane % 4 * 4; }
};

}  // namespace libflash::cuda::sm80
