// Prints the instruction set whose kernels the library chooses on this machine, as CMakeLists.txt of the library writes it.
#include "cpu/isa.cpp"

#include <cstdio>

int main() {
    using namespace libflash::cpu;
    const char* best = "GENERIC";
    if (usable_avx2()) best = "AVX2";
    if (usable_avx512()) best = "AVX512";
    if (usable_avx512bf16()) best = "AVX512BF16";
    if (usable_neon()) best = "NEON";
    if (usable_neonbf16()) best = "NEONBF16";
    std::fputs(best, stdout);
}
