// Replaces the library's header. Copies complete when they are issued or, with `late_copies`, only when they are waited for. With
// `late_copies` it is an error if a thread ends with copies that it has not waited for: they may overwrite later data.
#pragma once

#include "emulation.h"

namespace libflash::cuda {

// As on the device, addresses count from the beginning of dynamic shared memory; static shared memory is somewhere before or
// after it.
inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulation::dynamic_shared);
}
inline char* shared_pointer(uint64_t address) { return emulation::dynamic_shared + static_cast<int32_t>(address); }
inline void store_shared(uint32_t address, uint32_t x) { std::memcpy(shared_pointer(address), &x, 4); }
inline void store_zeros_16(uint32_t address) { std::memset(shared_pointer(address), 0, 16); }
inline void store_shared_16(uint32_t address, float a, float b, float c, float d) {
    const float x[4] = {a, b, c, d};
    std::memcpy(shared_pointer(address), x, 16);
}
inline float4 load_shared_16(uint32_t address) {
    float4 x;
    std::memcpy(&x, shared_pointer(address), 16);
    return x;
}
inline uint4 load_shared_words(uint32_t address) {
    uint4 x;
    std::memcpy(&x, shared_pointer(address), 16);
    return x;
}
inline void store_shared_words(uint32_t address, const uint4& x) { std::memcpy(shared_pointer(address), &x, 16); }
inline uint32_t load_shared(uint32_t address) {
    uint32_t x;
    std::memcpy(&x, shared_pointer(address), 4);
    return x;
}

struct AsyncCopy {
    uint32_t address;
    const void* global;  // nullptr: zeros
    size_t bytes;

    void done() const {
        if (global) {
            std::memcpy(shared_pointer(address), global, bytes);
        } else {
            std::memset(shared_pointer(address), 0, bytes);
        }
    }
};
extern bool late_copies;
void begin_late_copy(const AsyncCopy& copy);
void commit_late_copies();
void complete_late_copies(size_t pending);  // all groups but the last `pending`

inline void begin_copy(const AsyncCopy& copy) {
    if (late_copies) {
        begin_late_copy(copy);
    } else {
        copy.done();
    }
}
inline void cp_async_16(uint32_t address, const void* global, bool valid) { begin_copy({address, valid ? global : nullptr, 16}); }
inline void cp_async_8(uint32_t address, const void* global, bool valid) { begin_copy({address, valid ? global : nullptr, 8}); }
inline void cp_async_4(uint32_t address, const void* global) { begin_copy({address, global, 4}); }
inline void cp_async_commit() {
    if (late_copies) commit_late_copies();
}
template <int kPending>
void cp_async_wait() {
    if (late_copies) complete_late_copies(kPending);
}

}  // namespace libflash::cuda
