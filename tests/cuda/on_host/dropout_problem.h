// Dropout of the programs that run kernels on the host, as the library passes it to kernels.
#pragma once

#include "cuda/host/problem_params.h"

inline libflash::Dropout dropout_of(double p) {
    libflash::Dropout dropout;
    dropout.p = p, dropout.seed = 17 | uint64_t{4} << 32, dropout.offset = 9;
    return dropout;
}
