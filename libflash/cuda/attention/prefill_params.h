// The parameters of the prefill kernels, which compute the long chunks of a decode call: the parameters of forward, with keys and
// values in a cache. No CUDA header.
#pragma once

#include "cuda/attention/decode_params.h"

namespace libflash::cuda {

// `k` and `v` are not used: keys and values are in the cache, in the rows that decode_keys.cuh computes.
struct PrefillParams : ForwardParams {
    CacheParams cache;
    CodeType code;                      // of the cache
    CacheScaleParams k_scale, v_scale;  // without groups
    LengthsParams news;                 // the new rows of each sequence
    int32_t fewest_rows;                // the decode kernels compute sequences with fewer query rows
    int32_t blocks;                     // thread blocks of the launch
    int32_t multiprocessors;            // of the device, if the decode kernel runs beside this kernel; else 0
    int32_t in_pairs;                   // 1: thread blocks work in pairs (sm90/block_pair.cuh); else 0
    const int32_t* given_order;         // the caller's schedule, from which sequence_order is copied; nullptr: it is computed
    bool order_alone;                   // sequence_order is a schedule to write: no attention kernel follows
};

}  // namespace libflash::cuda
