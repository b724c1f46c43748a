// The two matrix products of the sm80 forward kernel for one tile of keys; row_pair.cuh has P V of two warps that share rows.
// `Body`: Forward in forward.cuh.
#pragma once

#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/split_product.cuh"

namespace libflash::cuda::sm80 {

template <class Body>
struct ForwardProducts {
    using T = typename Body::Element;
    using QTile = typename Body::QTile;
    using KvTile = typename Body::KvTile;
    static constexpr int kSlabs = Body::kSlabs, kKeyBlocks = Body::kKeyBlocks, kHeadDim = Body::kChannels;
    static constexpr int kBlockN = Body::kTileKeys, kSharers = Body::kRowSharers;
    static constexpr int kOwnSteps = kHeadDim / 8 / kSharers;  // float32: steps of 8 channels of this warp
    static constexpr bool kGeneral = Body::kRare;

    Body& body;

    // s = Q K^T. The fragments of the next 16 keys are loaded before the products with the current ones.
    __device__ __forceinline__ void multiply_qk() {
        const auto k_address =
            KvTile::b_address(body.k_smem() + body.part() * kKeyBlocks * 8 * KvTile::kRowBytes, hide_from_compiler(body.lane));
        constexpr int kPairs = kKeyBlocks / 2, kSteps = kHeadDim / 16;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) body.s[a][n][e] = 0.0f;
        // Fragments of Q are also loaded one step early if registers allow.
        constexpr int kAhead = kSlabs * kKeyBlocks * 4 < 128 ? 2 : 1;
        uint32_t qf[kAhead][kSlabs][4], kf[2][4];
#pragma unroll
        for (int a = 0; a < kSlabs; ++a) ldmatrix_x4(qf[0][a], body.q_address.at(a * 16, 0));
        ldmatrix_x4(kf[0], k_address.at(0, 0));
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
                const int t = step * kPairs + pair, next = t + 1;
                if (next < kPairs * kSteps) ldmatrix_x4(kf[next % 2], k_address.at(next % kPairs * 16, next / kPairs));
                if (pair == kPairs - 1 && kAhead == 1) continue;
                if (kAhead == 2 && pair == 0 && step + 1 < kSteps) load_q_fragments(qf[(step + 1) % kAhead], step + 1);
                multiply_pair(pair, qf[step % kAhead], kf[t % 2]);
            }
            if constexpr (kAhead == 1) {
                multiply_pair(kPairs - 1, qf[0], kf[(step * kPairs + kPairs - 1) % 2]);
                if (step + 1 < kSteps) load_q_fragments(qf[0], step + 1);
            }
        }
    }

    __device__ __forceinline__ void load_q_fragments(uint32_t (&qf)[kSlabs][4], int step) {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a) ldmatrix_x4(qf[a], body.q_address.at(a * 16, step));
    }

    __device__ __forceinline__ void multiply_pair(int pair, const uint32_t (&qf)[kSlabs][4], const uint32_t (&kf)[4]) {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a) {
            mma_m16n8k16(body.s[a][2 * pair], qf[a], kf[0], kf[1], T());
            mma_m16n8k16(body.s[a][2 * pair + 1], qf[a], kf[2], kf[3], T());
        }
    }

    // s = Q K^T for float32. If two warps have the same rows, each computes the part of the scores that its half of the channels
    // contributes.
    __device__ __forceinline__ void multiply_qk_split() {
        const int me = hide_from_compiler(body.lane);
        auto q_rows = QTile::a_address(body.q_smem(), body.warp_row(), me);
        auto k_address = KvTile::b_address(body.k_smem(), me);
        int channels = body.params.head_dim;
        if constexpr (kSharers == 2) {
            const int steps = hide_from_compiler(body.part()) * kOwnSteps;
            q_rows = QTile::template skip_columns<kOwnSteps>(q_rows, steps);
            k_address = KvTile::template skip_columns<kOwnSteps>(k_address, steps);
            channels -= steps * 8;
        }
        split_product<kSlabs == 1, kOwnSteps, kSharers == 2>(
            body.s, channels,
            [&](int step, uint32_t (&f)[kSlabs][4]) {
#pragma unroll
                for (int a = 0; a < kSlabs; ++a) ldmatrix_x4(f[a], q_rows.at(a * 16, step));
            },
            [&](int step, int pair, uint32_t (&f)[4]) { ldmatrix_x4(f, k_address.at(pair * 16, step)); });
    }

    // o += P V for float32, for this warp's channels, at most 32 keys at a time.
    __device__ __forceinline__ void multiply_pv_split(int tile) {
        auto v_rows = KvTile::row_pair(body.v_smem(), hide_from_compiler(body.lane));
        int channels = body.params.head_dim_v;
        if constexpr (kSharers == 2) {
            const int steps = hide_from_compiler(body.part()) * kOwnSteps;
            v_rows.even = KvTile::template skip_columns<kOwnSteps>(v_rows.even, steps);
            v_rows.odd = KvTile::template skip_columns<kOwnSteps>(v_rows.odd, steps);
            channels -= steps * 8;
        }
        constexpr int kSteps = kKeyBlocks < 4 ? kKeyBlocks : 4;
#pragma unroll
        for (int first = 0; first < kKeyBlocks; first += kSteps) {
            SplitRows<kSlabs> p[kSteps];
#pragma unroll
            for (int n = 0; n < kSteps; n += 2) {
                body.template exponentiate<1>(first + n, 0);
                if constexpr (kGeneral) {
                    if (body.params.rare.dropout.active) body.drop(first + n, tile);
                }
            }
#pragma unroll
            for (int n = 0; n < kSteps; ++n)
#pragma unroll
                for (int a = 0; a < kSlabs; ++a) p[n].split_columns(a, body.s[a][first + n]);
            add_split_product<kSlabs == 1>(body.o, p, channels, [&](int step, int block, uint32_t (&f)[2]) {
                v_rows.load((first + step) * 8, block, f[0], f[1]);
            });
        }
    }

    // o += P V. s holds scores. Every 16 columns are exponentiated just before their product or, if registers allow (kEarly),
    // during the product of the previous 16 columns.
    __device__ __forceinline__ void multiply_pv(int tile) {
        const auto v_address = KvTile::b_trans_address(body.v_smem(), hide_from_compiler(body.lane));
        constexpr int kPairs = kHeadDim / 16, kSteps = kBlockN / 16;
        uint32_t vf[2][4];
        ldmatrix_x4_trans(vf[0], v_address.at(0, 0));
        constexpr bool kEarly = kSlabs == 1 && !kGeneral;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (!kEarly || step == 0) body.template exponentiate<1>(2 * step, 0);
            uint32_t pf[kSlabs][4];
            if constexpr (kGeneral) {
                if (body.params.rare.dropout.active) body.drop(2 * step, tile);
            }
#pragma unroll
            for (int a = 0; a < kSlabs; ++a) to_fragment<T>(pf[a], body.s[a][2 * step], body.s[a][2 * step + 1]);
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
                const int t = step * kPairs + pair;
                if (t + 1 < kPairs * kSteps)
                    ldmatrix_x4_trans(vf[(t + 1) % 2], v_address.at((t + 1) / kPairs * 16, (t + 1) % kPairs));
                if (kEarly && step + 1 < kSteps) body.template exponentiate<kPairs>(2 * step + 2, pair);
#pragma unroll
                for (int a = 0; a < kSlabs; ++a) {
                    mma_m16n8k16(body.o[a][2 * pair], pf[a], vf[t % 2][0], vf[t % 2][1], T());
                    mma_m16n8k16(body.o[a][2 * pair + 1], pf[a], vf[t % 2][2], vf[t % 2][3], T());
                }
            }
        }
    }
};

}  // namespace libflash::cuda::sm80
