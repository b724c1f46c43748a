// Prints the instruction sets that this machine can run, separated by semicolons, as CMakeLists.txt of the library writes them.
// The last one is that of the kernels that the library chooses.
#include "cpu/isa.cpp"

#include <cstdio>

int main() {
    using namespace libflash::cpu;
    std::fputs("GENERIC", stdout);
    if (usable_avx2()) std::fputs(";AVX2", stdout);
    if (usable_avx512()) std::fputs(";AVX512", stdout);
    if (usable_avx512bf16()) std::fputs(";AVX512BF16", stdout);
    if (usable_neon()) std::fputs(";NEON", stdout);
    if (usable_neonbf16()) std::fputs(";NEONBF16", stdout);
}
