// The template instances of the sm_90a backward kernel, for the plan and for the kernel. No CUDA header.
#pragma once

namespace libflash::cuda {

// What an instance can do.
//   plain     the host knows the lengths
//   ragged    the same with lengths on the device
//   general   all of that, and block masks, softcap, ALiBi, bias, mask, dropout
enum class BackwardInstance { plain, ragged, general };

constexpr const char* backward_kind_name(BackwardInstance kind) {
    switch (kind) {
        case BackwardInstance::plain: return "plain";
        case BackwardInstance::ragged: return "variable lengths";
        default: return "general";
    }
}

constexpr BackwardInstance backward_instance(bool general, bool lengths_on_device) {
    if (general) return BackwardInstance::general;
    return lengths_on_device ? BackwardInstance::ragged : BackwardInstance::plain;
}

}  // namespace libflash::cuda
