// Reader: makes views of the C tensors. It checks each tensor by itself when it reads the tensor, and records it, so that
// check_overlap() can compare all tensors at the end.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "problem/check.h"
#include "problem/overlap.h"
#include "problem/tensor.h"

namespace libflash {

// `call` checks data pointers and, on the CPU, the contents of lengths and tables. `shapes`, for the workspace query and explain,
// checks neither. `schedule`, for flash_attention_decode_schedule, checks data pointers, but those of tensors without the role
// kOfSchedule may be null.
enum class Reading { call, shapes, schedule };

enum Role : unsigned {
    kRead = 0,
    kWritten = 1,         // an output: its elements must not overlap each other or another tensor
    kContiguousRows = 2,  // the last dimension must be contiguous
    kUnrecorded = 4,      // the tensor is a part of a recorded one, so it is not recorded and not compared with others
    kOfSchedule = 8,      // the schedule of a decode call depends on its contents, or is written to it
};

class Reader {
public:
    explicit Reader(Reading reading) : reading_(reading) {}

    // `data` of the view is never null: if the caller's pointer is null, it points to static dummy memory.
    TensorView required(const flash_tensor_t* tensor, const Argument& argument, unsigned role = kRead);
    TensorView optional(const flash_tensor_t* tensor, const Argument& argument, unsigned role = kRead);

    bool is_call() const { return reading_ == Reading::call; }
    // Whether the contents of a tensor on this device may be read.
    bool may_read_data(const Device& device) const { return is_call() && !device.is_cuda(); }

    // The last check of every problem: an output overlaps no other tensor and not itself.
    void check_overlap() const;

private:
    bool checks_data(const flash_tensor_t& tensor, unsigned role) const {
        return is_call() || (reading_ == Reading::schedule && (tensor.data || (role & kOfSchedule)));
    }

    static constexpr int kInlineEntries = 32;  // enough for every call but a merge
    struct Entry {
        Argument argument = "";
        bool written = false;
        Footprint footprint;
    };
    void record(const TensorView& view, const Argument& argument, bool written);

    Reading reading_;
    int count_ = 0;
    int written_ = 0;
    // Left uninitialised to save time: most calls have five tensors.
    alignas(Entry) unsigned char storage_[kInlineEntries * sizeof(Entry)];
    std::vector<Entry> more_;  // those after the first kInlineEntries
    const Entry& entry(int i) const {
        return i < kInlineEntries ? reinterpret_cast<const Entry*>(storage_)[i] : more_[static_cast<size_t>(i - kInlineEntries)];
    }
};

bool is_float(DType dtype);
bool is_8_bit(DType dtype);  // of a KV cache

// Checks of one tensor against values that follow from other tensors. `names`: the shape in words, "(batch, heads_q, seqlen_q)".
void check_ndim(const TensorView& view, const Argument& argument, int ndim, const char* names);
void check_shape(const TensorView& view, const Argument& argument, std::initializer_list<int64_t> shape, const char* names);
void check_dtype(const TensorView& view, const Argument& argument, DType dtype);
void check_float(const TensorView& view, const Argument& argument);
void check_float32_or(const TensorView& view, const Argument& argument, DType dtype);
// Accepts the type of the inputs, and FLOAT32 if the inputs have 16 bits.
void check_partial_dtype(const TensorView& view, const Argument& argument, DType inputs);
void check_device(const TensorView& view, const Argument& argument, const Device& device);
void check_contiguous(const TensorView& view, const Argument& argument);

}  // namespace libflash
