#include "problem/check.h"

#include <cstdio>

namespace libflash {

const char* dtype_name(DType dtype) {
    switch (dtype) {
        case DType::f16: return "float16";
        case DType::bf16: return "bfloat16";
        case DType::f32: return "float32";
        case DType::f64: return "float64";
        case DType::i32: return "int32";
        case DType::boolean: return "bool";
        case DType::i64: return "int64";
        case DType::e4m3: return "float8_e4m3fn";
        case DType::e5m2: return "float8_e5m2";
        case DType::i8: return "int8";
        default: return "none";
    }
}

void append(std::string& text, const char* part) { text += part; }
void append(std::string& text, const std::string& part) { text += part; }

void append(std::string& text, double part) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.9g", part);
    text += digits;
}

void append(std::string& text, DType part) { text += dtype_name(part); }

void append(std::string& text, const Device& part) {
    text += part.is_cuda() ? "cuda" : "cpu";
    if (part.is_cuda()) text += ":" + std::to_string(part.id);
}

void append(std::string& text, const Sizes& part) {
    text += "(";
    for (int i = 0; i < part.count; ++i) {
        if (i) text += ", ";
        text += std::to_string(part.size[i]);
    }
    text += part.count == 1 ? ",)" : ")";
}

void append(std::string& text, const Argument& part) {
    text += part.name;
    if (part.index >= 0) text += "[" + std::to_string(part.index) + "]";
}

void append_signed(std::string& text, long long part) { text += std::to_string(part); }
void append_unsigned(std::string& text, unsigned long long part) { text += std::to_string(part); }

void refuse(flash_status_t status, const Argument& argument, const char* rule, const std::string& value) {
    std::string text = text_of(argument, ": ", rule);
    if (!value.empty()) text += " (" + value + ")";
    throw Error(status, text);
}

}  // namespace libflash
