// Replaces the library's header: kernels run one after the other.
#pragma once

#include "emulation.h"

namespace libflash::cuda {

template <class... Params>
int launch_clusters(int cluster, void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes, cudaStream_t, bool,
                    const Params&... params) {
    const unsigned resident = shared_bytes > 0 ? emulation::machine.most_resident : 1;
    emulation::launch(
        static_cast<unsigned>(blocks), static_cast<unsigned>(threads), [&] { kernel(params...); }, resident,
        static_cast<unsigned>(cluster));
    return cudaSuccess;
}
template <class... Params>
int launch_dependent(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes, cudaStream_t stream, bool overlap,
                     const Params&... params) {
    return launch_clusters(1, kernel, blocks, threads, shared_bytes, stream, overlap, params...);
}

}  // namespace libflash::cuda
