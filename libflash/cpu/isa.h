// The instruction sets that this processor and its operating system support. These functions are compiled without any of those
// instruction sets, hence apart from the engine.
#pragma once

namespace libflash::cpu {

bool usable_always();      // "generic" and "scalar"
bool usable_avx2();        // AVX2, FMA, F16C
bool usable_avx512();      // AVX-512 F, BW, VL, DQ and what "avx2" needs
bool usable_avx512bf16();  // what "avx512" needs, the bf16 dot product, and AVX512_VBMI
bool usable_neon();        // every 64-bit Arm processor
bool usable_neonbf16();    // Armv8.2 and the bf16 products (FEAT_BF16)

}  // namespace libflash::cpu
