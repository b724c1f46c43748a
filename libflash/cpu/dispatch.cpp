// The kernels of the CPU backend in this build, in order of preference, and the default number of threads.
//
// CMake compiles the engine once per instruction set and defines LIBFLASH_ISA_<NAME>=1 for each one it compiled.
#include <cerrno>
#include <cstdlib>
#include <thread>

#include "cpu/kernels.h"

namespace libflash::cpu {

extern const Kernels kernels_avx512bf16, kernels_avx512, kernels_avx2, kernels_generic, kernels_scalar;

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
#if defined(LIBFLASH_ISA_GENERIC) && LIBFLASH_ISA_GENERIC
    &kernels_generic,
#endif
    &kernels_scalar,
};
constexpr int kCount = static_cast<int>(sizeof(kTable) / sizeof(kTable[0]));

constexpr int kMostThreads = 1024;

// LIBFLASH_NUM_THREADS if it is a whole positive number, else every processor this process may use.
int count_threads() {
    if (const char* text = std::getenv("LIBFLASH_NUM_THREADS")) {
        char* end = nullptr;
        errno = 0;
        const long given = std::strtol(text, &end, 10);
        if (end != text && *end == '\0' && errno == 0 && given > 0)
            return given < kMostThreads ? static_cast<int>(given) : kMostThreads;
    }
    const unsigned processors = std::thread::hardware_concurrency();  // 0: not known
    return processors ? static_cast<int>(processors) : 1;
}

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

// Read once: reading the environment while another thread writes it is undefined.
int default_threads() {
    static const int threads = count_threads();
    return threads;
}

}  // namespace libflash::cpu
