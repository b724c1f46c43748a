#include "problem/cache_parts.h"

#include "problem/read.h"

namespace libflash {

void check_cache_types(KvCache& cache, DType of_rows, const char* rows) {
    cache.dtype = cache.k.dtype;
    const bool codes = is_8_bit(cache.dtype) && of_rows != DType::f64;
    if (!codes && cache.dtype != of_rows) {
        const char* more = of_rows == DType::f64 ? "" : ", or float8_e4m3fn, float8_e5m2 or int8";
        const std::string rule = text_of("dtype must be ", of_rows, ", that of ", rows, more);
        invalid("k_cache", rule.c_str(), "it is ", cache.dtype);
    }
    if (cache.v.present && cache.v.dtype != cache.dtype) {
        const std::string rule = text_of("dtype must be that of k_cache, ", cache.dtype);
        invalid("v_cache", rule.c_str(), "it is ", cache.v.dtype);
    }
}

void check_scale_given(const KvCache& cache, const CacheScale& scale, const char* name, bool writes) {
    if (cache.dtype == DType::i8 && !scale.present) invalid(name, "is required for an int8 cache", "NULL");
    if (writes && scale.of_rows && !is_8_bit(cache.dtype)) {
        invalid(name, "scales of rows are computed by an append, which needs an 8-bit cache; without one give 1 or 2 dimensions",
                "the cache is ", cache.dtype);
    }
}

void check_rotary_given(const TensorView& cos, const TensorView& sin) {
    if (cos.present == sin.present) return;
    invalid(cos.present ? "rotary_sin" : "rotary_cos", "rotary_cos and rotary_sin are given together or not at all",
            "it is missing");
}

void check_rotary_tables(const TensorView& cos, const TensorView& sin, const KvCache& cache, DType of_rows,
                         const Device& device) {
    for (const auto& [view, name] : {std::pair(&cos, "rotary_cos"), std::pair(&sin, "rotary_sin")}) {
        check_device(*view, name, device);
        check_float32_or(*view, name, of_rows);
    }
    check_ndim(cos, "rotary_cos", 2, "(positions, channels / 2)");
    if (cos.shape[0] < 1) invalid("rotary_cos", "must have a row for every position", "it has none");
    const int64_t pairs = cos.shape[1], channels = cache.k_rope.present ? cache.rope_dim() : cache.k.shape[3];
    if (pairs < 1 || pairs > channels / 2) {
        if (cache.k_rope.present) {
            invalid("rotary_cos", "must rotate at least 2 channels and at most those of k_rope_cache", 2 * pairs, " of ",
                    channels);
        }
        invalid("rotary_cos", "must rotate at least 2 channels and at most head_dim", 2 * pairs, " of ", channels);
    }
    check_shape(sin, "rotary_sin", {cos.shape[0], pairs}, "that of rotary_cos");
    check_dtype(sin, "rotary_sin", cos.dtype);
}

}  // namespace libflash
