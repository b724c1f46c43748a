// The entry point of libFuzzer: runs one input.
#include "target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    fuzz::Bytes bytes(data, size);
    // The inputs in corpus/ keep their operation: a new one takes a number that none of them has.
    switch (bytes.below(9)) {
        case 0: fuzz::merge_target(bytes); break;
        case 2:
        case 3: fuzz::decode_target(bytes); break;
        case 4:
        case 5: fuzz::tangent_target(bytes); break;
        case 6: fuzz::cache_write_target(bytes); break;
        default: fuzz::attention_target(bytes); break;
    }
    return 0;
}
