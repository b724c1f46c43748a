// Tensors with their own memory: an allocation of exactly the bytes that the tensor spans, so that AddressSanitizer detects
// accesses outside. Bytes between elements hold NaN.
#pragma once

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include "bytes.h"
#include "cpu/convert.h"
#include "libflash.h"

namespace fuzz {

using libflash::DType;

struct FreeBlock {
    void operator()(void* block) const { std::free(block); }
};
using Block = std::unique_ptr<char, FreeBlock>;

inline int64_t bytes_of(int32_t dtype) { return libflash::element_bytes(static_cast<DType>(dtype)); }

// Number of elements from the first to the last, gaps included.
inline int64_t span_of(const flash_tensor_t& t) {
    int64_t span = 1;
    for (int n = 0; n < t.ndim; ++n) {
        if (t.shape[n] == 0) return 0;
        span += (t.shape[n] - 1) * t.stride[n];
    }
    return span;
}

template <class Body>
void each_element(const flash_tensor_t& t, const Body& body, int dim = 0, int64_t offset = 0) {
    if (dim == t.ndim) return body(offset);
    for (int64_t n = 0; n < t.shape[dim]; ++n) each_element(t, body, dim + 1, offset + n * t.stride[dim]);
}

class Tensor {
public:
    Tensor() : view{} {}

    // `lead` extra elements in front move the data off the allocator's alignment.
    void allocate(const flash_tensor_t& shape, int64_t lead = 0) {
        view = shape;
        const int64_t size = bytes_of(view.dtype), span = span_of(view);
        lead_bytes_ = static_cast<size_t>(lead * size);
        bytes_ = lead_bytes_ + static_cast<size_t>(span * size);
        block_.reset(static_cast<char*>(std::malloc(bytes_ ? bytes_ : 1)));
        if (bytes_) std::memset(block_.get(), 0xff, bytes_);
        view.data = bytes_ ? block_.get() + lead_bytes_ : nullptr;
    }
    bool present() const { return block_ != nullptr; }
    const flash_tensor_t* pointer() const { return present() ? &view : nullptr; }
    // A copy of the bytes, for a later comparison.
    std::vector<char> bytes() const { return {block_.get(), block_.get() + bytes_}; }
    bool holds(const std::vector<char>& before) const {
        return before.empty() || std::memcmp(block_.get(), before.data(), bytes_) == 0;
    }
    // Becomes a copy of `from` with memory of its own, also if the view of `from` has only a part of its memory.
    void copy(const Tensor& from) {
        view = from.view, bytes_ = from.bytes_, lead_bytes_ = from.lead_bytes_;
        block_.reset(static_cast<char*>(std::malloc(bytes_ ? bytes_ : 1)));
        copy_bytes(from);
        view.data = bytes_ ? block_.get() + lead_bytes_ : nullptr;
    }
    void copy_bytes(const Tensor& from) {
        if (bytes_) std::memcpy(block_.get(), from.block_.get(), bytes_);
    }
    size_t size_bytes() const { return bytes_; }
    size_t lead_bytes() const { return lead_bytes_; }
    const char* block() const { return block_.get(); }

    double get(int64_t offset) const { return libflash::cpu::load_as(static_cast<DType>(view.dtype), view.data, offset); }
    void set(int64_t offset, double value) { libflash::cpu::store_as(static_cast<DType>(view.dtype), view.data, offset, value); }
    int32_t* ints() { return static_cast<int32_t*>(view.data); }
    uint8_t* bools() { return static_cast<uint8_t*>(view.data); }

    void fill(Random& random, double magnitude) {
        each_element(view, [&](int64_t offset) { set(offset, magnitude * random.uniform()); });
    }
    void fill_bools(Random& random, int64_t true_of_8) {
        each_element(view, [&](int64_t offset) { bools()[offset] = random.below(8) < true_of_8; });
    }

    flash_tensor_t view;

private:
    Block block_;
    size_t bytes_ = 0, lead_bytes_ = 0;
};

inline flash_tensor_t contiguous(int32_t dtype, std::initializer_list<int64_t> shape) {
    flash_tensor_t t = {};
    t.dtype = dtype;
    for (int64_t n : shape) t.shape[t.ndim++] = n;
    int64_t stride = 1;
    for (int n = t.ndim - 1; n >= 0; stride *= t.shape[n--]) t.stride[n] = stride;
    return t;
}

// The same with all dimensions but the last in any memory order, padded, and (inputs only) some of them broadcast.
inline flash_tensor_t strided(Bytes& bytes, int32_t dtype, std::initializer_list<int64_t> shape, bool input) {
    flash_tensor_t t = contiguous(dtype, shape);
    if (bytes.chance(128)) return t;
    int order[FLASH_MAX_NDIM] = {0, 1, 2, 3};
    for (int n = t.ndim - 2; n > 0; --n) {
        const auto other = static_cast<int>(bytes.below(n + 1)), here = order[n];
        order[n] = order[other], order[other] = here;
    }
    int64_t stride = t.shape[t.ndim - 1] + bytes.below(4);
    for (int n = t.ndim - 2; n >= 0; --n) {
        t.stride[order[n]] = stride;
        if (t.shape[order[n]] > 1) stride = stride * t.shape[order[n]] + bytes.below(3);
    }
    if (input && bytes.chance(40)) t.stride[bytes.below(t.ndim - 1)] = 0;
    return t;
}

// A view of some channels of a cache.
inline flash_tensor_t channels_of(const flash_tensor_t& cache, int64_t first, int64_t count) {
    flash_tensor_t view = cache;
    view.shape[3] = count;
    if (cache.data) view.data = static_cast<char*>(cache.data) + first * bytes_of(cache.dtype);
    return view;
}

// A workspace of exactly `bytes` bytes, filled with `fill`.
class Workspace {
public:
    explicit Workspace(size_t bytes, int fill = 0xa5) {
        void* block = nullptr;
        if (bytes && posix_memalign(&block, 256, bytes) == 0) std::memset(block, fill, bytes);
        block_.reset(static_cast<char*>(block));
    }
    char* data() const { return block_.get(); }

private:
    Block block_;
};

}  // namespace fuzz
