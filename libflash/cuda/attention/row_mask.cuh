// The boolean mask of the scores of a lane, in the layout of tile/accumulator.cuh: columns are keys. The four lanes that share
// the rows load a quarter of the keys each, and exchange bits.
#pragma once

#include "cuda/attention/mask_bytes.cuh"

namespace libflash::cuda {

// A bit for each score of a lane: whether the mask hides it.
template <int kKeys>
struct RowMaskBits {
    static_assert(kKeys == 64 || kKeys == 128, "a lane loads 16 keys of both rows, or of one row twice 16");
    static constexpr bool kWordOfRow = kKeys == 128;
    uint32_t words[kWordOfRow ? 2 : 1];

    // Whether load() can: all keys exist, and rows begin at multiples of 4 bytes.
    __device__ __forceinline__ static bool loads(const MaskRows& mask) { return mask.loads(kKeys, 4); }
    // `row`: the lane's first row; row r is 8 r after it. Rows that do not exist hide nothing. The whole warp calls it.
    __device__ __forceinline__ void load(const MaskRows& mask, int row, int lane) {
        const bool whole = mask.loads(kKeys, 16);
        take(lane, [&](int r, int key) {
            if (row + 8 * r >= mask.rows) return make_uint4(~0u, ~0u, ~0u, ~0u);
            return load_mask_bytes(mask.first + (row + 8 * r) * mask.row_stride + key, whole);
        });
    }
    // bytes_of(r, key): 16 bytes of row r, from this key on. The whole warp calls it.
    template <class BytesOf>
    __device__ __forceinline__ void take(int lane, const BytesOf& bytes_of) {
        constexpr int kPieces = kKeys / 64;
        uint4 pieces[2][kPieces];
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int i = 0; i < kPieces; ++i) pieces[r][i] = bytes_of(r, 64 * i + (lane & 3) * 16);
        if constexpr (kWordOfRow) {
            words[0] = of_lane(hidden_keys(pieces[0][0]) | hidden_keys(pieces[0][1]) << 4, lane);
            words[1] = of_lane(hidden_keys(pieces[1][0]) | hidden_keys(pieces[1][1]) << 4, lane);
        } else {
            words[0] = of_lane(hidden_keys(pieces[0][0]) | hidden_keys(pieces[1][0]) << 4, lane);
        }
    }
    // Whether the mask hides an element of the scores. of_lane() has the order of the bits.
    __device__ __forceinline__ bool hides(int element) const {
        const int n = element / 4, r = element / 2 % 2, e = element % 2, loader = n / 2 % 4, piece = kWordOfRow ? n / 8 : r;
        return words[kWordOfRow ? r : 0] >> (e * 8 + piece * 4 + n % 2 * 2 + loader % 2 + loader / 2 * 16) & 1;
    }
    __device__ __forceinline__ void hide(float (&scores)[kKeys / 2]) const {
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i)
            if (hides(i)) scores[i] = -INFINITY;
    }

private:
    // From the bits of the keys that each of the four lanes has loaded, the bits of this lane's keys. Lane i of the four has
    // loaded 16 keys of a piece (see hides()). Of the first 8 (h = 0) and of the last 8 of these (h = 1) this lane has key 2
    // (lane % 4) (e = 0) and the next one (e = 1): bit 8 e + 4 piece + 2 h + i % 2 + 16 (i / 2).
    __device__ __forceinline__ static uint32_t of_lane(uint32_t loaded, int lane) {
        uint32_t own = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t of_loader = __shfl_sync(0xffffffffu, loaded, (lane & ~3) | i);
            own |= (of_loader >> bit_of_key((lane & 3) * 2) & 0x5555u) << (i % 2 + i / 2 * 16);
        }
        return own;
    }
};

// Hides scores by the mask of kKeys keys, whatever its strides. The whole warp calls it.
template <int kKeys>
__device__ __forceinline__ void hide_by_row_mask(float (&scores)[kKeys / 2], const MaskRows& mask, int row, int lane) {
    if (!RowMaskBits<kKeys>::loads(mask))
        return mask.for_elements<kKeys>(row, lane, [&](int i, uint8_t shows) {
            if (!shows) scores[i] = -INFINITY;
        });
    RowMaskBits<kKeys> hidden;
    hidden.load(mask, row, lane);
    hidden.hide(scores);
}

}  // namespace libflash::cuda
