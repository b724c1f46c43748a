// Decode: the attention kernel, its template instances, and the launches of append, shared keys, attention and combine.
// decode_range.cuh has the code of a thread block.
#pragma once

#include "cuda/attention/append.cuh"
#include "cuda/attention/beside_prefill.cuh"
#include "cuda/attention/combine_splits.cuh"
#include "cuda/attention/decode_params.h"
#include "cuda/attention/element.cuh"
#include "cuda/attention/launch_dependent.cuh"
#include "cuda/config.h"
#include "cuda/params.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm80/append_codes.cuh"
#include "cuda/sm80/decode_instance.h"
#include "cuda/sm80/decode_invariant.cuh"
#include "cuda/sm80/decode_prefix.cuh"
#include "cuda/sm80/decode_range.cuh"

#include <algorithm>
#include <type_traits>

namespace libflash::cuda::sm80 {

// The most shared memory of a thread block. Kernels with up to two stages, or for at most 64 channels, must fit GPUs with 99 KB.
constexpr int most_shared_bytes(const KernelConfig& config) {
    return (config.stages <= 2 || config.head_dim <= 64 ? 99 : 227) * 1024;
}

// Which keys a warp works on. own...: those that it loaded, with one or two key heads per thread block; shared: all keys of the
// tile; few_rows...: as own..., for few query rows over codes.
enum class Keys { own, own_of_two_heads, shared, few_rows, few_rows_of_two_heads };
constexpr bool are_of_few_rows(Keys keys) { return keys == Keys::few_rows || keys == Keys::few_rows_of_two_heads; }
constexpr bool are_of_two_heads(Keys keys) { return keys == Keys::own_of_two_heads || keys == Keys::few_rows_of_two_heads; }

template <class Kernel, Keys kKeys, bool kAppends = false, DecodeStorage kStorage = DecodeStorage::plain, bool kContinues = false>
struct DecodeInstance {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr bool kCodes = kStorage == DecodeStorage::codes;
    static constexpr int stages() {
        if (kContinues) return decode_stages_after_prefix(config.stages);
        return kCodes ? decode_code_stages(config.head_dim, config.stages, kKeys == Keys::shared) : config.stages;
    }
    static constexpr int kStages = stages();
    using Body =
        Decode<T, config.head_dim, config.tile_k / kDecodeSlab, kStages, kKeys == Keys::shared, kAppends,
               are_of_two_heads(kKeys) ? 2 : 1, kStorage, DecodeRows::equal, config.head_dim, kContinues, are_of_few_rows(kKeys)>;
    static_assert(Body::kSharedBytes <= most_shared_bytes(config));
    static constexpr int kMostThreads = are_of_few_rows(kKeys)                     ? kDecodeThreadsOfFewRows
                                        : Body::kConvertsInRegisters || kContinues ? kDecodeThreadsOfCodes
                                                                                   : kDecodeThreads;
    static constexpr int kMinBlocks = decode_blocks_at_once(Body::kSharedBytes, 227 * 1024, Body::kThreads, kMostThreads);
};

template <class Kernel, Keys kKeys, bool kAppends, DecodeStorage kStorage, bool kContinues = false>
__global__ void __launch_bounds__(DecodeInstance<Kernel, kKeys, kAppends, kStorage, kContinues>::Body::kThreads,
                                  DecodeInstance<Kernel, kKeys, kAppends, kStorage, kContinues>::kMinBlocks)
    decode_kernel(const __grid_constant__ DecodeParams params) {
    extern __shared__ __align__(128) char shared[];
    using Body = typename DecodeInstance<Kernel, kKeys, kAppends, kStorage, kContinues>::Body;
    allow_next_kernel();
    if (params.fetch_early) DecodeLoads<Body>::fetch_early(params);
    wait_for_previous_kernel();
    Body body(params, shared);
    body.run();
}

// The instance for rows of any lengths. Depending on its rows a thread block runs Body<true>, in which the warps share the keys,
// or Body<false>, in which each warp has its own keys.
template <class Kernel, DecodeStorage kStorage = DecodeStorage::plain, DecodeRows kRows = DecodeRows::any>
struct RaggedInstance {
    static constexpr KernelConfig config = Kernel::config;
    static constexpr bool kCodes = kStorage == DecodeStorage::codes, kHasRareOptions = kRows == DecodeRows::general;
    static constexpr int stages(bool shares_keys) {
        if (kHasRareOptions) return general_decode_stages(config.stages);
        return kCodes ? decode_code_stages(config.head_dim, config.stages, shares_keys) : config.stages;
    }
    template <bool kSharesKeys>
    using Body = Decode<ElementOf<config.dtype>, config.head_dim, config.tile_k / kDecodeSlab, stages(kSharesKeys), kSharesKeys,
                        false, 1, kStorage, kRows, config.head_dim_v>;
    static constexpr bool kWide = is_wide_decode(config.head_dim);  // then all tiles have 16 rows
    using Largest = Body<!kWide>;                                   // the Body with more query rows
    static constexpr int kSharedBytes = std::max(Largest::kSharedBytes, Body<false>::kSharedBytes);
    static constexpr int kStaticBytes = (sizeof(RaggedWorkTile) + 127) / 128 * 128;  // before the dynamic shared memory, aligned
    static_assert(kStaticBytes + kSharedBytes <= most_shared_bytes(config));
    static constexpr int kMinBlocks = decode_blocks_at_once(kSharedBytes, 227 * 1024, Largest::kThreads);
};

template <class Kernel, DecodeStorage kStorage, DecodeRows kRows>
__global__ void __launch_bounds__(RaggedInstance<Kernel, kStorage, kRows>::Largest::kThreads,
                                  RaggedInstance<Kernel, kStorage, kRows>::kMinBlocks)
    ragged_decode_kernel(const __grid_constant__ DecodeParams params) {
    extern __shared__ __align__(128) char shared[];
    using Instance = RaggedInstance<Kernel, kStorage, kRows>;
    allow_next_kernel();
    if (!wait_unless_beside_prefill(params)) return;
    // The order of thread blocks: first the tiles of a key head, then the key heads, then the splits.
    const int head_of_all = divide(blockIdx.x, params.by_tiles), split = divide(head_of_all, params.by_heads);
    [[maybe_unused]] const int head = head_of_all - split * params.heads_k;  // unused where nvcc compiles for the host
    const int index = static_cast<int>(blockIdx.x) - head_of_all * static_cast<int>(params.by_tiles.divisor);
    // With invariant rows all tiles have the size of a tile for a single row, so that every row is computed in the same way.
    constexpr int kTileRows = Instance::Largest::kTileRows;
    const bool small_tiles = Instance::kHasRareOptions && params.invariant;
    const int tile_rows = small_tiles ? kDecodeSlab : kTileRows;
    const RaggedTile tile =
        params.ragged.most_rows > 0 ? find_short_tile<kTileRows>(params, index) : find_ragged_tile(params, index, tile_rows);
    if (tile.batch < 0) return;
    const RaggedSequence sequence = RaggedSequence::of(params.ragged, tile.batch);
    const int rows = sequence.rows * params.group_size, first = tile.tile * tile_rows;
    __shared__ RaggedWorkTile work_tile;
    if (threadIdx.x == 0) work_tile = {tile.batch, head, split, first, min(tile_rows, rows - first), sequence};
    __syncthreads();
    const int first_row = divide(first, params.by_group), last_row = divide(first + work_tile.rows - 1, params.by_group);
    const typename Instance::Largest::Range range(params, work_tile.sequence, first_row, last_row, split,
                                                  Instance::Largest::kTileK);
    if (!Instance::kWide && rows > kDecodeSlab && !small_tiles) {  // decode_shares_keys()
        typename Instance::Largest(params, shared, work_tile).run(range);
    } else {
        typename Instance::template Body<false>(params, shared, work_tile).run(range);
    }
}

using Plain = std::integral_constant<DecodeStorage, DecodeStorage::plain>;
using Scaled = std::integral_constant<DecodeStorage, DecodeStorage::scaled>;
// Codes are not supported with float32 queries.
template <class Kernel>
using CodesOf = std::conditional_t<sizeof(ElementOf<Kernel::config.dtype>) == 2,
                                   std::integral_constant<DecodeStorage, DecodeStorage::codes>, Scaled>;

template <class Attention>
int launch_attention(Attention kernel, const DecodePlan& plan, const DecodeParams& params, cudaStream_t stream) {
    const LaunchShape& shape = plan.attention;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    return launch_dependent(kernel, shape.blocks + waiting_blocks(params), shape.threads, shape.shared_bytes, stream,
                            plan.dependent_launch, params);
}

// Calls do_with(keys, appends, storage) with the template parameters of the instance as integral constants.
template <class Kernel, class DoWith>
auto with_instance(int instance, const DoWith& do_with) {
    constexpr KernelConfig config = Kernel::config;
    constexpr bool kCanAppend = decode_can_append(config.head_dim, config.tile_k);
    constexpr bool kTwoHeads =
        decode_key_heads(config.head_dim, config.tile_k, config.stages, sizeof(ElementOf<config.dtype>)) == 2;
    using std::bool_constant;
    using Own = std::integral_constant<Keys, Keys::own>;
    using OwnOfTwo = std::integral_constant<Keys, kTwoHeads ? Keys::own_of_two_heads : Keys::own>;
    using Shared = std::integral_constant<Keys, Keys::shared>;
    using No = bool_constant<false>;
    using Codes = CodesOf<Kernel>;
    using OfCodes = bool_constant<kCanAppend && Codes::value == DecodeStorage::codes>;
    constexpr bool kHasCodes = Codes::value == DecodeStorage::codes;
    using Few = std::integral_constant<Keys, kHasCodes ? Keys::few_rows : Keys::own>;
    using FewOfTwo = std::integral_constant<Keys, kHasCodes && kTwoHeads ? Keys::few_rows_of_two_heads : Few::value>;
    switch (static_cast<DecodeKind>(instance)) {
        case DecodeKind::shared_keys: return do_with(Shared(), No(), Plain());
        case DecodeKind::own_keys: return do_with(Own(), No(), Plain());
        case DecodeKind::own_keys_append: return do_with(Own(), bool_constant<kCanAppend>(), Plain());
        case DecodeKind::two_heads: return do_with(OwnOfTwo(), No(), Plain());
        case DecodeKind::two_heads_append: return do_with(OwnOfTwo(), bool_constant<kCanAppend>(), Plain());
        case DecodeKind::shared_keys_scaled: return do_with(Shared(), No(), Scaled());
        case DecodeKind::own_keys_scaled: return do_with(Own(), No(), Scaled());
        case DecodeKind::two_heads_scaled: return do_with(OwnOfTwo(), No(), Scaled());
        case DecodeKind::shared_keys_of_codes: return do_with(Shared(), No(), Codes());
        case DecodeKind::own_keys_of_codes: return do_with(Own(), No(), Codes());
        case DecodeKind::own_keys_of_codes_append: return do_with(Own(), OfCodes(), Codes());
        case DecodeKind::few_rows: return do_with(Few(), No(), Codes());
        case DecodeKind::few_rows_append: return do_with(Few(), OfCodes(), Codes());
        case DecodeKind::two_heads_few_rows: return do_with(FewOfTwo(), No(), Codes());
        case DecodeKind::two_heads_few_rows_append: return do_with(FewOfTwo(), OfCodes(), Codes());
        default: return do_with(OwnOfTwo(), No(), Codes());
    }
}

// The instances that run after the kernel for shared keys. with_instance_after_prefix() calls do_with(keys) in the same way.
constexpr bool is_instance_after_prefix(int instance) {
    return instance == static_cast<int>(DecodeKind::own_keys_after_prefix) ||
           instance == static_cast<int>(DecodeKind::two_heads_after_prefix);
}
template <class Kernel>
constexpr bool kHasPrefixKernels = has_prefix_kernels(Kernel::config.head_dim, sizeof(ElementOf<Kernel::config.dtype>));

template <class Kernel, Keys kKeys>
using InstanceAfterPrefix = DecodeInstance<Kernel, kKeys, false, DecodeStorage::plain, true>;

template <class Kernel, class DoWith>
auto with_instance_after_prefix(int instance, const DoWith& do_with) {
    constexpr KernelConfig config = Kernel::config;
    constexpr bool kTwoHeads =
        decode_key_heads(config.head_dim, config.tile_k, config.stages, sizeof(ElementOf<config.dtype>)) == 2;
    if (instance == static_cast<int>(DecodeKind::own_keys_after_prefix))
        return do_with(std::integral_constant<Keys, Keys::own>());
    return do_with(std::integral_constant<Keys, kTwoHeads ? Keys::own_of_two_heads : Keys::own>());
}

template <class Kernel>
int launch_after_prefix(const DecodePlan& plan, const DecodeParams& params, cudaStream_t stream) {
    if constexpr (kHasPrefixKernels<Kernel>) {
        const auto of_its_own = plan.prefix_kernel.launch;
        const int error = of_its_own ? of_its_own(plan, params, stream) : launch_prefix<Kernel>(plan, params, stream);
        if (error != cudaSuccess) return error;
        return with_instance_after_prefix<Kernel>(plan.instance.number, [&](auto keys) {
            return launch_attention(decode_kernel<Kernel, decltype(keys)::value, false, DecodeStorage::plain, true>, plan, params,
                                    stream);
        });
    }
    return cudaErrorInvalidConfiguration;
}

template <class Kernel>
constexpr bool is_invariant_instance(int instance) {
    return has_invariant_decode(Kernel::config) && static_cast<DecodeKind>(instance) == DecodeKind::invariant;
}

constexpr bool is_ragged_instance(int instance) {
    switch (static_cast<DecodeKind>(instance)) {
        case DecodeKind::ragged:
        case DecodeKind::ragged_of_codes:
        case DecodeKind::general:
        case DecodeKind::general_of_codes:
        case DecodeKind::general_scaled: return true;
        default: return false;
    }
}

// Calls do_with(storage, rows) in the same way.
template <class Kernel, class DoWith>
auto with_ragged_instance(int instance, const DoWith& do_with) {
    using Any = std::integral_constant<DecodeRows, DecodeRows::any>;
    using General = std::integral_constant<DecodeRows, DecodeRows::general>;
    using Codes = CodesOf<Kernel>;
    if constexpr (is_wide_decode(Kernel::config.head_dim)) {
        switch (static_cast<DecodeKind>(instance)) {
            case DecodeKind::general_of_codes: return do_with(Codes(), General());
            case DecodeKind::general_scaled: return do_with(Scaled(), General());
            default: return do_with(Plain(), General());
        }
    } else {
        switch (static_cast<DecodeKind>(instance)) {
            case DecodeKind::ragged: return do_with(Plain(), Any());
            case DecodeKind::ragged_of_codes: {
                if constexpr (Codes::value == DecodeStorage::codes) return do_with(Codes(), Any());
                return do_with(Plain(), Any());
            }
            case DecodeKind::general: return do_with(Scaled(), General());
            default: return do_with(Codes(), General());
        }
    }
}

}  // namespace libflash::cuda::sm80

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_decode(int step, int instance) {
    using T = ElementOf<Kernel::config.dtype>;
    switch (static_cast<DecodeStep>(step)) {
        case DecodeStep::append: return {append_threads(Kernel::config.head_dim), 0};
        case DecodeStep::append_codes: return {kAppendThreads, 0};
        case DecodeStep::prefix:
            if constexpr (sm80::kHasPrefixKernels<Kernel>) {
                using Prefix = sm80::PrefixOf<Kernel, 1>;  // the same resources for any number of classes
                static_assert(Prefix::kSharedBytes <= sm80::most_shared_bytes(Kernel::config));
                return {Prefix::kThreads, Prefix::kSharedBytes};
            }
            break;
        case DecodeStep::combine:
            if (sm80::is_invariant_instance<Kernel>(instance))
                return {sm80::FoldSegments<T, Kernel::config.head_dim_v>::kThreads, 0};
            return {CombineSplits<T, Kernel::config.head_dim_v>::kThreads, 0};
        default: break;
    }
    if constexpr (has_invariant_decode(Kernel::config)) {
        using Body = sm80::InvariantDecode<Kernel>;
        static_assert(Body::kSharedBytes <= sm80::most_shared_bytes(Kernel::config));
        if (sm80::is_invariant_instance<Kernel>(instance)) return {Body::kThreads, Body::kSharedBytes};
    }
    const auto of_ragged = [](auto storage, auto rows) -> KernelResources {
        using Instance = sm80::RaggedInstance<Kernel, decltype(storage)::value, decltype(rows)::value>;
        return {Instance::Largest::kThreads, Instance::kSharedBytes};
    };
    if constexpr (sm80::kHasPrefixKernels<Kernel>) {
        if (sm80::is_instance_after_prefix(instance))
            return sm80::with_instance_after_prefix<Kernel>(instance, [](auto keys) -> KernelResources {
                using Body = typename sm80::InstanceAfterPrefix<Kernel, decltype(keys)::value>::Body;
                return {Body::kThreads, Body::kSharedBytes};
            });
    }
    if constexpr (!is_wide_decode(Kernel::config.head_dim)) {
        if (!sm80::is_ragged_instance(instance)) {
            return sm80::with_instance<Kernel>(instance, [](auto keys, auto appends, auto storage) -> KernelResources {
                using Body = typename sm80::DecodeInstance<Kernel, decltype(keys)::value, decltype(appends)::value,
                                                           decltype(storage)::value>::Body;
                return {Body::kThreads, Body::kSharedBytes};
            });
        }
    }
    return sm80::with_ragged_instance<Kernel>(instance, of_ragged);
}

