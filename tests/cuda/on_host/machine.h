// The machine that the programs emulate: one header, precompiled and included before each of them (emulated_programs.py). It is
// optimised, because the programs spend most of their time in it; the kernels hardly are, because most of the compilation is
// theirs.
#pragma once

// With the level of the functions that have one of their own, which could not call these inline otherwise.
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
