// Stands for the library's header of that name: copies are done when they are asked for.
#pragma once

#include "emulation.h"

namespace libflash::cuda {

// As on the device, addresses count from the beginning of shared memory; static shared memory lies somewhere before or behind.
inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulation::dynamic_shared);
}
inline char* shared_pointer(uint64_t address) { return emulation::dynamic_shared + static_cast<int32_t>(address); }
inline void store_shared(uint32_t address, uint32_t x) { std::memcpy(shared_pointer(address), &x, 4); }
inline uint32_t load_shared(uint32_t address) {
    uint32_t x;
    std::memcpy(&x, shared_pointer(address), 4);
    return x;
}

inline void cp_async_16(uint32_t address, const void* global, bool valid) {
    if (valid) {
        std::memcpy(shared_pointer(address), global, 16);
    } else {
        std::memset(shared_pointer(address), 0, 16);
    }
}
inline void cp_async_commit() {}
template <int>
void cp_async_wait() {}

}  // namespace libflash::cuda
