// How many thread blocks of the prefill kernel work when decode kernels run beside it (attention/beside_prefill.cuh). A thread
// block takes a whole multiprocessor; the others of the grid end at once and leave theirs to decode. Fewer thread blocks take
// longer, but a multiprocessor that reads keys for decode does not multiply. When prefill has ended, decode has all
// multiprocessors.
#pragma once

#include "cuda/sm90/sequence_order.cuh"

namespace libflash::cuda::sm90 {

// Times are in operations of a multiprocessor in prefill.
constexpr float kOperationsPerByte = 100.0f;   // done while a multiprocessor that decodes reads a byte
constexpr int kMultiprocessorsForMemory = 65;  // this many read for decode about as fast as all
constexpr float kManyRounds = 4.0f;            // work tiles per thread block from which a partial last round matters little

struct PrefillWork {
    float operations;  // of prefill
    float bytes;       // of the keys and values that decode reads

    // The work of one sequence.
    __device__ __forceinline__ static PrefillWork of(const PrefillParams& params, int batch) {
        const int rows = SequenceRows::of(params.q_lengths, batch).owned;
        if (rows <= 0) return {0.0f, 0.0f};
        const float length = static_cast<float>(keys_of(params, batch).length), channels = params.head_dim + params.head_dim_v;
        // A window begins `left` keys before each row. With a causal mask a row sees half of the other rows on average.
        const bool causal = params.mask.right < kUnboundedWindow;
        const float window = params.mask.left < kUnboundedWindow ? static_cast<float>(params.mask.left) : length;
        if (rows < params.fewest_rows) {
            const float keys = fminf(length, window + static_cast<float>(rows));
            return {0.0f, keys * channels * key_bytes(params) * static_cast<float>(params.heads_q / params.group_size)};
        }
        const float keys = fmaxf(0.0f, fminf(length - (causal ? 0.5f * static_cast<float>(rows) : 0.0f), window + 1.0f));
        return {2.0f * keys * channels * static_cast<float>(rows) * static_cast<float>(params.heads_q), 0.0f};
    }
    // The time of the call if `blocks` of `all` multiprocessors compute the work tiles of prefill.
    __device__ __forceinline__ float time(int tiles, int blocks, int all) const {
        float rounds = static_cast<float>(tiles) / static_cast<float>(blocks);
        if (rounds < kManyRounds) rounds = ceilf(rounds);
        const float prefill = rounds * operations / static_cast<float>(tiles);
        const int for_memory = min(all, kMultiprocessorsForMemory);
        const float left = bytes * kOperationsPerByte - static_cast<float>(min(all - blocks, for_memory)) * prefill;
        return prefill + fmaxf(left, 0.0f) / static_cast<float>(for_memory);
    }
};

// The number of thread blocks that work, of params.blocks; even where they work in pairs. All threads of the order kernel call
// it.
__device__ __forceinline__ int prefill_share(const PrefillParams& params, int units) {
    __shared__ PrefillWork all;
    __shared__ unsigned long long best;  // the bits of the time, and below them the multiprocessors that are left to decode
    if (params.multiprocessors == 0 || units == 0) return params.blocks;
    if (threadIdx.x == 0) all = {0.0f, 0.0f}, best = ~0ull;
    __syncthreads();
    PrefillWork own{0.0f, 0.0f};
    for (int batch = static_cast<int>(threadIdx.x); batch < params.batch; batch += kOrderThreads) {
        const PrefillWork of_sequence = PrefillWork::of(params, batch);
        own.operations += of_sequence.operations, own.bytes += of_sequence.bytes;
    }
    if (own.operations > 0.0f) atomicAdd(&all.operations, own.operations);
    if (own.bytes > 0.0f) atomicAdd(&all.bytes, own.bytes);
    __syncthreads();
    if (all.bytes == 0.0f) return params.blocks;
    const int together = heads_of_unit(params), left = static_cast<int>(threadIdx.x);
    const auto blocks = [&](int left_to_decode) {
        return min(params.blocks, params.multiprocessors - left_to_decode) & -together;
    };
    if (2 * left <= params.multiprocessors) {
        const float time = all.time(units * together, blocks(left), params.multiprocessors);
        atomicMin(&best, static_cast<unsigned long long>(__float_as_uint(time)) << 32 | static_cast<unsigned>(left));
    }
    __syncthreads();
    return blocks(static_cast<int>(best & 0xffffffffu));
}

}  // namespace libflash::cuda::sm90
