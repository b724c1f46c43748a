// Conversions from the parts of a KV cache to kernel parameters. Host only, no CUDA header.
#pragma once

#include "cuda/attention/cache_params.h"
#include "cuda/host/problem_params.h"
#include "problem/cache_write.h"

namespace libflash::cuda {

inline CodeType code_type(const KvCache& cache) {
    switch (cache.dtype) {
        case DType::e4m3: return CodeType::e4m3;
        case DType::e5m2: return CodeType::e5m2;
        case DType::i8: return CodeType::int8;
        default: return CodeType::none;
    }
}

inline CacheScaleParams cache_scale_params(const CacheScale& scale) {
    if (!scale.present) return {};
    return {scale.data,
            scale.batch_stride,
            scale.block_stride,
            scale.row_stride,
            scale.head_stride,
            scale.group_stride,
            static_cast<int32_t>(scale.groups),
            scale.of_rows};
}

// Problem: DecodeProblem or CacheWriteProblem.
template <class Problem>
RotaryParams rotary_params(const Problem& problem) {
    if (!problem.rotary_cos.present) return {};
    return {problem.rotary_cos.data,
            problem.rotary_sin.data,
            problem.rotary_cos.stride[0],
            problem.rotary_sin.stride[0],
            static_cast<int32_t>(problem.rotary_cos.shape[0]),
            static_cast<int32_t>(problem.rotary_cos.shape[1]),
            problem.rotary_interleaved,
            problem.rotary_cos.dtype == DType::f32};
}

// How many tensors of rows a write by slots has: keys, values, rope parts.
inline int32_t parts_of(const CacheWriteProblem& problem) { return 1 + problem.cache.v.present + problem.cache.k_rope.present; }

}  // namespace libflash::cuda
