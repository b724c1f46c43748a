// One line of explain's text: a label of 12 columns, then the value.
#pragma once

#include <string>

#include "problem/check.h"

namespace libflash {

// "kernel      forward_cpu_avx512"
template <class... Parts>
void line(std::string& text, const char* label, const Parts&... parts) {
    std::string start = label;
    start.resize(12, ' ');
    text += start + text_of(parts...) + "\n";
}

}  // namespace libflash
