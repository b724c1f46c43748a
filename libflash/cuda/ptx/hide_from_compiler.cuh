// Values whose origin is hidden from the compiler.
#pragma once

namespace libflash::cuda {

// The compiler cannot hoist computations that depend on the result out of a loop, where it would keep their results in registers.
__device__ __forceinline__ int hide_from_compiler(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

template <class T>
__device__ __forceinline__ T* hide_from_compiler(T* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
}

}  // namespace libflash::cuda
