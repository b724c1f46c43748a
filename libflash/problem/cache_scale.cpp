#include "problem/cache_scale.h"

#include "problem/read.h"

namespace libflash {

namespace {

CacheScale of_heads(const TensorView& view, const Argument& argument, const CacheScaleSizes& sizes) {
    CacheScale scale;
    if (view.shape[0] != 1) {
        check_shape(view, argument, {sizes.heads}, "(1,) or (heads_k,)");
        scale.head_stride = view.stride[0];
    }
    return scale;
}

CacheScale of_sequences(const TensorView& view, const Argument& argument, const CacheScaleSizes& sizes) {
    check_shape(view, argument, {sizes.batch, sizes.heads}, "(batch, heads_k)");
    CacheScale scale;
    scale.batch_stride = view.stride[0], scale.head_stride = view.stride[1];
    return scale;
}

CacheScale of_rows(const TensorView& view, const Argument& argument, const CacheScaleSizes& sizes) {
    CacheScale scale;
    if (view.ndim == 3) {
        check_shape(view, argument, {sizes.cache_blocks, sizes.rows, sizes.heads}, "(entries or pages, rows, heads_k)");
    } else {
        scale.groups = view.shape[3], scale.group_stride = view.stride[3];
        check_shape(view, argument, {sizes.cache_blocks, sizes.rows, sizes.heads, scale.groups},
                    "(entries or pages, rows, heads_k, groups)");
        if (scale.groups == 0 || sizes.channels % scale.groups != 0) {
            invalid(argument, "the number of groups must divide the channels of the cache", scale.groups, " groups of ",
                    sizes.channels);
        }
    }
    scale.of_rows = true;
    scale.block_stride = view.stride[0], scale.row_stride = view.stride[1], scale.head_stride = view.stride[2];
    return scale;
}

}  // namespace

CacheScale build_cache_scale(const TensorView& view, const Argument& argument, const CacheScaleSizes& sizes,
                             const Device& device) {
    check_device(view, argument, device);
    check_dtype(view, argument, DType::f32);
    if (view.ndim == 0) invalid(argument, "must have 1 to 4 dimensions", "shape ", Sizes{view.shape, view.ndim});
    CacheScale scale = view.ndim == 1   ? of_heads(view, argument, sizes)
                       : view.ndim == 2 ? of_sequences(view, argument, sizes)
                                        : of_rows(view, argument, sizes);
    scale.present = true;
    scale.data = static_cast<float*>(view.data);
    return scale;
}

}  // namespace libflash
