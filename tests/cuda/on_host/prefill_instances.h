// The prefill kernel that a program runs, chosen by its macros. Used like decode_instances.h.
#pragma once

#include "emulation.h"

#include "cuda/sm90/prefill.cuh"

#ifndef PREFILL_DIMS  // where HEAD_DIM is not that of the kernel
#define PREFILL_DIMS HEAD_DIM, HEAD_DIM_V
#endif

struct PrefillKernel {
    static constexpr libflash::cuda::KernelConfig config{
        "prefill", libflash::Operation::prefill, "sm90", libflash::cuda::KernelType::DTYPE, PREFILL_DIMS, PREFILL_TILE, ""};
};

extern template int libflash::cuda::launch_prefill<PrefillKernel>(const libflash::cuda::PrefillPlan&,
                                                                  const libflash::cuda::PrefillParams&, void*);
extern template libflash::cuda::KernelResources libflash::cuda::resources_of_prefill<PrefillKernel>(int, int);
