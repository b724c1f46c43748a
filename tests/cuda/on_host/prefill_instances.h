// The prefill kernel that a program runs, by its macros; as decode_instances.h.
#pragma once

#include "emulation.h"

#include "cuda/sm90/prefill.cuh"

struct PrefillKernel {
    static constexpr libflash::cuda::KernelConfig config{
        "prefill", libflash::Operation::prefill, "sm90", libflash::cuda::KernelType::DTYPE, HEAD_DIM, HEAD_DIM_V, PREFILL_TILE,
        ""};
};

extern template int libflash::cuda::launch_prefill<PrefillKernel>(const libflash::cuda::PrefillPlan&,
                                                                  const libflash::cuda::PrefillParams&, void*);
extern template libflash::cuda::KernelResources libflash::cuda::resources_of_prefill<PrefillKernel>(int, int);
