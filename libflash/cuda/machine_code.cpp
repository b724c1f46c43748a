#include "cuda/machine_code.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace libflash::cuda {

namespace {

// One entry of CMake's list, such as "90a-real".
struct Entry {
    int number;
    bool exact;      // 90a
    bool real, ptx;  // machine code, PTX

    Entry(const char* text, size_t length) {
        char* end = nullptr;
        number = static_cast<int>(std::strtol(text, &end, 10));
        exact = *end == 'a';
        if (exact) ++end;
        const size_t left = length - static_cast<size_t>(end - text);
        real = left == 0 || std::strncmp(end, "-real", left) == 0;
        ptx = left == 0 || std::strncmp(end, "-virtual", left) == 0;
    }
    bool runs_real(int arch) const { return real && number / 10 == arch / 10 && number <= arch; }
    bool runs_ptx(int arch) const { return ptx && number <= arch; }
};

template <class Do>
void for_each_word(const char* text, const Do& with_word) {
    while (*text) {
        const size_t length = std::strcspn(text, " ");
        if (length > 0) with_word(text, length);
        text += length + (text[length] ? 1 : 0);
    }
}

// The last of `versions` that is not above `number`, or `number` if there is none.
int version_for(const char* versions, int number) {
    int last = 0;
    for_each_word(versions, [&](const char* text, size_t) {
        const int version = static_cast<int>(std::strtol(text, nullptr, 10));
        if (version <= number) last = std::max(last, version);
    });
    return last > 0 ? last : number;
}

}  // namespace

bool has_code_for(const char* built, int arch, bool only_exact) {
    bool found = false;
    for_each_word(built, [&](const char* text, size_t length) {
        const Entry entry(text, length);
        found = found || (entry.exact ? entry.number == arch : !only_exact && (entry.runs_real(arch) || entry.runs_ptx(arch)));
    });
    return found;
}

int code_version(const char* built, const char* versions, int arch) {
    int real = 0, ptx = 0;
    bool exact = false;
    for_each_word(built, [&](const char* text, size_t length) {
        const Entry entry(text, length);
        if (entry.exact) {
            exact = exact || entry.number == arch;
            return;
        }
        if (entry.runs_real(arch)) real = std::max(real, entry.number);
        if (entry.runs_ptx(arch)) ptx = std::max(ptx, entry.number);
    });
    if (exact) return arch;
    return real > 0 ? version_for(versions, real) : ptx;
}

}  // namespace libflash::cuda
