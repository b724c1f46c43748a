// The shared memory of the sm_90a forward kernel: first the tiles (ForwardSharedTiles), then barriers and the data that warps
// exchange (ForwardSharedStorage).
#pragma once

#include "cuda/sm90/block_mask_iterator.cuh"
#include "cuda/sm90/forward_work_tile.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/recompute_list.cuh"
#include "cuda/sm90/zero_fill_request.cuh"

namespace libflash::cuda::sm90 {

// What consumers need to know of the keys of a copied tile. They may read it after they have released the stage of K, so a tile
// has the place of its stage and phase.
template <int kKeys>
struct CopiedKeys {
    static_assert(kKeys == 128, "the words of `absent` are loaded together");
    alignas(16) uint32_t absent[kKeys / 32];  // a bit for each key that does not exist
    float k_scale[kKeys], v_scale[kKeys];     // with scales of rows
};
template <int kStages>
__device__ __forceinline__ int place_of_stage(const PipelineState<kStages>& k) {
    return k.stage + (k.phase ? kStages : 0);
}

// Arrivals that say that a stage of codes is full: of the lanes of both warps that load codes when their copies of scales are
// complete, of one lane of each for what the lanes have written themselves, and of the lane that expects the bytes of TMA.
constexpr int kArrivalsOfCodes = 2 * (32 + 1) + 1;

// Shared addresses of the tiles.
template <class Traits>
struct ForwardSharedTiles {
    static constexpr int kBytes = Traits::kTileBytes;
    uint32_t q_smem, k_smem, v_smem, bias_smem, codes_smem, out_smem;

    __device__ __forceinline__ explicit ForwardSharedTiles(const char* memory) {
        q_smem = shared_address(memory);
        k_smem = q_smem + Traits::kQStages * Traits::kQBytes;
        v_smem = k_smem + Traits::kStages * Traits::KTile::kBytes;
        bias_smem = v_smem + Traits::kVStages * Traits::VTile::kBytes;
        codes_smem = bias_smem + Traits::kStages * Traits::kBiasTileBytes;
        out_smem = codes_smem + Traits::kCodeStages * Traits::kCodeBytes;
    }
    __device__ __forceinline__ uint32_t q(int stage, int group) const {
        return q_smem + stage * Traits::kQBytes + group * Traits::QTile::kBytes;
    }
    __device__ __forceinline__ uint32_t k(int stage) const { return k_smem + stage * Traits::KTile::kBytes; }
    __device__ __forceinline__ uint32_t v(int stage) const { return v_smem + stage * Traits::VTile::kBytes; }
    // Of a stage of K.
    __device__ __forceinline__ typename Traits::BiasTile bias(int stage) const {
        return {bias_smem + stage * Traits::kBiasTileBytes};
    }
    __device__ __forceinline__ uint32_t codes(int stage) const { return codes_smem + stage * Traits::kCodeBytes; }
    __device__ __forceinline__ uint32_t out(int warp) const { return out_smem + warp * Traits::OutTile::kBytes; }
    // The accumulators in shared memory of a consumer warp.
    __device__ __forceinline__ uint32_t sums(int warp) const {
        return Traits::kTmaStore ? out(warp) : out_smem + warp * Traits::kSumsOfWarpBytes;
    }
};

template <class Traits>
struct ForwardSharedStorage {
    using WorkTile = ForwardWorkTile<Traits>;
    static constexpr int kStages = Traits::kStages;
    static constexpr int kScheduledTiles = 1;  // work tiles that the scheduler warp has found and the producers have not taken
    static constexpr int kSlots = 3 + Traits::kQStages + kScheduledTiles;
    struct DynamicState {
        TileWord tiles[kStages];  // the key tiles in the stages of K; over a cache: their absent units (forward_cached_keys.cuh)
        std::conditional_t<Traits::kCopied, CopiedKeys<Traits::kBlockN>[2 * kStages], Empty> copied;
        static constexpr int kCodeStages = Traits::kCodes ? Traits::kCodeStages : 1;
        std::conditional_t<Traits::kCodes, CopiedKeys<Traits::kBlockN>[kCodeStages], Empty> of_codes;  // of the stages of codes
        std::conditional_t<Traits::kCodes, PipelineBarriers<kCodeStages>, Empty> codes;
        int newest;  // the unit that this thread block took last, see SequenceOrder::previous_unit()
        ZeroFillRequest zero_fill;
    };

    PipelineBarriers<kStages> k;
    PipelineBarriers<Traits::kVStages> v;
    PipelineBarriers<Traits::kQStages> q[Traits::kGroups];
    PipelineBarriers<kScheduledTiles> scheduled;  // work tiles, from the scheduler warp to the producers
    uint64_t first_pass_done;
    RecomputeList recompute;
    // A ring of slots: the scheduler warp fills them, the producers and the consumers read them. With one stage of Q, the
    // scheduler warp fills in work tile n after the warp that loads Q took n-1, hence after all consumers released Q of n-3. The
    // consumers may still have to write the rows of n-4, so five slots are needed.
    WorkTile work_tiles[kSlots];
    std::conditional_t<Traits::kDynamic, DynamicState, Empty> dynamic;

    // One thread calls it before the warps take their roles. `readers`: the thread blocks whose consumers release a stage of K or
    // V.
    __device__ __forceinline__ void init(int readers) {
        // With bias tiles each lane of the producer warp arrives when its copies are complete.
        k.init(readers * Traits::kConsumerWarps, Traits::kArrivalsOfLoads + (Traits::kBiasTiles ? 32 : 0));
        v.init(readers * Traits::kConsumerWarps, Traits::kArrivalsOfLoads);
        for (int group = 0; group < Traits::kGroups; ++group) q[group].init(4);
        scheduled.init(Traits::kProducerWarps);
        // Arrivals: the consumers, the producers, the scheduler warp and, in dynamic instances, the zero-fill warp. Copied
        // values need no zero-fill warp.
        MBarrier{shared_address(&first_pass_done)}.init(Traits::kConsumerWarps + Traits::kProducerWarps +
                                                        (Traits::kDynamic && !Traits::kCopied ? 2 : 1));
        if constexpr (Traits::kDynamic) {
            dynamic.newest = -1;
            dynamic.zero_fill.init();
            if constexpr (Traits::kCodes) dynamic.codes.init(4 * kArrivalsOfWarp, kArrivalsOfCodes);
        }
        recompute.clear();
        fence_barrier_init();
    }
    __device__ static __forceinline__ int next_slot(int slot) { return slot + 1 == kSlots ? 0 : slot + 1; }
    __device__ static __forceinline__ int previous_slot(int slot) { return (slot == 0 ? kSlots : slot) - 1; }
};

}  // namespace libflash::cuda::sm90
