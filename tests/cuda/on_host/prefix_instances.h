// The kernel for shared keys that a program runs, chosen by its macros. Used like decode_instances.h.
#pragma once

#include "emulation.h"

#include "cuda/sm90/decode_prefix.cuh"

struct PrefixKernelOfSm90 {
    static constexpr libflash::cuda::KernelConfig config{
        "sm90", libflash::Operation::decode_prefix, "sm90", libflash::cuda::KernelType::DTYPE, HEAD_DIM, HEAD_DIM, PREFIX_TILE,
        ""};
};

extern template int libflash::cuda::launch_decode_prefix<PrefixKernelOfSm90>(const libflash::cuda::DecodePlan&,
                                                                             const libflash::cuda::DecodeParams&, void*);
extern template libflash::cuda::KernelResources libflash::cuda::resources_of_decode_prefix<PrefixKernelOfSm90>(int, int);