// Enqueues the work on `stream` and returns the CUDA error.
template <class Kernel>
int launch_decode(const DecodePlan& plan, const DecodeParams& params, void* stream) {
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    using T = ElementOf<Kernel::config.dtype>;
    int error = sm80::launch_append_codes<Kernel, T>(plan, params, cuda_stream);
    if (error == cudaSuccess) error = launch_append<Kernel, T>(plan, params, cuda_stream);
    if (error == cudaSuccess && plan.attention.blocks > 0) {
        const auto launch = [&](auto kernel) { return sm80::launch_attention(kernel, plan, params, cuda_stream); };
        if (sm80::is_invariant_instance<Kernel>(plan.instance.number)) {
            if constexpr (has_invariant_decode(Kernel::config)) error = launch(sm80::invariant_decode_kernel<Kernel>);
        } else if (sm80::is_ragged_instance(plan.instance.number)) {
            error = sm80::with_ragged_instance<Kernel>(plan.instance.number, [&](auto storage, auto rows) {
                return launch(sm80::ragged_decode_kernel<Kernel, decltype(storage)::value, decltype(rows)::value>);
            });
        } else if (sm80::is_instance_after_prefix(plan.instance.number)) {
            error = sm80::launch_after_prefix<Kernel>(plan, params, cuda_stream);
        } else if constexpr (!is_wide_decode(Kernel::config.head_dim)) {
            error = sm80::with_instance<Kernel>(plan.instance.number, [&](auto keys, auto appends, auto storage) {
                return launch(
                    sm80::decode_kernel<Kernel, decltype(keys)::value, decltype(appends)::value, decltype(storage)::value>);
            });
        }
    }
    if (error != cudaSuccess) return error;
    if constexpr (has_invariant_decode(Kernel::config)) {
        if (sm80::is_invariant_instance<Kernel>(plan.instance.number))
            return sm80::launch_fold<Kernel, T>(plan, params, cuda_stream);
    }
    return launch_combine<Kernel, T>(plan, params, cuda_stream);
}

}  // namespace libflash::cuda
