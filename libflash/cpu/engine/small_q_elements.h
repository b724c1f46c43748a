// Decode with vectors along the channels: sizes of tiles, and elements of keys and queries as operands of products.
#pragma once

#include "cpu/engine/decode_parts.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kSmallQRows = 8;
constexpr int64_t kSmallQKeys = 128;         // keys of a tile
constexpr int64_t kSmallQValues = 16;        // keys whose values are processed for one head before the next head
constexpr int64_t kInvariantRows = 32;       // rows of a block with FLASH_FLAG_INVARIANT_ROWS
constexpr int64_t kInvariantSegment = 1024;  // keys of a segment with that flag, unless the caller gives split_size

// The element type of the products with K: bf16 pairs if there is a dot product for them, else the accumulator type.
template <class T>
struct SmallQElementOf {
    using type = Acc<T>;
};
#if FLASH_BF16_DOT
template <>
struct SmallQElementOf<bfloat16> {
    using type = bfloat16;
};
FLASH_INLINE U32 load_channels(const bfloat16* p, int64_t left) { return load_pairs(p, 0, left); }
FLASH_INLINE U32 load_channels(const bfloat16* p) {
    U32 pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return pairs;
}
#endif
template <class T>
using SmallQElement = typename SmallQElementOf<T>::type;
template <class T>
constexpr int kStepChannels = kValuesPerElement<T> * kLanes<Acc<T>>;
template <class T>
FLASH_INLINE auto load_channels(const T* p, int64_t left) {
    return load_part(p, left);
}
template <class T>
FLASH_INLINE auto load_channels(const T* p) {
    return load_wide(p);
}
// The channels of a key, from a cache of type C, as operands of a product with queries of type T.
template <class T, class C>
FLASH_INLINE auto load_key(const C* p, int64_t left) {
    if constexpr (std::is_same_v<C, T>) return load_channels(p, left);
#if FLASH_BF16_DOT
    else if constexpr (kPaired<T>)
        return load_code_pairs_part(p, left);
#endif
    else
        return load_cached_part<Acc<T>>(p, left);
}
template <class T, class C>
FLASH_INLINE auto load_key(const C* p) {
    if constexpr (std::is_same_v<C, T>) return load_channels(p);
#if FLASH_BF16_DOT
    else if constexpr (kPaired<T>)
        return load_code_pairs(p);
#endif
    else
        return load_cached<Acc<T>>(p);
}

// Elements of one part of a query row, padded to whole steps of a product; elements of an output row, whose channel groups are
// padded to whole vectors.
template <class T>
FLASH_INLINE int64_t small_q_part(int64_t channels) {
    return round_up(channels, kStepChannels<T>);
}
template <class T>
FLASH_INLINE int64_t small_q_stride(const KeyParts& parts) {
    return parts.v_groups * round_up(parts.v_group_size, kLanes<Acc<T>>);
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
