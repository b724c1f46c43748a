// The entry point of libFuzzer: runs one input.
#include "target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    fuzz::Bytes bytes(data, size);
    switch (bytes.below(8)) {
        case 0: fuzz::merge_target(bytes); break;
        case 1:
        case 2: fuzz::decode_target(bytes); break;
        case 3:
        case 4: fuzz::tangent_target(bytes); break;
        default: fuzz::attention_target(bytes); break;
    }
    return 0;
}
