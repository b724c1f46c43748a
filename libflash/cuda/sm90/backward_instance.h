// The template instances of the sm_90a backward kernel, for the plan and for the kernel. No CUDA header.
#pragma once

namespace libflash::cuda {

// What an instance can do.
//   plain    the host knows the lengths
//   ragged   the same with lengths on the device
enum class BackwardInstance { plain, ragged };

constexpr const char* backward_kind_name(BackwardInstance kind) {
    return kind == BackwardInstance::ragged ? "variable lengths" : "plain";
}

constexpr BackwardInstance backward_instance(bool lengths_on_device) {
    return lengths_on_device ? BackwardInstance::ragged : BackwardInstance::plain;
}

}  // namespace libflash::cuda
