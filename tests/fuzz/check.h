// Failure reports of the target, and the comparison of results with the reference.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "memory.h"

// A failed check ends the process, so that the fuzzer keeps the input.
#define FUZZ_CHECK(condition, ...)                                               \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            std::fprintf(stderr, __VA_ARGS__);                                   \
            std::fputc('\n', stderr);                                            \
            std::abort();                                                        \
        }                                                                        \
    } while (0)

namespace fuzz {

inline void check_status(flash_status_t got, flash_status_t expected, const char* what) {
    FUZZ_CHECK(got == expected, "%s gave %s, expected %s; the text is \"%s\"", what, flash_status_name(got),
               flash_status_name(expected), flash_last_error());
    FUZZ_CHECK((got == FLASH_STATUS_OK) == (flash_last_error()[0] == '\0'), "%s: text \"%s\"", what, flash_last_error());
}

// What the tensors of a problem hold before a call that must be refused.
template <int kTensors>
class Contents {
public:
    explicit Contents(const Tensor (&tensors)[kTensors]) : tensors_(tensors) {
        for (int n = 0; n < kTensors; ++n)
            if (tensors[n].present()) before_[n] = tensors[n].bytes();
    }
    void check_unchanged(const std::string& what) const {
        for (int n = 0; n < kTensors; ++n)
            FUZZ_CHECK(tensors_[n].holds(before_[n]), "tensor %d was written by a refused call: %s", n, what.c_str());
    }

private:
    const Tensor (&tensors_)[kTensors];
    std::vector<char> before_[kTensors];
};

inline bool poisoned(const char* element, int64_t size) {
    for (int64_t n = 0; n < size; ++n)
        if (element[n] != '\xff') return false;
    return true;
}

// Checks that elements are within relative * |reference| + absolute, that bytes which the reference did not write are unchanged,
// and that NaN is where the reference has NaN.
inline void check_close(const Tensor& got, const Tensor& expected, double relative, double absolute, const char* what) {
    if (!expected.present()) return;
    const int64_t size = bytes_of(expected.view.dtype);
    std::vector<char> rest = got.bytes(), expected_rest = expected.bytes();
    each_element(expected.view, [&](int64_t offset) {
        const size_t at = expected.lead_bytes() + static_cast<size_t>(offset * size);
        if (!poisoned(&expected_rest[at], size)) {
            const double x = got.get(offset), t = expected.get(offset);
            const bool good = std::isnan(t) ? std::isnan(x) : x == t || std::fabs(x - t) <= relative * std::fabs(t) + absolute;
            FUZZ_CHECK(good, "%s at offset %lld: %.17g, expected %.17g, off by %.3g, bound %.3g", what,
                       static_cast<long long>(offset), x, t, std::fabs(x - t), relative * std::fabs(t) + absolute);
            std::memcpy(&rest[at], &expected_rest[at], static_cast<size_t>(size));
        }
    });
    FUZZ_CHECK(rest == expected_rest, "%s: bytes were written that belong to no element that has a value", what);
}

// The rounding errors of a dtype, a coarse version of the tolerance rule (conformance/tolerance.py): it uses the largest values
// that can occur instead of the actual ones. Coarse for the 16-bit types, sharp for float and double.
struct Rounding {
    double u;     // of the storage type
    double sums;  // of sums and functions in the accumulation type: 2^-21 for float
    double tiny;  // underflow of the storage type and of probabilities rounded to it

    explicit Rounding(int32_t dtype)
        : u(dtype == FLASH_DTYPE_BFLOAT16  ? 0x1p-8
            : dtype == FLASH_DTYPE_FLOAT16 ? 0x1p-11
            : dtype == FLASH_DTYPE_FLOAT32 ? 0x1p-24
                                           : 0x1p-53),
          sums(dtype == FLASH_DTYPE_FLOAT64 ? 0x1p-50 : 0x1p-21), tiny(dtype == FLASH_DTYPE_FLOAT16 ? 0x1p-24 : 0x1p-126) {}

    double sum(double n) const { return sums * std::sqrt(n) + n * sums / 128; }
};

// The largest magnitudes in a problem.
struct Magnitudes {
    double q = 1, k = 1, v = 1, dout = 1, dlse = 0;
    double scale = 1, softcap = 0, added = 0;  // added to the scores: alibi, bias
    double sink = 0;
    double keep = 1;  // the factor of dropout
    double head_dim = 1, head_dim_v = 1, rows = 1, keys = 1, group = 1;
};

struct ErrorBounds {
    double o, lse, dq, dk, dv, ds;  // absolute parts; ds: one sum over a row or column of the score gradients

    ErrorBounds(const Rounding& r, const Magnitudes& m) {
        const double product = std::fabs(m.scale) * m.head_dim * m.q * m.k;
        const double capped = m.softcap > 0 && m.softcap < product ? m.softcap : product;
        const double score =
            r.sum(m.head_dim) * product + r.sums * (capped + m.added + m.sink + 1) + r.sums * m.softcap * (product > 0);
        const double p = std::expm1(2 * score);
        const double dp = m.keep * m.head_dim_v * m.dout * m.v, delta = dp + m.dlse;
        const double longest = m.rows > m.keys ? m.rows : m.keys;
        o = (2 * r.u + r.sum(m.keys) + p) * m.v * m.keep + r.tiny * m.keys * m.v + r.tiny;
        lse = score + r.sum(m.keys);
        ds = (r.u + r.sum(longest) + p + 2 * r.sums + 2 * r.sum(m.head_dim_v)) * (dp + delta) + r.tiny * longest;
        dq = std::fabs(m.scale) * m.k * ds + r.tiny;
        dk = std::fabs(m.scale) * m.q * m.rows * m.group * ds + r.tiny;
        dv = m.rows * m.group * m.dout * ((r.u + r.sum(m.rows) + p) * m.keep + r.tiny) + r.tiny;
    }
};

}  // namespace fuzz
