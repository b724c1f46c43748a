#include "problem/overlap.h"

#include <utility>

namespace libflash {

namespace {

// Bytes from the first to the last element along the dimensions whose stride is not a multiple of `period`; period 0: along all
// dimensions.
int64_t extent(const Footprint& one, int64_t period) {
    int64_t bytes = one.element;
    for (int i = 0; i < one.ndim; ++i) {
        if (period == 0 || one.stride[i] % period != 0) bytes += (one.size[i] - 1) * one.stride[i];
    }
    return bytes;
}

// Modulo `period`, the addresses of each tensor lie in one interval. Returns whether the two intervals are disjoint. `distance`
// is the address of `other` minus the address of `one`, not negative.
bool disjoint_modulo(const Footprint& one, const Footprint& other, int64_t distance, int64_t period) {
    const int64_t shift = distance % period;
    return extent(one, period) <= shift && shift + extent(other, period) <= period;
}

Footprint without_first(const Footprint& one) {
    Footprint rest = one;
    rest.ndim -= 1;
    for (int i = 0; i < rest.ndim; ++i) {
        rest.size[i] = one.size[i + 1];
        rest.stride[i] = one.stride[i + 1];
    }
    return rest;
}

bool disjoint_by_strides(const Footprint& one, const Footprint& other, int64_t distance) {
    if (distance >= extent(one, 0)) return true;
    for (const Footprint* tensor : {&one, &other}) {
        for (int i = 0; i < tensor->ndim; ++i) {
            if (tensor->stride[i] > 0 && disjoint_modulo(one, other, distance, tensor->stride[i])) return true;
        }
    }
    // If both tensors have the same largest stride, and their other dimensions fit into one such stride, it is enough to compare
    // the tensors without the dimension of this stride.
    if (one.ndim == 0 || other.ndim == 0 || one.stride[0] != other.stride[0] || one.stride[0] == 0) return false;
    const int64_t period = one.stride[0];
    const int64_t shift = distance % period;
    const Footprint one_step = without_first(one), other_step = without_first(other);
    if (extent(one_step, 0) > period || shift + extent(other_step, 0) > period) return false;
    return disjoint_by_strides(one_step, other_step, shift);
}

}  // namespace

Footprint footprint_of(const TensorView& view) {
    Footprint footprint;
    footprint.element = element_bytes(view.dtype);
    int64_t last = 0;
    for (int i = 0; i < view.ndim; ++i) {
        if (view.shape[i] <= 1) continue;
        const int64_t stride = view.stride[i] * footprint.element;
        last += (view.shape[i] - 1) * stride;
        int at = footprint.ndim++;
        for (; at > 0 && footprint.stride[at - 1] < stride; --at) {
            footprint.stride[at] = footprint.stride[at - 1];
            footprint.size[at] = footprint.size[at - 1];
        }
        footprint.stride[at] = stride;
        footprint.size[at] = view.shape[i];
    }
    footprint.begin = reinterpret_cast<uintptr_t>(view.data);
    footprint.end = footprint.begin + static_cast<uintptr_t>(last + footprint.element);
    return footprint;
}

bool disjoint_elements(const Footprint& one) {
    int64_t inner = one.element;
    for (int i = one.ndim - 1; i >= 0; --i) {
        if (one.stride[i] < inner) return false;
        inner += (one.size[i] - 1) * one.stride[i];
    }
    return true;
}

bool disjoint(const Footprint& one, const Footprint& other) {
    if (one.end <= other.begin || other.end <= one.begin) return true;
    if (one.begin <= other.begin) return disjoint_by_strides(one, other, static_cast<int64_t>(other.begin - one.begin));
    return disjoint_by_strides(other, one, static_cast<int64_t>(one.begin - other.begin));
}

}  // namespace libflash
