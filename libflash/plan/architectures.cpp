#include "plan/architectures.h"

#include <cstdlib>
#include <cstring>

namespace libflash {

namespace {

bool covers(const char* entry, size_t length, int arch, bool only_specific) {
    char* end = nullptr;
    const int number = static_cast<int>(std::strtol(entry, &end, 10));
    const bool specific = *end == 'a';
    if (specific) return number == arch;
    if (only_specific) return false;
    const size_t left = length - static_cast<size_t>(end - entry);
    const bool real = left == 0 || std::strncmp(end, "-real", left) == 0;
    const bool ptx = left == 0 || std::strncmp(end, "-virtual", left) == 0;
    return (real && number / 10 == arch / 10 && number <= arch) || (ptx && number <= arch);
}

}  // namespace

bool has_code_for(const char* built, int arch, bool only_specific) {
    for (const char* entry = built; *entry;) {
        const size_t length = std::strcspn(entry, " ");
        if (length > 0 && covers(entry, length, arch, only_specific)) return true;
        entry += length + (entry[length] ? 1 : 0);
    }
    return false;
}

}  // namespace libflash
