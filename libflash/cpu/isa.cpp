#include "cpu/isa.h"

namespace libflash::cpu {

bool usable_always() { return true; }

#if defined(__x86_64__) || defined(__i386__)

// The builtin also asks whether the operating system saves the wide registers.
bool usable_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }

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
