// What a cache holds after a write of new rows, row by row from the manual. The code of a value is looked up among all codes, so
// nothing here depends on how the library rounds to 8 bits.
#include <algorithm>

#include "cache_write_case.h"

namespace fuzz {
namespace {

using Row = std::vector<double>;

// The codes of one sign, in ascending order of the values. None for a cache that has no codes.
struct Codes {
    std::vector<float> value;
    bool integers;

    explicit Codes(int32_t dtype) : integers(dtype == FLASH_DTYPE_INT8) {
        for (int code = 0; code < 128 && bytes_of(dtype) == 1; ++code) {
            const auto byte = static_cast<uint8_t>(code);
            const double x = libflash::cpu::load_as(static_cast<DType>(dtype), &byte, 0);
            if (std::isfinite(x)) value.push_back(static_cast<float>(x));
        }
    }
    float largest() const { return value.back(); }
    // The nearest code, of two the even one. Past the largest: the largest.
    uint8_t nearest(double x) const {
        if (std::isnan(x)) return integers ? 0 : 0x7f;
        const double magnitude = std::fabs(x);
        auto code = static_cast<size_t>(std::upper_bound(value.begin(), value.end(), magnitude) - value.begin()) - 1;
        if (code + 1 < value.size()) {
            const double below = magnitude - value[code], above = value[code + 1] - magnitude;
            if (above < below || (above == below && code % 2 == 1)) ++code;
        }
        if (!std::signbit(x)) return static_cast<uint8_t>(code);
        return static_cast<uint8_t>(integers ? 256 - code : 128 + code);
    }
};

class Expected {
public:
    Expected(const WriteCase& problem, const WriteCall& call, StoredTensors& stored)
        : problem_(problem), call_(call), stored_(stored), codes_(problem.cache_dtype) {}

    void write_row(int64_t row) const {
        const int64_t slot = problem_.slot(row), block = slot / problem_.block_rows, at = slot % problem_.block_rows;
        const bool rope = call_.given[kCacheRope];
        for (int64_t h = 0; h < problem_.heads; ++h) {
            const Row k = new_row(kNewK, row, h);
            store(kCacheK, kScaleK, rope ? k : rotated(k, row), block, at, h);
            if (rope) copy(kCacheRope, rotated(new_row(kNewRope, row, h), row), block, at, h);
            if (call_.given[kCacheV]) store(kCacheV, kScaleV, new_row(kNewV, row, h), block, at, h);
        }
    }

private:
    Row new_row(WriteRole role, int64_t row, int64_t h) const {
        const flash_tensor_t& t = call_.view[role];
        Row values;
        for (int64_t c = 0; c < t.shape[2]; ++c)
            values.push_back(problem_.tensor[role].get(row * t.stride[0] + h * t.stride[1] + c));
        return values;
    }

    double rounded(double value) const {
        double rounded = 0;
        libflash::cpu::store_as(static_cast<DType>(problem_.dtype), &rounded, 0, value);
        return libflash::cpu::load_as(static_cast<DType>(problem_.dtype), &rounded, 0);
    }

    Row rotated(Row values, int64_t row) const {
        if (!problem_.rotated()) return values;
        const Tensor &cos = problem_.tensor[kTableCos], &sin = problem_.tensor[kTableSin];
        const int64_t pairs = cos.view.shape[1], position = static_cast<const int32_t*>(call_.view[kRowPositions].data)[row];
        const bool interleaved = (problem_.options.flags & FLASH_FLAG_ROTARY_INTERLEAVED) != 0;
        for (int64_t n = 0; n < pairs; ++n) {
            const double c = cos.get(position * cos.view.stride[0] + n), s = sin.get(position * sin.view.stride[0] + n);
            double& x = values[static_cast<size_t>(interleaved ? 2 * n : n)];
            double& y = values[static_cast<size_t>(interleaved ? 2 * n + 1 : n + pairs)];
            const double old_x = x, old_y = y;
            x = rounded(old_x * c - old_y * s), y = rounded(old_x * s + old_y * c);
        }
        return values;
    }

    int64_t first_of(WriteRole role, int64_t block, int64_t row, int64_t h) const {
        const flash_tensor_t& t = call_.view[role];
        return block * t.stride[0] + row * t.stride[1] + h * t.stride[2];
    }

    void copy(WriteRole role, const Row& values, int64_t block, int64_t row, int64_t h) const {
        const flash_tensor_t& t = call_.view[role];
        for (int64_t c = 0; c < t.shape[3]; ++c)
            libflash::cpu::store_as(static_cast<DType>(t.dtype), t.data, first_of(role, block, row, h) + c,
                                    values[static_cast<size_t>(c)]);
    }

    // Of a group of channels; computed if rows have scales of their own.
    float scale_of(WriteRole role, const double* values, int64_t count, int64_t offset) const {
        Tensor& scale = stored_.tensor[role];
        if (scale.view.ndim > 2) {
            float largest = 0;
            bool nan = false;
            for (int64_t c = 0; c < count; ++c) {
                nan = nan || std::isnan(values[c]);
                if (std::fabs(values[c]) > largest) largest = static_cast<float>(std::fabs(values[c]));
            }
            scale.set(offset, nan && codes_.integers ? std::nan("") : largest / codes_.largest());
        }
        return static_cast<float>(scale.get(offset));
    }

    void store(WriteRole role, WriteRole scale_role, Row values, int64_t block, int64_t row, int64_t h) const {
        const flash_tensor_t& s = call_.view[scale_role];
        const bool scaled = call_.given[scale_role], of_rows = scaled && s.ndim > 2;
        const int64_t groups = scaled && s.ndim == 4 ? s.shape[3] : 1, count = call_.view[role].shape[3] / groups;
        for (int64_t g = 0; scaled && g < groups; ++g) {
            const int64_t first = of_rows ? first_of(scale_role, block, row, h) + (s.ndim == 4 ? g * s.stride[3] : 0)
                                          : (s.shape[0] > 1 ? h * s.stride[0] : 0);
            double* const group = values.data() + g * count;
            const float scale = scale_of(scale_role, group, count, first);
            for (int64_t c = 0; c < count; ++c)
                if (group[c] != 0)
                    group[c] = problem_.dtype == FLASH_DTYPE_FLOAT64 ? group[c] / scale : static_cast<float>(group[c]) / scale;
        }
        if (!problem_.codes()) return copy(role, values, block, row, h);
        auto* const codes = static_cast<uint8_t*>(call_.view[role].data) + first_of(role, block, row, h);
        for (size_t c = 0; c < values.size(); ++c) codes[c] = codes_.nearest(values[c]);
    }

    const WriteCase& problem_;
    const WriteCall& call_;
    StoredTensors& stored_;
    const Codes codes_;
};

}  // namespace

void write_expected(const WriteCase& problem, const WriteCall& call, StoredTensors& stored) {
    const Expected expected(problem, call, stored);
    for (int64_t row = 0; row < problem.rows; ++row)
        if (problem.writes(row)) expected.write_row(row);
}

}  // namespace fuzz
