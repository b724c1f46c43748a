#include <cstring>

#include "capi/guard.h"

namespace libflash {

namespace {

constexpr size_t kCapacity = 2048;
thread_local char last_text[kCapacity];

}  // namespace

void set_last_error(const char* text) noexcept {
    const size_t length = std::strlen(text);
    const size_t kept = length < kCapacity ? length : kCapacity - 1;
    std::memcpy(last_text, text, kept);
    last_text[kept] = '\0';
    if (kept < length) std::memcpy(last_text + kCapacity - 4, "...", 3);
}

const char* last_error() noexcept { return last_text; }

}  // namespace libflash

extern "C" const char* flash_last_error(void) { return libflash::last_error(); }
