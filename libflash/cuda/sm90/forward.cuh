// FlashAttention-3 forward for sm_90a (Shah and others, arXiv 2407.08608). Persistent thread blocks compute one work tile after
// another (forward_work.cuh): a producer warpgroup finds work tiles and loads Q, K and V by TMA (forward_producer.cuh), consumer
// warpgroups compute (forward_consumer.cuh). Rows that overflow under a kept maximum (online_softmax.cuh) are recorded; after its
// last work tile a thread block recomputes the work tiles with such rows.
#pragma once

#include "cuda/attention/launch_dependent.cuh"
#include "cuda/params.h"
#include "cuda/sm90/extent.cuh"
#include "cuda/sm90/forward_consumer.cuh"

#include <algorithm>
#include <type_traits>

namespace libflash::cuda::sm90 {

template <class Kernel, ForwardInstance kInstance>
__global__ void __launch_bounds__(Forward<Kernel, kInstance>::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params, const __grid_constant__ ForwardMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    using Body = Forward<Kernel, kInstance>;
    Body body(params, maps, Body::QTile::first_place(shared));
    body.run();
}

// Whether the host knows that every query row sees a key. If the first and the last row do, so do those between them.
inline bool all_see_keys(const ForwardParams& params) {
    const LengthsParams &queries = params.q_lengths, &keys = params.k_lengths;
    if (queries.cu || queries.used || keys.cu || keys.used) return false;
    const auto sees_keys = [&](int64_t row) {
        const int64_t diagonal = row + (params.mask.top_left ? 0 : int64_t{keys.capacity} - queries.capacity);
        return std::max<int64_t>(0, diagonal - params.mask.left) <
               std::min<int64_t>(keys.capacity, diagonal + params.mask.right + 1);
    };
    return sees_keys(0) && sees_keys(queries.capacity - 1);
}

template <class Kernel, ForwardInstance kInstance>
cudaError_t encode(ForwardMaps* maps, const ForwardParams& params) {
    using Body = Forward<Kernel, kInstance>;
    using T = typename Body::T;
    const int64_t queries = params.q_lengths.capacity, keys = params.k_lengths.capacity,
                  kv_heads = params.heads_q / params.group_size;
    const TensorExtent q = extent(params.q, params.head_dim, queries, params.heads_q, params.batch),
                       k = keys > 0 ? extent(params.k, params.head_dim, keys, kv_heads, params.batch) : q,
                       v = keys > 0 ? extent(params.v, params.head_dim_v, keys, kv_heads, params.batch) : q,
                       out = extent(params.out, params.head_dim_v, queries, params.heads_q, params.batch);
    // Without keys, K and V are not read, but their maps need a valid address: they get that of q.
    maps->all_see_keys = all_see_keys(params);
    maps->keys_end_early = params.k_lengths.cu || params.k_lengths.used;
    cudaError_t error = encode_map<T>(&maps->q, q, Body::kGroupRows);
    if (error == cudaSuccess) error = encode_map<T>(&maps->k, k, Body::kBlockN);
    if (error == cudaSuccess) error = encode_map<T>(&maps->v, v, Body::kBlockN);
    if (Body::kSendsRows && error == cudaSuccess) error = encode_map<T>(&maps->out, out, 16);
    return error;
}

template <class Kernel, ForwardInstance kInstance>
constexpr KernelResources forward_resources() {
    using Body = Forward<Kernel, kInstance>;
    return {Body::kThreads, Body::kSharedBytes};
}

template <class Kernel, ForwardInstance kInstance>
int launch_instance(const ForwardPlan& plan, const ForwardParams& params, cudaStream_t stream) {
    using Body = Forward<Kernel, kInstance>;
    const auto kernel = forward_kernel<Kernel, kInstance>;
    ForwardMaps maps{};
    cudaError_t error = encode<Kernel, kInstance>(&maps, params);
    // At each launch, because the attribute holds for the current device only.
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.attention.shared_bytes);
    if (error != cudaSuccess) return error;
    if (plan.order.blocks > 0) {
        const auto order = order_kernel<Kernel, Body::kBlockM>;
        order<<<static_cast<unsigned>(plan.order.blocks), plan.order.threads, 0, stream>>>(params);
    }
    return launch_dependent(kernel, plan.attention.blocks, plan.attention.threads, plan.attention.shared_bytes, stream, true,
                            params, maps);
}

// Calls do_with with the instance as an integral_constant.
template <class Kernel, class DoWith>
auto with_instance(int instance, const DoWith& do_with) {
    switch (static_cast<ForwardInstance>(instance)) {
        case ForwardInstance::general: return do_with(std::integral_constant<ForwardInstance, ForwardInstance::general>());
        case ForwardInstance::block_mask: return do_with(std::integral_constant<ForwardInstance, ForwardInstance::block_mask>());
        case ForwardInstance::dynamic:
            if constexpr (has_dynamic_instance(Kernel::config))
                return do_with(std::integral_constant<ForwardInstance, ForwardInstance::dynamic>());
            break;
        case ForwardInstance::plain: break;
    }
    return do_with(std::integral_constant<ForwardInstance, ForwardInstance::plain>());
}

}  // namespace libflash::cuda::sm90

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_forward(int step, int instance) {
    if (static_cast<ForwardStep>(step) == ForwardStep::order) return {sm90::kOrderThreads, 0};
    return sm90::with_instance<Kernel>(instance,
                                       [](auto kind) { return sm90::forward_resources<Kernel, decltype(kind)::value>(); });
}

// Enqueues the kernels on `stream`. Returns a CUDA error.
template <class Kernel>
int launch_forward(const ForwardPlan& plan, const ForwardParams& params, void* stream) {
    return sm90::with_instance<Kernel>(plan.instance.number, [&](auto kind) {
        return sm90::launch_instance<Kernel, decltype(kind)::value>(plan, params, static_cast<cudaStream_t>(stream));
    });
}

}  // namespace libflash::cuda
