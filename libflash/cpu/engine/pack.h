// Operands of multiply() from rows in memory. The storage type determines the element type of a product:
//
//   storage            elements   a row of d channels is
//   double, float      itself     d elements, used in place if the rows are dense
//   half, bfloat16     float      converted to float
//   bfloat16 with      Pair       ceil(d / 2) pairs of neighbouring channels, in place if possible; for sums over rows,
//   the dot product               pairs of neighbouring rows
#pragma once

#include "cpu/engine/gemm.h"
#include "cpu/engine/transpose.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

template <class T>
struct ElementOf {
    using type = Acc<T>;
};
#if FLASH_BF16_DOT
template <>
struct ElementOf<bfloat16> {
    using type = Pair;
};
#endif
template <class T>
using Element = typename ElementOf<T>::type;
template <class T>
constexpr bool kPaired = sizeof(Element<T>) != sizeof(Acc<T>) || !__is_same(Element<T>, Acc<T>);
// Values in one element.
template <class T>
constexpr int kValuesPerElement = kPaired<T> ? 2 : 1;
template <class T>
FLASH_INLINE int64_t elements_for(int64_t n) {
    return (n + kValuesPerElement<T> - 1) / kValuesPerElement<T>;
}

// Rows of one head: row r starts at rows(r). Other row types (a paged cache) have their own call operator and kStrided false.
template <class T>
struct StridedRows {
    static constexpr bool kStrided = true;
    T* data = nullptr;
    int64_t stride = 0;
    FLASH_INLINE T* operator()(int64_t row) const { return data + row * stride; }
};

template <class E>
struct Operand {
    const E* data = nullptr;
    int64_t stride = 0;  // elements from one row (or pair of rows) to the next
};

#if FLASH_BF16_DOT
// Channels 2c and 2c + 1 of a row, for a vector of consecutive c from c0 on.
FLASH_INLINE U32 load_pairs(const bfloat16* row, int64_t c0, int64_t channels) {
    const int64_t left = channels - 2 * c0;
    U32 pairs;  // rows need not be aligned to 4 bytes
    if (left >= 2 * kLanes<float>) {
        std::memcpy(&pairs, row + 2 * c0, sizeof pairs);
        return pairs;
    }
    uint16_t part[2 * kLanes<float>] = {};
    for (int64_t i = 0; i < left; ++i) part[i] = row[2 * c0 + i].bits;
    std::memcpy(&pairs, part, sizeof pairs);
    return pairs;
}
FLASH_INLINE U32 load_part_u16(const bfloat16* p, int64_t count) {
    if (count >= kLanes<float>) return load_u16(&p->bits);
    uint16_t part[kLanes<float>] = {};
    for (int64_t i = 0; i < count; ++i) part[i] = p[i].bits;
    return load_u16(part);
}
#endif

// B operand of a product that sums over channels: to[c][r], `height` (a multiple of the vector length) rows; rows from `count`
// on are 0.
template <class T, class Rows>
static void pack_columns(const Rows& rows, int64_t count, int64_t height, int64_t channels, Element<T>* to) {
    if constexpr (kPaired<T>) {
#if FLASH_BF16_DOT
        transpose_rows<float>(count, height, elements_for<T>(channels), reinterpret_cast<float*>(to), height,
                              [&](int64_t r, int64_t c)
                                  __attribute__((always_inline)) { return (F32)load_pairs(rows(r), c, channels); });
#endif
    } else {
        transpose_rows<Acc<T>>(count, height, channels, to, height, [&](int64_t r, int64_t c) __attribute__((always_inline)) {
            return load_part(rows(r) + c, channels - c);
        });
    }
}

// How a product reads its rows: each row once from end to end, or all rows repeatedly, a few channels at a time. In the second
// case rows with a large stride compete for the same cache sets, so they are copied.
enum class Reads { once, often };

// A operand of a product that sums over channels (or, without pairs, over rows), in place if possible. `buffer` has count x
// ceil(channels / kValuesPerElement) elements.
template <class T, class Rows>
static Operand<Element<T>> rows_operand(const Rows& rows, int64_t first, int64_t count, int64_t channels, Element<T>* buffer,
                                        Reads reads) {
    using E = Element<T>;
    if constexpr (Rows::kStrided && (kPaired<T> || __is_same(T, E))) {
        const bool whole = channels % kValuesPerElement<T> == 0 && rows.stride % kValuesPerElement<T> == 0;
        if (whole && (reads == Reads::once || rows.stride <= channels + kValuesPerElement<T> * 16))
            return {reinterpret_cast<const E*>(rows(first)), rows.stride / kValuesPerElement<T>};
    }
    const int64_t width = elements_for<T>(channels);
    for (int64_t r = 0; r < count; ++r) {
        const T* row = rows(first + r);
        if constexpr (kPaired<T> || __is_same(T, E)) {
            if constexpr (kPaired<T>)
                if (channels % 2) buffer[r * width + width - 1] = E{};
            std::memcpy(static_cast<void*>(buffer + r * width), row, static_cast<size_t>(channels) * sizeof(T));
        } else {
            for (int64_t c = 0; c < channels; c += kLanes<E>)
                store_part(buffer + r * width + c, load_part(row + c, channels - c), channels - c);
        }
    }
    return {buffer, width};
}

// Operand of a product that sums over rows: buffer[ceil(count / kValuesPerElement)][width], width >= channels. Channels from
// `channels` to `width` and a missing second row of a pair are 0.
template <class T, class Rows>
static void pack_row_elements(const Rows& rows, int64_t first, int64_t count, int64_t channels, int64_t width,
                              Element<T>* buffer) {
    if constexpr (kPaired<T>) {
#if FLASH_BF16_DOT
        for (int64_t r = 0; r < count; r += 2) {
            const bfloat16 *low = rows(first + r), *high = r + 1 < count ? rows(first + r + 1) : nullptr;
            uint32_t* to = reinterpret_cast<uint32_t*>(buffer + r / 2 * width);
            for (int64_t c = 0; c < width; c += kLanes<float>) {
                U32 pairs = load_part_u16(low + c, channels - c);
                if (high) pairs |= load_part_u16(high + c, channels - c) << 16;
                store_part(reinterpret_cast<float*>(to + c), (F32)pairs, width - c);
            }
        }
#endif
    } else {
        for (int64_t r = 0; r < count; ++r)
            for (int64_t c = 0; c < width; c += kLanes<Acc<T>>)
                store_part(buffer + r * width + c, load_part(rows(first + r) + c, channels - c), width - c);
    }
}

// The same as an A operand, which needs no padding and may use the rows in place.
template <class T, class Rows>
static Operand<Element<T>> row_elements_operand(const Rows& rows, int64_t first, int64_t count, int64_t channels,
                                                Element<T>* buffer) {
    if constexpr (kPaired<T>) {
        pack_row_elements<T>(rows, first, count, channels, channels, buffer);
        return {buffer, channels};
    } else {
        return rows_operand<T>(rows, first, count, channels, buffer, Reads::often);
    }
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
