// The decode kernel that a program runs, chosen by its macros: of sm80 or, with DECODE_SM90, of sm90. decode_instances.cpp has
// its code, which is compiled once for all programs that run the same kernel.
#pragma once

#include "emulation.h"

#ifdef DECODE_SM90
#include "cuda/sm90/decode.cuh"
#define DECODE_FOLDER "sm90"
namespace folder = libflash::cuda::sm90;
#else
#include "cuda/sm80/decode.cuh"
#define DECODE_FOLDER "sm80"
namespace folder = libflash::cuda::sm80;
#endif

struct DecodeKernel {
    static constexpr libflash::cuda::KernelConfig config{
        "decode", libflash::Operation::decode, DECODE_FOLDER, libflash::cuda::KernelType::DTYPE, KERNEL_DIMS, DECODE_TILE, ""};
};

extern template int libflash::cuda::launch_decode<DecodeKernel>(const libflash::cuda::DecodePlan&,
                                                                const libflash::cuda::DecodeParams&, void*);
extern template libflash::cuda::KernelResources libflash::cuda::resources_of_decode<DecodeKernel>(int, int);
