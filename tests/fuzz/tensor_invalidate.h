// Ways to make one tensor of a valid call invalid, whatever its role. All must be refused as INVALID before any data is read.
#pragma once

#include <string>

#include "memory.h"

namespace fuzz {

struct TensorTraits {
    bool output = false;
    bool rows = false;   // the last dimension must be contiguous
    bool exact = false;  // every size is determined by the other tensors
};

inline bool has_elements(const flash_tensor_t& t) {
    for (int n = 0; n < t.ndim; ++n)
        if (t.shape[n] == 0) return false;
    return true;
}

// A dimension of more than one element, or -1.
inline int long_dimension(const flash_tensor_t& t, Bytes& bytes) {
    const int first = t.ndim > 0 ? static_cast<int>(bytes.below(t.ndim)) : 0;
    for (int n = 0; n < t.ndim; ++n)
        if (t.shape[(first + n) % t.ndim] > 1) return (first + n) % t.ndim;
    return -1;
}

inline std::string invalidate_description(flash_tensor_t& t, const TensorTraits& traits, Bytes& bytes) {
    const int any = t.ndim > 0 ? static_cast<int>(bytes.below(t.ndim)) : 0;
    const bool integer = t.dtype == FLASH_DTYPE_INT32 || t.dtype == FLASH_DTYPE_BOOL || t.dtype == FLASH_DTYPE_INT64;
    switch (bytes.below(8)) {
        case 0: t.dtype = bytes.one_of<int32_t>({0, 11, -1, 0x7fffffff}); return "no such dtype";
        case 1: t.dtype = integer ? FLASH_DTYPE_FLOAT32 : FLASH_DTYPE_INT32; return "another dtype";
        case 2: t.ndim = bytes.one_of<int32_t>({-1, 5, 0x7fffffff}); return "ndim out of range";
        case 3: t.device_type = bytes.one_of<int32_t>({2, -1}); return "no such device type";
        case 4: t.device_id = bytes.one_of<int32_t>({1, -1}); return "no such device";
        case 5: t.device_type = FLASH_DEVICE_CUDA; return "on another device than the rest";
        case 6:
            if (!traits.exact || t.ndim == 0) return {};
            t.shape[any] += 1;
            return "a size one too large";
        default:
            if (t.ndim == 0) return {};
            t.shape[any] = bytes.one_of<int64_t>({-1, int64_t{1} << 62, INT64_MIN, INT64_MAX});
            return "a size out of range";
    }
}

inline std::string invalidate_memory(flash_tensor_t& t, const flash_tensor_t& input, const TensorTraits& traits, Bytes& bytes) {
    if (!has_elements(t)) return {};
    const int dimension = long_dimension(t, bytes), last = t.ndim - 1;
    switch (bytes.below(6)) {
        case 0: t.data = nullptr; return "no data";
        case 1:
            if (bytes_of(t.dtype) == 1) return {};
            t.data = static_cast<char*>(t.data) + 1;
            return "misaligned";
        case 2:
            if (dimension < 0) return {};
            t.stride[dimension] = bytes.one_of<int64_t>({-1, INT64_MIN});
            return "negative stride";
        case 3:
            if (!traits.rows || t.shape[last] <= 1) return {};
            t.stride[last] = bytes.one_of<int64_t>({2, 0, 7});
            return "last dimension not contiguous";
        case 4:
            if (!traits.output || dimension < 0) return {};
            t.stride[dimension] = 0;
            return "output repeats";
        default:
            if (!traits.output || !has_elements(input)) return {};
            t.data = input.data;
            return "output over an input";
    }
}

inline std::string invalidate_tensor(flash_tensor_t& t, const flash_tensor_t& input, const TensorTraits& traits, Bytes& bytes) {
    return bytes.chance(128) ? invalidate_description(t, traits, bytes) : invalidate_memory(t, input, traits, bytes);
}

}  // namespace fuzz
