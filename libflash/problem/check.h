// Refusals: to refuse a call is to throw an Error with a status and a message of the form "argument: rule (value)". A check is an
// `if` around a call of invalid(), so a correct call costs one comparison and formats no text. The rule must be a string literal
// at the call, because tests/capi/test_bad_input_coverage.py reads these calls from the source and requires a test of each.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "problem/error.h"
#include "problem/tensor.h"

namespace libflash {

// The caller's name of the argument that is wrong: "q", "block_lists.row_counts", "outs[3]".
struct Argument {
    const char* name;
    int index = -1;
    Argument(const char* argument) : name(argument) {}  // NOLINT: a name is an argument
    Argument(const char* argument, int position) : name(argument), index(position) {}
};

struct Sizes {
    const int64_t* size;
    int count;
};

const char* dtype_name(DType dtype);

void append(std::string& text, const char* part);
void append(std::string& text, const std::string& part);
void append(std::string& text, double part);
void append(std::string& text, DType part);
void append(std::string& text, const Device& part);
void append(std::string& text, const Sizes& part);  // "(2, 4, 16)"
void append(std::string& text, const Argument& part);
void append_signed(std::string& text, long long part);
void append_unsigned(std::string& text, unsigned long long part);

template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
void append(std::string& text, T part) {
    if constexpr (std::is_signed_v<T>) {
        append_signed(text, part);
    } else {
        append_unsigned(text, part);
    }
}

template <class... Parts>
std::string text_of(const Parts&... parts) {
    std::string text;
    (append(text, parts), ...);
    return text;
}

// For functions that return whether something is accepted: writes the reason to `why`, unless `why` is nullptr, and returns
// false.
template <class... Parts>
bool reject(std::string* why, const Parts&... reason) {
    if (why) *why = text_of(reason...);
    return false;
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse(flash_status_t status, const Argument& argument, const char* rule,
                                                   const std::string& value);

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void invalid(const Argument& argument, const char* rule, const Parts&... value) {
    refuse(FLASH_STATUS_INVALID, argument, rule, text_of(value...));
}

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void unknown_version(const Argument& argument, const char* rule, const Parts&... value) {
    refuse(FLASH_STATUS_VERSION, argument, rule, text_of(value...));
}

}  // namespace libflash
