// The two products of decode for 16 query rows and 16 keys of a warp. For all types scores and sums have the layout of mma
// accumulators: lane 4 * g + t has rows g and g + 8 (elements 0, 1 and 2, 3) and columns 2t, 2t + 1 of each block of 8.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace libflash::cuda::sm80 {

// Scores as sums over groups of channels. After the last step of a group, multiply(part, group) may change the sum of the group,
// which is then added to `all`.
struct SumOfGroups {
    float (&all)[2][4];
    const int steps;  // of a group
    float part[2][4];
    int left, group;

    __device__ __forceinline__ SumOfGroups(float (&sum)[2][4], int of_group)
        : all(sum), steps(of_group), part{}, left(of_group), group(0) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) all[n][e] = 0.0f;
    }
    template <class Multiply>
    __device__ __forceinline__ void end_step(bool last, const Multiply& multiply) {
        if (--left > 0 && !last) return;
        multiply(part, group++);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) all[n][e] += part[n][e], part[n][e] = 0.0f;
        left = steps;
    }
};

// 16-bit types: mma.sync. The values have kValueDim channels, of which a warp has one of kParts parts.
template <class T, int kHeadDim, int kValueDim = kHeadDim, int kParts = 1>
struct DecodeProducts {
    static constexpr int kSteps = kHeadDim / 16, kValueSteps = kValueDim / 16 / kParts;
    using Sums = float[2 * kValueSteps][4];
    template <int kRows>
    using Tile = SharedTile<kRows, kHeadDim>;
    static constexpr bool kKept = kHeadDim <= 128;  // fragments of Q stay in registers

    uint32_t qf[kKept ? kSteps : 1][4];
    typename Tile<16>::LaneAddress q_address;

    // `q`: the warp's 16 rows in shared memory, which must stay there.
    __device__ __forceinline__ void load_queries(const char* q, int lane) {
        q_address = Tile<16>::a_address(shared_address(q), 0, lane);
        if constexpr (kKept) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) ldmatrix_x4(qf[step], q_address.at(0, step));
        }
    }

    __device__ __forceinline__ const uint32_t (&query_fragment(int step))[4] {
        if constexpr (!kKept) ldmatrix_x4(qf[0], q_address.at(0, step));
        return qf[kKept ? step : 0];
    }

    // s = Q K^T for 16 keys. Even and odd steps have separate accumulators, which halves the chain of dependent instructions.
    __device__ __forceinline__ void scores(float (&s)[2][4], const char* keys, int lane) {
        float odd[2][4];
        begin_scores(s, odd, keys, lane);
        end_scores(s, odd);
    }
    // The same in two parts, so that other instructions between them hide the latency of the products.
    __device__ __forceinline__ void begin_scores(float (&s)[2][4], float (&odd)[2][4], const char* keys, int lane) {
        const auto address = Tile<16>::b_address(shared_address(keys), lane);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = odd[n][e] = 0.0f;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t kf[4];
            ldmatrix_x4(kf, address.at(0, step));
            const auto& q = query_fragment(step);
            auto& sums = step % 2 ? odd : s;
            mma_m16n8k16(sums[0], q, kf[0], kf[1], T());
            mma_m16n8k16(sums[1], q, kf[2], kf[3], T());
        }
    }
    static __device__ __forceinline__ void end_scores(float (&s)[2][4], const float (&odd)[2][4]) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] += odd[n][e];
    }

    // scores() with one accumulator: the order in which wgmma adds.
    __device__ __forceinline__ void scores_in_order(float (&s)[2][4], const char* keys, int lane) {
        const auto address = Tile<16>::b_address(shared_address(keys), lane);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t kf[4];
            ldmatrix_x4(kf, address.at(0, step));
            const auto& q = query_fragment(step);
            mma_m16n8k16(s[0], q, kf[0], kf[1], T());
            mma_m16n8k16(s[1], q, kf[2], kf[3], T());
        }
    }

    // scores() with a sum for each group of 16 * `steps` channels, which multiply(part, group) may change.
    template <class Multiply>
    __device__ __forceinline__ void scores_of_groups(float (&s)[2][4], const char* keys, int lane, int steps,
                                                     const Multiply& multiply) {
        const auto address = Tile<16>::b_address(shared_address(keys), lane);
        SumOfGroups sum(s, steps);
        const auto add_step = [&](int step) {
            uint32_t kf[4];
            ldmatrix_x4(kf, address.at(0, step));
            const auto& q = query_fragment(step);
            mma_m16n8k16(sum.part[0], q, kf[0], kf[1], T());
            mma_m16n8k16(sum.part[1], q, kf[2], kf[3], T());
            sum.end_step(step == kSteps - 1, multiply);
        };
        if constexpr (kParts > 1) {  // unrolled completely, the code would be large
#pragma unroll 4
            for (int step = 0; step < kSteps; ++step) add_step(step);
        } else {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) add_step(step);
        }
    }

    // o += P V.
    __device__ __forceinline__ void add_values(Sums& o, const float (&p)[2][4], const char* values, int lane, int part = 0) {
        uint32_t pf[4];
        to_fragment<T>(pf, p[0], p[1]);
        add_values(o, pf, values, lane, part);
    }
    __device__ static __forceinline__ void add_values(Sums& o, const uint32_t (&pf)[4], const char* values, int lane, int part) {
        auto address = Tile<16>::b_trans_address(shared_address(values), lane);
        if constexpr (kParts > 1) address = Tile<16>::template skip_columns<kValueSteps>(address, part * kValueSteps);
#pragma unroll
        for (int pair = 0; pair < kValueSteps; ++pair) {
            uint32_t vf[4];
            ldmatrix_x4_trans(vf, address.at(0, pair));
            mma_m16n8k16(o[2 * pair], pf, vf[0], vf[1], T());
            mma_m16n8k16(o[2 * pair + 1], pf, vf[2], vf[3], T());
        }
    }

    // add_values() with P times weight(group, key, r) for each group of 16 * `steps` channels; r: which of the lane's two rows.
    template <class Weight>
    __device__ __forceinline__ void add_values_of_groups(Sums& o, const float (&p)[2][4], const char* values, int lane, int steps,
                                                         const Weight& weight, int part) {
        auto address = Tile<16>::b_trans_address(shared_address(values), lane);
        uint32_t pf[4] = {};
        int left = 0, group = 0, passed = 0;  // passed: steps of the first group that belong to another part
        if constexpr (kParts > 1) {
            address = Tile<16>::template skip_columns<kValueSteps>(address, part * kValueSteps);
            group = part * kValueSteps / steps, passed = part * kValueSteps - group * steps;
        }
#pragma unroll
        for (int pair = 0; pair < kValueSteps; ++pair) {
            if (left-- == 0) {
                float weighted[2][4];
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) weighted[n][e] = p[n][e] * weight(group, 8 * n + lane % 4 * 2 + e % 2, e / 2);
                to_fragment<T>(pf, weighted[0], weighted[1]);
                left = steps - 1 - passed, ++group, passed = 0;
            }
            uint32_t vf[4];
            ldmatrix_x4_trans(vf, address.at(0, pair));
            mma_m16n8k16(o[2 * pair], pf, vf[0], vf[1], T());
            mma_m16n8k16(o[2 * pair + 1], pf, vf[2], vf[3], T());
        }
    }
};

