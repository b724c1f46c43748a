// The operations of the library; all layers use this type.
#pragma once

#include <cstdint>

namespace libflash {

// prefill and decode_prefix are parts of a decode call that have separate kernels on some GPUs: prefill computes long chunks, the
// sequences with many query rows; decode_prefix computes the keys that sequences share.
enum class Operation : int32_t {
    forward,
    backward,
    decode,
    merge,
    compress,
    forward_tangent,
    backward_tangent,
    cache_write,
    prefill,
    decode_prefix
};
constexpr int kOperations = static_cast<int>(Operation::decode_prefix) + 1;

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
        case Operation::decode_prefix: return "decode_prefix";
        default: return "compress";
    }
}

}  // namespace libflash
