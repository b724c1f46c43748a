// The table of architectures, which CMake makes from kernels.table.
#include "cuda/architecture.h"

#include <cstring>

#include "problem/error.h"

namespace libflash::cuda {

#define LIBFLASH_CUDA_ARCHITECTURE(name) extern const Architecture architecture_##name;
#include "cuda_architectures.inc"
#undef LIBFLASH_CUDA_ARCHITECTURE

namespace {

const Architecture* const kTable[] = {
#define LIBFLASH_CUDA_ARCHITECTURE(name) &architecture_##name,
#include "cuda_architectures.inc"
#undef LIBFLASH_CUDA_ARCHITECTURE
};

}  // namespace

const Architecture& find_architecture(const char* name) {
    for (const Architecture* architecture : kTable) {
        if (std::strcmp(architecture->name, name) == 0) return *architecture;
    }
    throw Error(FLASH_STATUS_INTERNAL, std::string("no architecture ") + name);
}

}  // namespace libflash::cuda
