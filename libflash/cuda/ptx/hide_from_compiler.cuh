// A value that the compiler knows nothing about.
#pragma once

namespace libflash::cuda {

// What is computed from the result is computed where it stands, not once ahead of a loop and then kept in registers.
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
