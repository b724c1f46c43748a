// Divides the workspace into arrays. The function that allocates the arrays also computes the size: with a null pointer the
// arena only counts bytes.
#pragma once

#include "cpu/engine/vector.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

class Arena {
public:
    explicit Arena(void* memory) : base_(static_cast<char*>(memory)) {}

    template <class T>
    T* allocate(int64_t count) {
        T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
        used_ = (used_ + static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
        return piece;
    }
    size_t used() const { return used_; }

private:
    char* base_;
    size_t used_ = 0;
};

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
