// The decode kernel of sm80 that a program runs, by its macros. decode_instances.cpp has its code, which is compiled once for all
// programs that run the same kernel.
#pragma once

#include "emulation.h"

#include "cuda/sm80/decode.cuh"

struct DecodeKernel {
    static constexpr libflash::cuda::KernelConfig config{
        "decode", libflash::Operation::decode, "sm80", libflash::cuda::KernelType::DTYPE, KERNEL_DIMS, DECODE_TILE, ""};
};

extern template int libflash::cuda::launch_decode<DecodeKernel>(const libflash::cuda::DecodePlan&,
                                                                const libflash::cuda::DecodeParams&, void*);
extern template libflash::cuda::KernelResources libflash::cuda::resources_of_decode<DecodeKernel>(int, int);