// float32: fused multiply-adds, in full precision. With few rows memory bandwidth still limits the speed.
template <int kHeadDim, int kValueDim, int kParts>
struct DecodeProducts<float, kHeadDim, kValueDim, kParts> {
    static constexpr int kBlocks = kValueDim / 8 / kParts;
    using Sums = float[kBlocks][4];
    template <int kRows>
    using Tile = SharedTile<kRows, 2 * kHeadDim>;

    const char* q;

    __device__ __forceinline__ void load_queries(const char* rows, int) { q = rows; }

    __device__ static __forceinline__ float4 chunk_of(const char* tile, int row, int chunk) {
        return *reinterpret_cast<const float4*>(tile + Tile<16>::offset(row, chunk));
    }
    __device__ static __forceinline__ void add_dot(float& sum, float4 a, float4 b) {
        sum = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
    }

    // s += Q K^T for four channels.
    __device__ __forceinline__ void add_chunk(float (&s)[2][4], const char* keys, int lane, int chunk) const {
        const int g = lane / 4, t = lane % 4;
        const float4 low = chunk_of(q, g, chunk), high = chunk_of(q, g + 8, chunk);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float4 key = chunk_of(keys, 8 * n + 2 * t + e, chunk);
                add_dot(s[n][e], low, key);
                add_dot(s[n][2 + e], high, key);
            }
    }
    // With wide heads the sums of 32 channels each are added up: a single chain of additions would be less accurate.
    __device__ __forceinline__ void scores(float (&s)[2][4], const char* keys, int lane) {
        if constexpr (kHeadDim > 256) {
            scores_of_groups(s, keys, lane, 2, [](const auto&, int) {});
        } else {
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
#pragma unroll(kHeadDim <= 128 ? 2 : 1)
            for (int chunk = 0; chunk < kHeadDim / 4; ++chunk) add_chunk(s, keys, lane, chunk);
        }
    }

    template <class Multiply>
    __device__ __forceinline__ void scores_of_groups(float (&s)[2][4], const char* keys, int lane, int steps,
                                                     const Multiply& multiply) {
        // The groups of wide heads are divided into sums of 16 or 32 channels.
        const int of_sum = kHeadDim <= 256 ? steps : steps % 2 == 0 ? 2 : 1;
        SumOfGroups sum(s, of_sum);
        int group = 0, left = steps;
        const auto multiply_sum = [&](auto& part, int) {
            multiply(part, group);
            left -= of_sum;
            if (left <= 0) left = steps, ++group;
        };
#pragma unroll 1
        for (int chunk = 0; chunk < kHeadDim / 4; ++chunk) {
            add_chunk(sum.part, keys, lane, chunk);
            if (chunk % 4 == 3) sum.end_step(chunk == kHeadDim / 4 - 1, multiply_sum);
        }
    }

    // The lane's two values of a key in block n of the warp's part of the channels.
    static __device__ __forceinline__ float2 value_pair(const char* values, int key, int n, int part, int t) {
        return *reinterpret_cast<const float2*>(values + Tile<16>::offset(key, 2 * (part * kBlocks + n) + t / 2) + t % 2 * 8);
    }
    static constexpr int kUnrolledKeys = kParts > 1 ? 1 : 4;  // unrolled completely, the code of wide heads would be large
    // The i-th of the lane's four probabilities in row r.
    static __device__ __forceinline__ float probability(const float (&p)[2][4], int i, int r) {
        return i < 2 ? (i == 0 ? p[0][2 * r] : p[0][2 * r + 1]) : (i == 2 ? p[1][2 * r] : p[1][2 * r + 1]);
    }

    __device__ __forceinline__ void add_values(Sums& o, const float (&p)[2][4], const char* values, int lane, int part = 0) {
        const int t = lane % 4;
#pragma unroll(kUnrolledKeys)
        for (int i = 0; i < 4; ++i) {
            // Order of keys: 0, 2, 4, 6 of the first block, then 1, 3, 5, 7, then the second block. Lane `owner` of the four has
            // the scores.
#pragma unroll 1
            for (int owner = 0; owner < 4; ++owner) {
                const int key = i / 2 * 8 + owner * 2 + i % 2, from = (lane & ~3) + owner;
                const float low = __shfl_sync(0xffffffffu, probability(p, i, 0), from);
                const float high = __shfl_sync(0xffffffffu, probability(p, i, 1), from);
#pragma unroll
                for (int n = 0; n < kBlocks; ++n) {
                    const float2 v = value_pair(values, key, n, part, t);
                    o[n][0] = fmaf(low, v.x, o[n][0]);
                    o[n][1] = fmaf(low, v.y, o[n][1]);
                    o[n][2] = fmaf(high, v.x, o[n][2]);
                    o[n][3] = fmaf(high, v.y, o[n][3]);
                }
            }
        }
    }

    template <class Weight>
    __device__ __forceinline__ void add_values_of_groups(Sums& o, const float (&p)[2][4], const char* values, int lane, int steps,
                                                         const Weight& weight, int part = 0) {
        const int t = lane % 4, first_group = part * kBlocks / (2 * steps), passed = part * kBlocks - first_group * 2 * steps;
#pragma unroll(kUnrolledKeys)
        for (int i = 0; i < 4; ++i) {
#pragma unroll 1
            for (int owner = 0; owner < 4; ++owner) {
                const int key = i / 2 * 8 + owner * 2 + i % 2, from = (lane & ~3) + owner;
                const float low = __shfl_sync(0xffffffffu, probability(p, i, 0), from);
                const float high = __shfl_sync(0xffffffffu, probability(p, i, 1), from);
                float low_weight = 0.0f, high_weight = 0.0f;
                int left = 0, group = first_group;
#pragma unroll
                for (int n = 0; n < kBlocks; ++n) {
                    if (left-- == 0) {
                        low_weight = low * weight(group, key, 0), high_weight = high * weight(group, key, 1);
                        left = 2 * steps - 1 - (n == 0 ? passed : 0), ++group;
                    }
                    const float2 v = value_pair(values, key, n, part, t);
                    o[n][0] = fmaf(low_weight, v.x, o[n][0]);
                    o[n][1] = fmaf(low_weight, v.y, o[n][1]);
                    o[n][2] = fmaf(high_weight, v.x, o[n][2]);
                    o[n][3] = fmaf(high_weight, v.y, o[n][3]);
                }
            }
        }
    }
};

}  // namespace libflash::cuda::sm80
