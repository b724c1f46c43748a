// The operations of the library; all layers use this type.
#pragma once

#include <cstdint>

namespace libflash {

// prefill: the long chunks of a decode call, which have kernels of their own on some GPUs.
enum class Operation : int32_t {
    forward,
    backward,
    decode,
    merge,
    compress,
    forward_tangent,
    backward_tangent,
    cache_write,
    prefill
};

constexpr const char* operation_name(Operation operation) {
    switch (operation) {
        case Operation::forward: return "forward";
        case Operation::backward: return "backward";
        case Operation::decode: return "decode";
        case Operation::merge: return "merge";
        case Operation::forward_tangent: return "forward_tangent";
        case Operation::backward_tangent: return "backward_tangent";
        case Operation::cache_write: return "cache_write";
        case Operation::prefill: return "prefill";
        default: return "compress";
    }
}

}  // namespace libflash
