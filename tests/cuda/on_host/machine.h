// The emulation of the machine: one header, precompiled and included before each program (emulated_programs.py). It is compiled
// with -O3, because the programs spend most of their time in it. The kernels are compiled with -Og, because they take most of the
// compilation time.
#pragma once

// Some functions set -O3 by an attribute (numbers.h, exact_sums.h). With the same level these functions can be inlined there.
#pragma GCC push_options
#pragma GCC optimize("O3")

#include "emulation.h"

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/codes.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma_f64.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/ptx/movmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "numbers.h"

#pragma GCC pop_options
