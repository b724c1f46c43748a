// The outputs that a call with these inputs would have. explain needs them because its caller gives no outputs.
#pragma once

#include "libflash.h"

namespace libflash {

struct OutputShapes {
    flash_tensor_t out, lse, dq, dk, dv;  // contiguous, without data
    OutputShapes(const flash_tensor_t* q, const flash_tensor_t* k, const flash_tensor_t* v, const char* k_name = "k",
                 const char* v_name = "v");
    // Gives the gradients the type that FLASH_FLAG_ADD requires: FLOAT32, also with 16-bit inputs.
    void widen_gradients();
};

}  // namespace libflash
