// The CPU kernels of this build, in order of preference. CMake compiles the engine once for each instruction set and defines
// LIBFLASH_ISA_<NAME>=1 for each one it compiled.
#include "cpu/kernels.h"

namespace libflash::cpu {

extern const Kernels kernels_avx512bf16, kernels_avx512, kernels_avx2, kernels_neonbf16, kernels_neon, kernels_generic,
    kernels_scalar;

namespace {

const Kernels* const kTable[] = {
#if defined(LIBFLASH_ISA_AVX512BF16) && LIBFLASH_ISA_AVX512BF16
    &kernels_avx512bf16,
#endif
#if defined(LIBFLASH_ISA_AVX512) && LIBFLASH_ISA_AVX512
    &kernels_avx512,
#endif
#if defined(LIBFLASH_ISA_AVX2) && LIBFLASH_ISA_AVX2
    &kernels_avx2,
#endif
#if defined(LIBFLASH_ISA_NEONBF16) && LIBFLASH_ISA_NEONBF16
    &kernels_neonbf16,
#endif
#if defined(LIBFLASH_ISA_NEON) && LIBFLASH_ISA_NEON
    &kernels_neon,
#endif
#if defined(LIBFLASH_ISA_GENERIC) && LIBFLASH_ISA_GENERIC
    &kernels_generic,
#endif
    &kernels_scalar,
};
constexpr int kCount = static_cast<int>(sizeof(kTable) / sizeof(kTable[0]));

const Kernels& find_best() {
    for (const Kernels* kernels : kTable)
        if (kernels->usable()) return *kernels;
    return kernels_scalar;
}

}  // namespace

const Kernels* const* all_kernels(int* count) {
    *count = kCount;
    return kTable;
}

const Kernels& best_kernels() {
    static const Kernels& best = find_best();
    return best;
}

}  // namespace libflash::cpu
