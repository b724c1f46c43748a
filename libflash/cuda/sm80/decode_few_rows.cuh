// The two products of decode for up to 8 query rows and 16 keys of a warp, from 8-bit codes in shared memory. Keys and channels
// are the rows of mma.sync, query rows its columns: S^T = K Q^T and O^T = V^T P^T. This takes half the instructions and registers
// of products of 16 query rows, 8 of which would be empty. S is transposed in registers to the layout of DecodeProducts. The
// products have the same steps of 16 channels and of 16 keys as DecodeProducts, so all sums have the same bits as with a cache of
// the type of the queries that holds the values of the codes.
//
// Half products: codes, including NaN, are converted to `half` in fewer instructions than to bfloat16. So bfloat16 queries and
// weights are converted to `half`, too, where this is exact and no number becomes subnormal: queries times a power of two that is
// the same for all rows of the warp, weights times kWeightScale. Otherwise all operands are bfloat16. The results have the same
// bits in both cases.
#pragma once

#include "cuda/attention/cache_codes.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/ptx/movmatrix.cuh"
#include "cuda/sm80/decode_code_products.cuh"
#include "cuda/tile/shared_tile.cuh"

#include <type_traits>

namespace libflash::cuda::sm80 {

// Whether products with bfloat16 queries may use `half`.
constexpr bool kHasHalfProducts = true;

template <class T, int kHeadDim>
struct DecodeFewRows {
    using Slab = CodeSlab<kHeadDim>;
    template <int kRows>
    using Tile = SharedTile<kRows, kHeadDim>;
    static constexpr int kSteps = kHeadDim / 16, kTiles = kHeadDim / 16;
    static constexpr bool kMayBeHalf = std::is_same_v<T, __nv_bfloat16> && kHasHalfProducts;
    // The factor of weights (P times the scale of the value divided by the base). A weight is at most a little more than 2^9 or,
    // with a scale near the largest float, 2^10; `half` can represent 2^5 times as much. With the factor, weights of at least
    // 2^-19 do not become subnormal.
    static constexpr float kWeightScale = kMayBeHalf ? 32.0f : 1.0f;
    // GPUs from sm_90 on add up the 16 products of an instruction at once, so the order of the channels in a step does not
    // matter, and the four codes of a lane can be neighbours. Older GPUs add up 8 products at a time.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    static constexpr bool kNeighbours = true;
#else
    static constexpr bool kNeighbours = false;
#endif

    uint32_t qf[kSteps][2];
    bool half_queries;  // with kMayBeHalf
    float of_queries;   // with half_queries: the factor for the scores

    // `q`: 8 rows in shared memory.
    __device__ __forceinline__ void load_queries(const char* q, int lane) {
        const int row = lane / 4, t = lane % 4;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const auto pair_at = [&](int channel) {
                return *reinterpret_cast<const uint32_t*>(q + Tile<8>::offset(row, channel / 8) + channel % 8 * 2);
            };
            qf[step][0] = pair_at(step * 16 + (kNeighbours ? 4 * t : 2 * t));
            qf[step][1] = pair_at(step * 16 + (kNeighbours ? 4 * t + 2 : 2 * t + 8));
        }
        if constexpr (kMayBeHalf) find_half_queries();
    }

