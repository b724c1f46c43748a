#include "problem/outputs.h"

#include "problem/read.h"

namespace libflash {

namespace {

flash_tensor_t contiguous(const TensorView& like) {
    flash_tensor_t t = {};
    t.dtype = static_cast<int32_t>(like.dtype);
    t.device_type = like.device.type;
    t.device_id = like.device.id;
    t.ndim = like.ndim;
    int64_t stride = 1;
    for (int i = like.ndim - 1; i >= 0; --i) {
        t.shape[i] = like.shape[i];
        t.stride[i] = stride;
        static_cast<void>(__builtin_mul_overflow(stride, like.shape[i], &stride));  // overflow: refused when the shape is read
    }
    return t;
}

}  // namespace

OutputShapes::OutputShapes(const flash_tensor_t* q, const flash_tensor_t* k, const flash_tensor_t* v, const char* k_name,
                           const char* v_name) {
    Reader reader(Reading::shapes);
    const TensorView query = reader.required(q, "q", kContiguousRows), key = reader.required(k, k_name, kContiguousRows);
    const TensorView value = reader.required(v, v_name, kContiguousRows);
    if (query.ndim != 3 && query.ndim != 4) {
        invalid("q", "must have 4 dimensions, or 3 if packed", "shape ", Sizes{query.shape, query.ndim});
    }
    TensorView rows = query;
    if (value.ndim > 0) rows.shape[rows.ndim - 1] = value.shape[value.ndim - 1];
    TensorView stats = query;
    stats.dtype = query.dtype == DType::f64 ? DType::f64 : DType::f32;
    stats.ndim = query.ndim - 1;
    for (int i = 0; i < stats.ndim - 2; ++i) stats.shape[i] = query.shape[i];
    stats.shape[stats.ndim - 2] = query.shape[query.ndim - 2];
    stats.shape[stats.ndim - 1] = query.shape[query.ndim - 3];
    out = contiguous(rows);
    lse = contiguous(stats);
    dq = contiguous(query);
    dk = contiguous(key);
    dv = contiguous(value);
}

void OutputShapes::widen_gradients() {
    for (flash_tensor_t* gradient : {&dq, &dk, &dv}) gradient->dtype = lse.dtype;
}

}  // namespace libflash
