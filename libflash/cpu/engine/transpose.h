// Transposition of square blocks of vectors in registers, and of whole tiles block by block.
#pragma once

#include "cpu/engine/storage.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

template <int... I>
struct Indices {};
template <int N, int... I>
struct CountTo : CountTo<N - 1, N - 1, I...> {};
template <int... I>
struct CountTo<0, I...> {
    using type = Indices<I...>;
};

// One step of the transposition: swaps the off-diagonal blocks of `Step` lanes between two rows.
template <class T, int Step, int... I>
FLASH_INLINE void exchange(Vec<T>& a, Vec<T>& b, Indices<I...>) {
    constexpr int L = kLanes<T>;
    const Vec<T> x = a, y = b;
#if defined(__clang__)
    a = __builtin_shufflevector(x, y, ((I & Step) ? L + I - Step : I)...);
    b = __builtin_shufflevector(x, y, ((I & Step) ? L + I : I + Step)...);
#else
    using Mask = Vec<Integer<T>>;
    a = __builtin_shuffle(x, y, Mask{((I & Step) ? L + I - Step : I)...});
    b = __builtin_shuffle(x, y, Mask{((I & Step) ? L + I : I + Step)...});
#endif
}

template <class T, int Step = kLanes<T> / 2>
FLASH_INLINE void transpose(Vec<T> (&v)[kLanes<T>]) {
    if constexpr (Step > 0) {
        FLASH_UNROLL
        for (int i = 0; i < kLanes<T>; ++i)
            if (!(i & Step)) exchange<T, Step>(v[i], v[i + Step], typename CountTo<kLanes<T>>::type{});
        transpose<T, Step / 2>(v);
    }
}

// to[c * to_stride + r] = value(r, c) for r < height, c < width, where `row(r, c)` returns the vector of columns c, c + 1, ...
// of row r (0 from `width` on). Rows from `rows` to `height` (a multiple of the vector length) become 0.
template <class T, class Row>
FLASH_INLINE void transpose_rows(int64_t rows, int64_t height, int64_t width, T* to, int64_t to_stride, const Row& row) {
    constexpr int L = kLanes<T>;
    for (int64_t r0 = 0; r0 < height; r0 += L)
        for (int64_t c0 = 0; c0 < width; c0 += L) {
            Vec<T> square[L];
            if (r0 + L <= rows) {
                FLASH_UNROLL
                for (int r = 0; r < L; ++r) square[r] = row(r0 + r, c0);
            } else {
                for (int r = 0; r < L; ++r) square[r] = r0 + r < rows ? row(r0 + r, c0) : Vec<T>{};
            }
            transpose<T>(square);
            T* at = to + c0 * to_stride + r0;
            if (c0 + L <= width) {
                FLASH_UNROLL
                for (int c = 0; c < L; ++c) store(at + c * to_stride, square[c]);
            } else {
                for (int64_t c = 0; c < width - c0; ++c) store(at + c * to_stride, square[c]);
            }
        }
}

// The inverse: calls put(r, c, vector) with columns c, c + 1, ... of row r for r < rows. Only the first width - c lanes are
// valid.
template <class T, class Put>
FLASH_INLINE void transpose_columns(const T* from, int64_t from_stride, int64_t rows, int64_t width, const Put& put) {
    constexpr int L = kLanes<T>;
    for (int64_t r0 = 0; r0 < rows; r0 += L)
        for (int64_t c0 = 0; c0 < width; c0 += L) {
            Vec<T> square[L];
            const T* at = from + c0 * from_stride + r0;
            if (c0 + L <= width) {
                FLASH_UNROLL
                for (int c = 0; c < L; ++c) square[c] = load(at + c * from_stride);
            } else {
                for (int c = 0; c < L; ++c) square[c] = c < width - c0 ? load(at + c * from_stride) : Vec<T>{};
            }
            transpose<T>(square);
            const int64_t count = rows - r0 < L ? rows - r0 : L;
            for (int64_t r = 0; r < count; ++r) put(r0 + r, c0, square[r]);
        }
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