    // Decides whether the queries are multiplied as `half`, and converts them. The bits of the magnitudes are compared as
    // integers, two at a time. 2^15 minus a magnitude is largest for the smallest magnitude, and negative for 0, which does not
    // count.
    __device__ __forceinline__ void find_half_queries() {
        uint32_t most = 0, least = 0x80008000u;
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
            const uint32_t magnitudes = qf[i / 2][i % 2] & 0x7fff7fffu;
            most = __vmaxs2(most, magnitudes), least = __vmaxs2(least, 0x80008000u - magnitudes);
        }
        const auto largest = [](uint32_t pair) {
            const int bits = static_cast<int>(pair);
            return __reduce_max_sync(0xffffffffu, max(bits >> 16, static_cast<int>(static_cast<int16_t>(pair))));
        };
        const int high = largest(most) >> 7, low = (0x8000 - largest(least)) >> 7;
        // `high` and `low` are the exponents, with the bias 127, of the largest and the smallest magnitude. The factor makes the
        // largest exponent 15, so the smallest is at least -14. The limits of `high` ensure that the product of a query and a
        // code is a normal float with and without the factor.
        half_queries = high >= 127 - 60 && high <= 127 + 60 && high - low <= 29;
        if (!half_queries) return;
        const float factor = float_of(static_cast<uint32_t>(127 + 127 + 15 - high) << 23);
        of_queries = float_of(static_cast<uint32_t>(high - 15) << 23);
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
            uint32_t& pair = qf[i / 2][i % 2];
            pair = pack_pair(low_of(pair, T()) * factor, high_of(pair, T()) * factor, __half());
        }
    }

    // s = Q K^T.
    template <CodeType kCode>
    __device__ __forceinline__ void scores(float (&s)[2][4], const char* keys, int lane) const {
        float sums[4];
        if (kMayBeHalf && half_queries) {
            add_keys<kCode>(sums, keys, lane, __half());
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[e] *= of_queries;
        } else {
            add_keys<kCode>(sums, keys, lane, T());
        }
        transpose(s, sums);
    }

    // The products of keys `lane / 4` and `lane / 4 + 8` with two query rows. Even and odd steps have separate accumulators, as
    // in DecodeProducts.
    template <CodeType kCode, class Number>
    __device__ __forceinline__ void add_keys(float (&even)[4], const char* keys, int lane, Number) const {
        const int key = lane % 16, first = Slab::offset(key, lane / 16);
        float odd[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) even[e] = odd[e] = 0.0f;
#pragma unroll
        for (int step = 0; step < kSteps; step += 2) {
            uint32_t a[2][4];
            if constexpr (kNeighbours) {
                uint32_t codes[4];  // keys 0 to 7 and 8 to 15 of 16 channels, then of the next ones
                ldmatrix_x4(codes, shared_address(keys + (first ^ step * 16)));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    a[i / 2][i % 2] = values_of_codes<kCode, 0>(codes[i], Number());
                    a[i / 2][i % 2 + 2] = values_of_codes<kCode, 1>(codes[i], Number());
                }
            } else {
                const int in_row = Slab::offset(lane / 4, 0) + lane % 4 * 2;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int at = (in_row ^ (step + i / 4) * 16) + i % 2 * 8 * kHeadDim + i / 2 % 2 * 8;
                    a[i / 4][i % 4] = values_of_codes<kCode, 0>(*reinterpret_cast<const uint16_t*>(keys + at), Number());
                }
            }
            mma_m16n8k16(even, a[0], qf[step][0], qf[step][1], Number());
            mma_m16n8k16(odd, a[1], qf[step + 1][0], qf[step + 1][1], Number());
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) even[e] += odd[e];
    }

    // With t = lane % 4: `sums` has (key lane / 4, query rows 2t and 2t + 1), then (key lane / 4 + 8, the same rows). `s` gets
    // (query row lane / 4, keys 2t and 2t + 1), then (the same row, keys 2t + 8 and 2t + 9).
    static __device__ __forceinline__ void transpose(float (&s)[2][4], const float (&sums)[4]) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const uint32_t left = bits_of(sums[2 * n]), right = bits_of(sums[2 * n + 1]);
            const uint32_t low = transpose_matrix(select_bytes(left, right, 0x5410)),
                           high = transpose_matrix(select_bytes(left, right, 0x7632));
            s[n][0] = float_of(select_bytes(low, high, 0x5410));
            s[n][1] = float_of(select_bytes(low, high, 0x7632));
        }
    }

    // o += V^T P^T. p: P times kWeightScale.
    template <CodeType kCode>
    static __device__ __forceinline__ void add_values(float (&o)[kTiles][4], const float (&p)[2][4], const char* values,
                                                      int lane) {
        uint32_t pf[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) pf[n] = pack_pair(p[n][0], p[n][1], T());
        if constexpr (kMayBeHalf) {
            float smallest = INFINITY;
            uint32_t halves[2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float low = low_of(pf[n], T()), high = high_of(pf[n], T());
                smallest = fminf(smallest, fminf(fabsf(low), fabsf(high)));
                halves[n] = pack_pair(low, high, __half());
            }
            if (!__any_sync(0xffffffffu, !(smallest >= 0x1p-14f))) return add_weighted<kCode>(o, halves, values, lane, __half());
        }
        add_weighted<kCode>(o, pf, values, lane, T());
    }

    // ldmatrix.trans transposes pairs of bytes, so a register holds codes of two channels and two keys. Of each 16 channels the
    // even ones are rows 0 to 7 of a product and the odd ones rows 8 to 15.
    template <CodeType kCode, class Number>
    static __device__ __forceinline__ void add_weighted(float (&o)[kTiles][4], const uint32_t (&p)[2], const char* values,
                                                        int lane, Number) {
        const int key = lane % 16, first = Slab::offset(key, lane / 16);
#pragma unroll
        for (int chunk = 0; chunk < kTiles; chunk += 2) {
            uint32_t codes[4];  // keys 0 to 7 and 8 to 15 of a chunk, then of the next one
            ldmatrix_x4_trans(codes, shared_address(values + (first ^ chunk * 16)));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t low = codes[2 * i], high = codes[2 * i + 1];
                const uint32_t a[4] = {
                    values_of_every_second<kCode, 0>(low, Number()), values_of_every_second<kCode, 1>(low, Number()),
                    values_of_every_second<kCode, 0>(high, Number()), values_of_every_second<kCode, 1>(high, Number())};
                mma_m16n8k16(o[chunk + i], a, p[0], p[1], Number());
            }
        }
    }

    // o[n][e] is channel first_channel(n, lane) + e / 2 of query row lane % 4 * 2 + e % 2.
    static __device__ __forceinline__ int first_channel(int n, int lane) { return n * 16 + lane / 4 * 2; }
};

}  // namespace libflash::cuda::sm80
