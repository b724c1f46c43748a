#include "cpu/isa.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

namespace libflash::cpu {

bool usable_always() { return true; }

#if defined(__x86_64__) || defined(__i386__)

// __builtin_cpu_supports does not know F16C in all compilers. F16C needs no operating system support beyond that of AVX2.
static bool has_f16c() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1) != 0;
}

// The builtin also checks that the operating system saves the wide registers.
bool usable_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

bool usable_avx512() {
    return usable_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool usable_avx512bf16() { return usable_avx512() && __builtin_cpu_supports("avx512bf16"); }

#else

bool usable_avx2() { return false; }
bool usable_avx512() { return false; }
bool usable_avx512bf16() { return false; }

#endif

}  // namespace libflash::cpu
