// Decode: the kernels and their launch. What a thread block does is in decode_range.cuh.
#pragma once

#include "cuda/attention/decode_params.h"
#include "cuda/attention/element.cuh"
#include "cuda/attention/launch_behind.cuh"
#include "cuda/config.h"
#include "cuda/params.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm80/append.cuh"
#include "cuda/sm80/combine_splits.cuh"
#include "cuda/sm80/decode_range.cuh"

namespace libflash::cuda::sm80 {

// Who works on which keys: a warp on those that it fetched, of one key head or of two, or all warps on those of all.
enum class Keys { own, own_of_two_heads, shared };

template <class Row, Keys kKeys, bool kTakesIn = false>
struct DecodeInstance {
    static constexpr KernelConfig config = Row::config;
    using T = ElementOf<config.dtype>;
    using Body = Decode<T, config.head_dim, config.tile_k / kDecodeSlab, config.stages, kKeys == Keys::shared, kTakesIn,
                        kKeys == Keys::own_of_two_heads ? 2 : 1>;
    static constexpr int kMinBlocks = decode_blocks_at_once(Body::kSharedBytes, 227 * 1024, Body::kThreads);
};

template <class Row, Keys kKeys, bool kTakesIn>
__global__ void __launch_bounds__(DecodeInstance<Row, kKeys, kTakesIn>::Body::kThreads,
                                  DecodeInstance<Row, kKeys, kTakesIn>::kMinBlocks)
    decode_kernel(const __grid_constant__ DecodeParams params) {
    extern __shared__ __align__(128) char shared[];
    using Body = typename DecodeInstance<Row, kKeys, kTakesIn>::Body;
    let_next_kernel_begin();
    if (params.fetch_early) Body::fetch_early(params);
    wait_for_kernel_ahead();
    Body body(params, shared);
    body.run();
}

template <class Row, Keys kKeys, bool kTakesIn>
int launch_ranges(const DecodeParams& params, cudaStream_t stream) {
    using Body = typename DecodeInstance<Row, kKeys, kTakesIn>::Body;
    const auto kernel = decode_kernel<Row, kKeys, kTakesIn>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Body::kSharedBytes);
    if (error != cudaSuccess) return error;
    const int64_t tiles = params.by_tiles.divisor, head_groups = params.by_head_groups.divisor;
    return launch_behind(kernel, tiles * head_groups * params.splits * params.batch, Body::kThreads, Body::kSharedBytes, stream,
                         params.overlap, params);
}

// With at most 16 rows of a key head.
template <class Row, bool kTakesIn>
int launch_few_rows(const DecodeParams& params, cudaStream_t stream) {
    constexpr KernelConfig config = Row::config;
    if constexpr (decode_heads_beside(config.head_dim, config.tile_k, config.stages, sizeof(ElementOf<config.dtype>)) == 2) {
        if (params.heads_beside == 2) return launch_ranges<Row, Keys::own_of_two_heads, kTakesIn>(params, stream);
    }
    return launch_ranges<Row, Keys::own, kTakesIn>(params, stream);
}

}  // namespace libflash::cuda::sm80

namespace libflash::cuda {

// Enqueues the work on `stream` and returns what cudaGetLastError() then says.
template <class Row>
int launch_decode(const DecodeParams& params, void* stream) {
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    using T = ElementOf<Row::config.dtype>;
    if (const int error = sm80::launch_append<Row, T>(params, cuda_stream)) return error;
    if (params.seqlen_q == 0 || params.heads_q == 0) return cudaSuccess;
    const bool shares = decode_shares_keys(int64_t{params.seqlen_q} * params.group_size);
    constexpr bool kCanTakeIn = decode_takes_in_rows(Row::config.head_dim, Row::config.tile_k);
    const int error = shares ? sm80::launch_ranges<Row, sm80::Keys::shared, false>(params, cuda_stream)
                      : kCanTakeIn && params.append.within ? sm80::launch_few_rows<Row, kCanTakeIn>(params, cuda_stream)
                                                           : sm80::launch_few_rows<Row, false>(params, cuda_stream);
    if (error != cudaSuccess || params.splits == 1) return error;
    return sm80::launch_combine<Row, T>(params, cuda_stream);
}

}  // namespace libflash::cuda
