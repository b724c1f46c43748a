// Compares the vector functions of one instruction set (-DLIBFLASH_ISA=... and its flags) with double: the largest error of exp2
// on [-150, 0] and of tanh on all floats in units in the last place; the rounding of vectors to fp16 and bf16 must equal
// cpu/convert.h bit for bit.
//
//   test_functions [step]     tests every step-th bit pattern; 1: all
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "cpu/engine/exp.h"
#include "cpu/engine/storage.h"

namespace isa = libflash::cpu::LIBFLASH_ISA;
using libflash::cpu::bfloat16;
using libflash::cpu::float_of_bits;
using libflash::cpu::half;

namespace {

constexpr int L = isa::kLanes<float>;

// Distance of neighbouring floats at a magnitude; in the subnormal range that of subnormals.
double unit_of(double exact) {
    int exponent = 0;
    std::frexp(exact, &exponent);
    return std::ldexp(1.0, exponent - 24 < -149 ? -149 : exponent - 24);
}

struct Worst {
    double ulp = 0;
    float at = 0;
    uint64_t count = 0, wrong = 0;

    void see(float x, float got, double exact) {
        ++count;
        const double error = std::fabs(static_cast<double>(got) - exact) / unit_of(exact);
        if (!(error <= ulp)) ulp = error, at = x;
    }
    bool print(const char* name, double limit) const {
        std::printf("%s: %llu floats, largest error %.3f ulp at %.9g (limit %.1f)\n", name,
                    static_cast<unsigned long long>(count), ulp, static_cast<double>(at), limit);
        return ulp <= limit;
    }
};

// Calls see(x, vector function of x) for floats with bits first, first + step, ... up to last.
template <class Function, class See>
void each_float(uint64_t first, uint64_t last, uint64_t step, const Function& function, const See& see) {
    for (uint64_t bits = first; bits <= last; bits += step * L) {
        float x[L], y[L];
        for (int i = 0; i < L; ++i) {
            const uint64_t at = bits + static_cast<uint64_t>(i) * step;
            x[i] = float_of_bits(static_cast<uint32_t>(at <= last ? at : last));
        }
        isa::store(y, function(isa::load(x)));
        for (int i = 0; i < L; ++i) see(x[i], y[i]);
    }
}

bool test_exp2(uint64_t step) {
    Worst worst;
    each_float(
        0x80000000u, 0xc3160000u, step, [](isa::F32 x) { return isa::exp2<float>(x); },
        [&](float x, float y) { worst.see(x, y, std::exp2(static_cast<double>(x))); });
    float ends[L] = {-HUGE_VALF, 0, -1000, std::nanf("")}, y[L];
    isa::store(y, isa::exp2<float>(isa::load(ends)));
    const bool good = y[0] == 0 && y[1] == 1 && y[2] == 0 && std::isnan(y[3]);
    if (!good) std::printf("exp2 of -inf, 0, -1000, NaN: %g %g %g %g\n", double(y[0]), double(y[1]), double(y[2]), double(y[3]));
    return worst.print("exp2 on [-150, 0]", 2.0) && good;
}

bool test_tanh(uint64_t step) {
    Worst worst;
    for (const uint64_t sign : {uint64_t{0}, uint64_t{0x80000000u}})
        each_float(
            sign, sign | 0x7f800000u, step, [](isa::F32 x) { return isa::tanh<float>(x); },
            [&](float x, float y) { worst.see(x, y, std::tanh(static_cast<double>(x))); });
    return worst.print("tanh", 4.0);
}

template <class T>
bool test_rounding(const char* name, uint64_t step) {
    uint64_t wrong = 0, count = 0;
    for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += step * L) {
        float x[L];
        T got[L], wanted;
        for (int i = 0; i < L; ++i) x[i] = float_of_bits(static_cast<uint32_t>(bits + static_cast<uint64_t>(i) * step));
        isa::store_narrow(got, isa::load(x));
        float back[L];
        isa::store(back, isa::load_wide(got));
        for (int i = 0; i < L; ++i, ++count) {
            libflash::cpu::store(wanted, static_cast<double>(x[i]));
            const float exact = libflash::cpu::widen(wanted);
            const bool same = std::isnan(x[i]) ? std::isnan(back[i]) : got[i].bits == wanted.bits && back[i] == exact;
            wrong += !same;
        }
    }
    std::printf("vectors to %s and back: %llu floats, %llu wrong\n", name, static_cast<unsigned long long>(count),
                static_cast<unsigned long long>(wrong));
    return wrong == 0;
}

#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)

}  // namespace

int main(int argc, char** argv) {
    const long given = argc > 1 ? std::atol(argv[1]) : 61;
    const auto step = static_cast<uint64_t>(given > 0 ? given : 1);
    std::printf("%s, every %llu-th\n", TEXT(LIBFLASH_ISA), static_cast<unsigned long long>(step));
    bool good = test_exp2(step);
    good = test_tanh(step) && good;
    good = test_rounding<half>("fp16", step) && good;
    good = test_rounding<bfloat16>("bf16", step) && good;
    return good ? 0 : 1;
}
