// From the C tensors to views: each tensor is checked by itself when it is read, and remembered, so that in the end all of them
// can be checked for overlap.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "problem/check.h"
#include "problem/overlap.h"
#include "problem/tensor.h"

namespace libflash {

// A call looks at data pointers and, on the CPU, at the contents of lengths and tables. The queries (workspace size, explain)
// know shapes only.
enum class Reading { call, shapes };

enum Role : unsigned {
    kRead = 0,
    kWritten = 1,  // no element may be written twice, and no other tensor may share a byte
    kRows = 2,     // the last dimension is contiguous
};

class Reader {
public:
    explicit Reader(Reading reading) : reading_(reading) {}

    // The view's `data` is never null: a tensor without elements, or without data in a query, points at nothing in particular.
    TensorView required(const flash_tensor_t* tensor, const Argument& argument, unsigned role = kRead);
    TensorView optional(const flash_tensor_t* tensor, const Argument& argument, unsigned role = kRead);

    bool is_call() const { return reading_ == Reading::call; }
    // May the contents of a tensor on this device be looked at?
    bool may_look(const Device& device) const { return is_call() && !device.is_cuda(); }

    // Last check of every problem.
    void check_overlap() const;

private:
    static constexpr int kInPlace = 32;  // more than any call but a merge has
    struct Entry {
        Argument argument = "";
        bool written = false;
        Footprint footprint;
    };
    void remember(const TensorView& view, const Argument& argument, bool written);

    Reading reading_;
    int count_ = 0;
    int written_ = 0;
    // Not initialised, on purpose: most calls have five tensors.
    alignas(Entry) unsigned char storage_[kInPlace * sizeof(Entry)];
    std::vector<Entry> more_;  // those after the first kInPlace
    const Entry& entry(int i) const {
        return i < kInPlace ? reinterpret_cast<const Entry*>(storage_)[i] : more_[static_cast<size_t>(i - kInPlace)];
    }
};

bool is_float(DType dtype);

// Checks of one tensor against what the others ask of it. `names` says the shape in words, "(batch, heads_q, seqlen_q)".
void check_ndim(const TensorView& view, const Argument& argument, int ndim, const char* names);
void check_shape(const TensorView& view, const Argument& argument, std::initializer_list<int64_t> shape, const char* names);
void check_dtype(const TensorView& view, const Argument& argument, DType dtype);
void check_float(const TensorView& view, const Argument& argument);
void check_float32_or(const TensorView& view, const Argument& argument, DType dtype);
void check_device(const TensorView& view, const Argument& argument, const Device& device);
void check_contiguous(const TensorView& view, const Argument& argument);

}  // namespace libflash
