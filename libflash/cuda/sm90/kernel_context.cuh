// The context that all parts of a kernel use: its parameters, tensor maps and shared memory. Each part holds a reference to the
// context. (If a part held a reference to another part, the compiler would not keep both in registers.)
#pragma once

namespace libflash::cuda::sm90 {

template <class Params, class TensorMaps, class SharedStorage, class SharedTiles>
struct KernelContext {
    const Params& params;
    const TensorMaps& maps;
    SharedStorage& storage;
    const SharedTiles tiles;

    // `memory`: dynamic shared memory, aligned as tiles are. The storage follows the tiles.
    __device__ __forceinline__ KernelContext(const Params& p, const TensorMaps& m, char* memory)
        : params(p), maps(m), storage(*reinterpret_cast<SharedStorage*>(memory + SharedTiles::kBytes)), tiles{memory} {}
};

// The dynamic shared memory that a launch needs: tiles, storage, and padding to align the tiles.
template <class SharedStorage, class SharedTiles, int kAlignment>
constexpr int shared_bytes_of_kernel() {
    constexpr int kBytes = SharedTiles::kBytes + static_cast<int>(sizeof(SharedStorage)) + kAlignment;
    static_assert(kBytes <= 227 * 1024, "a thread block has 227 KB");
    return kBytes;
}

}  // namespace libflash::cuda::sm90
