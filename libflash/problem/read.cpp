#include "problem/read.h"

#include <new>

namespace libflash {

namespace {

// The dummy memory to which views of tensors without data point.
alignas(256) unsigned char dummy_data[256];

// Small enough that a sum of a few sizes, offsets and window widths (MaskRule::kUnbounded) does not overflow.
constexpr int64_t kSizeLimit = int64_t{1} << 40;

void check_kind(const flash_tensor_t& t, const Argument& argument) {
    if (t.dtype < FLASH_DTYPE_FLOAT16 || t.dtype > FLASH_DTYPE_INT8) invalid(argument, "dtype must be a flash_dtype_t", t.dtype);
    if (t.device_type != FLASH_DEVICE_CPU && t.device_type != FLASH_DEVICE_CUDA) {
        invalid(argument, "device_type must be a flash_device_type_t", t.device_type);
    }
    if (t.device_id < 0 || (t.device_type == FLASH_DEVICE_CPU && t.device_id != 0)) {
        invalid(argument, "device_id must be 0 on the CPU and not negative on CUDA", t.device_id);
    }
    if (t.ndim < 0 || t.ndim > FLASH_MAX_NDIM) invalid(argument, "ndim must be 0 to 4", t.ndim);
}

// Returns whether the tensor has elements.
bool check_sizes(const flash_tensor_t& t, const Argument& argument) {
    int64_t bytes = element_bytes(static_cast<DType>(t.dtype));
    bool empty = false, overflow = false;
    for (int i = 0; i < t.ndim; ++i) {
        if (t.shape[i] < 0) invalid(argument, "no size may be negative", "shape ", Sizes{t.shape, t.ndim});
        if (t.shape[i] >= kSizeLimit) invalid(argument, "each size must be below 2^40", "shape ", Sizes{t.shape, t.ndim});
        if (t.shape[i] == 0) {
            empty = true;
        } else {
            overflow |= __builtin_mul_overflow(bytes, t.shape[i], &bytes);
        }
    }
    if (overflow) invalid(argument, "its size in bytes must be below 2^63", "shape ", Sizes{t.shape, t.ndim});
    return !empty;
}

// For a tensor with elements. Ignores the strides of dimensions of size 1. Returns the extent in bytes.
int64_t check_strides(const flash_tensor_t& t, const Argument& argument, unsigned role) {
    const int64_t element = element_bytes(static_cast<DType>(t.dtype));
    int64_t last = 0;
    bool overflow = false;
    for (int i = 0; i < t.ndim; ++i) {
        if (t.shape[i] <= 1) continue;
        if (t.stride[i] < 0) invalid(argument, "no stride may be negative", "strides ", Sizes{t.stride, t.ndim});
        if ((role & kWritten) && t.stride[i] == 0) {
            invalid(argument, "an output may not repeat (stride 0)", "strides ", Sizes{t.stride, t.ndim});
        }
        int64_t steps = 0;
        overflow |= __builtin_mul_overflow(t.shape[i] - 1, t.stride[i], &steps);
        overflow |= __builtin_add_overflow(last, steps, &last);
    }
    overflow |= __builtin_add_overflow(last, int64_t{1}, &last);
    overflow |= __builtin_mul_overflow(last, element, &last);
    if (overflow) invalid(argument, "its extent in bytes must be below 2^63", "strides ", Sizes{t.stride, t.ndim});
    if ((role & kContiguousRows) && t.ndim > 0 && t.shape[t.ndim - 1] > 1 && t.stride[t.ndim - 1] != 1) {
        invalid(argument, "the last dimension must be contiguous (stride 1)", "stride ", t.stride[t.ndim - 1]);
    }
    return last;
}

void check_data(const flash_tensor_t& t, const Argument& argument, int64_t bytes) {
    if (!t.data) invalid(argument, "data may be NULL only if the tensor has no elements", "shape ", Sizes{t.shape, t.ndim});
    const auto address = reinterpret_cast<uintptr_t>(t.data);
    const auto element = static_cast<uintptr_t>(element_bytes(static_cast<DType>(t.dtype)));
    if (address % element != 0) {
        invalid(argument, "data must be aligned to its element size", "address modulo ", element, " is ", address % element);
    }
    if (address + static_cast<uintptr_t>(bytes) < address) {
        invalid(argument, "it must end inside the address space", "bytes ", bytes);
    }
}

TensorView view_of(const flash_tensor_t& t) {
    TensorView view;
    view.present = true;
    view.data = t.data ? t.data : dummy_data;
    view.dtype = static_cast<DType>(t.dtype);
    view.device = Device{t.device_type, t.device_id};
    view.ndim = t.ndim;
    for (int i = 0; i < t.ndim; ++i) {
        view.shape[i] = t.shape[i];
        view.stride[i] = t.shape[i] > 1 ? t.stride[i] : i + 1 == t.ndim ? 1 : 0;
    }
    return view;
}

}  // namespace

TensorView Reader::optional(const flash_tensor_t* tensor, const Argument& argument, unsigned role) {
    return tensor ? required(tensor, argument, role) : TensorView();
}

TensorView Reader::required(const flash_tensor_t* tensor, const Argument& argument, unsigned role) {
    if (!tensor) invalid(argument, "is required", "NULL");
    const flash_tensor_t& t = *tensor;
    check_kind(t, argument);
    if (!check_sizes(t, argument)) return view_of(t);
    const int64_t bytes = check_strides(t, argument, role);
    const TensorView view = view_of(t);
    if (checks_data(t, role)) {
        check_data(t, argument, bytes);
        if (!(role & kUnrecorded)) record(view, argument, (role & kWritten) != 0);
    }
    return view;
}

void Reader::record(const TensorView& view, const Argument& argument, bool written) {
    const Entry made{argument, written, footprint_of(view)};
    if (count_ < kInlineEntries)
        new (storage_ + static_cast<size_t>(count_) * sizeof(Entry)) Entry(made);
    else
        more_.push_back(made);
    count_ += 1;
    written_ += written ? 1 : 0;
}

void Reader::check_overlap() const {
    if (written_ == 0) return;
    for (int i = 0; i < count_; ++i) {
        const Entry& one = entry(i);
        if (!one.written) continue;
        if (!disjoint_elements(one.footprint)) {
            invalid(one.argument, "an output must not overlap itself", "strides in bytes ",
                    Sizes{one.footprint.stride, one.footprint.ndim}, " of sizes ", Sizes{one.footprint.size, one.footprint.ndim});
        }
        for (int j = 0; j < count_; ++j) {
            const Entry& other = entry(j);
            if (j == i || (other.written && j < i) || disjoint(one.footprint, other.footprint)) continue;
            invalid(one.argument, "an output must not overlap another tensor", "it overlaps ", other.argument);
        }
    }
}

bool is_8_bit(DType dtype) { return dtype == DType::e4m3 || dtype == DType::e5m2 || dtype == DType::i8; }
bool is_float(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f64; }

void check_ndim(const TensorView& view, const Argument& argument, int ndim, const char* names) {
    if (view.ndim == ndim) return;
    const std::string rule = text_of("must have ", ndim, ndim == 1 ? " dimension, " : " dimensions, ", names);
    invalid(argument, rule.c_str(), "shape ", Sizes{view.shape, view.ndim});
}

void check_shape(const TensorView& view, const Argument& argument, std::initializer_list<int64_t> shape, const char* names) {
    const int ndim = static_cast<int>(shape.size());
    bool same = view.ndim == ndim;
    for (int i = 0; same && i < ndim; ++i) same = view.shape[i] == shape.begin()[i];
    if (same) return;
    const std::string rule = text_of("shape must be ", names, " = ", Sizes{shape.begin(), ndim});
    invalid(argument, rule.c_str(), "it is ", Sizes{view.shape, view.ndim});
}

void check_dtype(const TensorView& view, const Argument& argument, DType dtype) {
    if (view.dtype == dtype) return;
    const std::string rule = text_of("dtype must be ", dtype);
    invalid(argument, rule.c_str(), "it is ", view.dtype);
}

void check_float(const TensorView& view, const Argument& argument) {
    if (!is_float(view.dtype)) invalid(argument, "dtype must be float16, bfloat16, float32 or float64", "it is ", view.dtype);
}

void check_float32_or(const TensorView& view, const Argument& argument, DType dtype) {
    if (view.dtype == DType::f32 || view.dtype == dtype) return;
    const std::string rule = text_of("dtype must be float32 or that of q, ", dtype);
    invalid(argument, rule.c_str(), "it is ", view.dtype);
}

void check_partial_dtype(const TensorView& view, const Argument& argument, DType inputs) {
    const bool wide_allowed = element_bytes(inputs) == 2;
    if (view.dtype == inputs || (view.dtype == DType::f32 && wide_allowed)) return;
    const std::string rule = text_of("dtype must be ", inputs, wide_allowed ? " or float32" : "");
    invalid(argument, rule.c_str(), "it is ", view.dtype);
}

void check_device(const TensorView& view, const Argument& argument, const Device& device) {
    if (view.device == device) return;
    const std::string rule = text_of("must be on the device of the first tensor, ", device);
    invalid(argument, rule.c_str(), "it is on ", view.device);
}

void check_contiguous(const TensorView& view, const Argument& argument) {
    int64_t stride = 1;
    bool contiguous = true, empty = false;
    for (int i = view.ndim - 1; i >= 0; --i) {
        if (view.shape[i] > 1 && view.stride[i] != stride) contiguous = false;
        if (view.shape[i] == 0) empty = true;
        stride *= view.shape[i];
    }
    if (!contiguous && !empty) invalid(argument, "must be contiguous", "strides ", Sizes{view.stride, view.ndim});
}

}  // namespace libflash
