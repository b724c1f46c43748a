// Prints the instruction set whose kernels the library chooses on this machine, as CMakeLists.txt of the library writes it.
#include "cpu/isa.cpp"

#include <cstdio>

int main() {
    using namespace libflash::cpu;
    std::fputs(usable_avx512bf16() ? "AVX512BF16" : usable_avx512() ? "AVX512" : usable_avx2() ? "AVX2" : "GENERIC", stdout);
}
