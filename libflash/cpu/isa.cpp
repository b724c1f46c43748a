#include "cpu/isa.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
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

bool usable_avx512bf16() {
    return usable_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}

#else

bool usable_avx2() { return false; }
bool usable_avx512() { return false; }
bool usable_avx512bf16() { return false; }

#endif

#if defined(__aarch64__)

bool usable_neon() { return true; }

// The bits are those of the Linux kernel, of which older headers lack some. The compiler may use everything of Armv8.2 too.
bool usable_neonbf16() {
    constexpr unsigned long crc32 = 1UL << 7, atomics = 1UL << 8, rdm = 1UL << 12, armv82 = crc32 | atomics | rdm;
    constexpr unsigned long bf16 = 1UL << 14;
    return (getauxval(AT_HWCAP) & armv82) == armv82 && (getauxval(AT_HWCAP2) & bf16) != 0;
}

#else

bool usable_neon() { return false; }
bool usable_neonbf16() { return false; }

#endif

}  // namespace libflash::cpu
