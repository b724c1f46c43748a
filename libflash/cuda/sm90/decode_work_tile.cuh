// The work tile of a thread block of the sm_90a decode kernels, in shared memory.
#pragma once

#include "cuda/attention/decode_params.h"
#include "cuda/attention/ragged_keys.cuh"

namespace libflash::cuda::sm90 {

// The rows and keys of a thread block.
struct DecodeWorkTile {
    RaggedWorkTile rows;
    int32_t first, last;       // keys of the split: [first, last)
    int32_t plain, plain_end;  // the keys of these that all rows see
    int32_t begin, tiles;      // first key of the first tile; number of tiles

    // Whether the tile has a key that some row does not see.
    __device__ __forceinline__ bool is_edge(int first_key, int keys) const {
        return first_key < plain || first_key + keys > plain_end;
    }
};

// The work tile of the query rows of `rows` and the keys [keys.first, keys.last), in tiles of `tile_k` keys.
__device__ __forceinline__ DecodeWorkTile make_decode_work_tile(const RaggedWorkTile& rows, const RaggedKeys& keys, int tile_k) {
    const int begin = keys.first / tile_k * tile_k;
    const int tiles = keys.first < keys.last ? (keys.last - begin + tile_k - 1) / tile_k : 0;
    return {rows, keys.first, keys.last, max(keys.plain, keys.first), min(keys.plain_end, keys.last), begin, tiles};
}

}  // namespace libflash::cuda::sm90
