// Stands for the library's header of that name.
#pragma once

namespace libflash::cuda {

inline int opaque(int value) { return value; }
template <class T>
T* opaque(T* pointer) {
    return pointer;
}

}  // namespace libflash::cuda
