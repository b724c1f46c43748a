// A consumer warpgroup of the sm_90a decode kernel for many rows. It has 64 rows of the work tile, with Q, P and O in registers,
// and computes S = Q K^T, the softmax and O += P V for each key tile; O += P V of a tile overlaps the softmax of the next one.
#pragma once

#include "cuda/ptx/uniform.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/decode_rows_results.cuh"
#include "cuda/sm90/decode_rows_scores.cuh"
#include "cuda/sm90/decode_softmax.cuh"
#include "cuda/sm90/release_stage.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodeRowsConsumer {
    using T = typename Traits::T;
    using KTile = typename Traits::KTile;
    using VTile = typename Traits::VTile;
    using Softmax = DecodeSoftmax<Traits>;
    static constexpr int kBlockN = Traits::kBlockN, kSteps = Traits::kHeadDim / 16, kSums = Traits::kHeadDimV / 2;

    const DecodeRowsContext<Traits>& context;

    struct State {
        int group, warp, lane, row;  // warp: of the warpgroup; row: the thread's first row in the work tile
        uint32_t q[kSteps][4];
        typename Softmax::Scores s;
        typename Softmax::Fragments p;
        float o[kSums];
        Softmax softmax;
    };

    // `warp`: the number of the warp among all consumers.
    __device__ __forceinline__ void run(int warp) const {
        State c;
        c.group = Traits::kGroups > 1 ? warp / 4 : 0, c.warp = warp % 4, c.lane = static_cast<int>(threadIdx.x & 31);
        c.row = c.group * Traits::kGroupRows + 16 * c.warp + c.lane / 4;
        if (Traits::kGroups > 1 && c.group * Traits::kGroupRows >= work_tile().rows.rows) {
            using Stages = PipelineState<Traits::kStages>;
            return skip_tiles(Stages(context.storage.k), Stages(context.storage.v), work_tile().tiles, c.lane);
        }
        load_queries(c);
        c.softmax.clear();
#pragma unroll
        for (int i = 0; i < kSums; ++i) c.o[i] = 0.0f;
        PipelineState<Traits::kStages> k(context.storage.k), v(context.storage.v);
        const int tiles = work_tile().tiles;
        uint32_t absent = begin_scores(c, k);
        finish_scores<0>(c, k);
        if (compute_probabilities(c, 0, absent)) scale_output(c);
        Softmax::round(c.s, c.p);
#pragma unroll 1
        for (int tile = 1; tile < tiles; ++tile) {
            wait_for_values(c, v, tile - 1);
            absent = begin_scores(c, k);
            begin_values(c, v);
            finish_scores<1>(c, k);
            const bool raised = compute_probabilities(c, tile, absent);
            c.softmax.finish_before_wait();
            finish_values(c, v);
            if (raised) scale_output(c);
            Softmax::round(c.s, c.p);
        }
        wait_for_values(c, v, tiles - 1);
        begin_values(c, v);
        finish_values(c, v);
        DecodeRowsResults<Traits>{context, c.lane, c.row}.finish(c.softmax, c.o);
    }

private:
    __device__ __forceinline__ const DecodeWorkTile& work_tile() const { return context.storage.work_tile; }

    // Fragments of Q, as an A operand in registers. Rows and channels that do not exist are zeros. A lane loads eight channels of
    // a row at a time; then the four lanes of the row exchange words.
    __device__ __forceinline__ void load_queries(State& c) const {
        const DecodeParams& params = context.params;
        const RaggedWorkTile& rows = work_tile().rows;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = c.row + 8 * r;
            const bool exists = row < rows.rows;
            const int packed = rows.first_row + (exists ? row : 0), query = divide(packed, params.by_group);
            const int head = rows.head_k * params.group_size + packed - query * params.group_size;
            const T* const from = static_cast<const T*>(params.q.data) + rows.batch * params.q.batch +
                                  (rows.sequence.start + query) * params.q.row + head * params.q.head;
#pragma unroll
            for (int step = 0; step < kSteps; step += 2) {
                const int channel = 16 * step + c.lane % 4 * 8;
                const uint4 own = exists && channel < params.head_dim ? *reinterpret_cast<const uint4*>(from + channel) : uint4{};
                uint32_t words[4] = {own.x, own.y, own.z, own.w};
                transpose_quad(words, c.lane);
#pragma unroll
                for (int k = 0; k < 4; ++k) c.q[step + k / 2][k % 2 * 2 + r] = words[k];
            }
        }
    }

    // s = Q K^T. Returns the units of 16 keys that do not exist.
    __device__ __forceinline__ uint32_t begin_scores(State& c, const PipelineState<Traits::kStages>& k) const {
        k.wait_full();
        const uint32_t absent = context.storage.absent[k.stage], keys = uniform(context.tiles.k(k.stage));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            Wgmma<T, kBlockN>::template multiply<false>(c.s, c.q[step], KTile::k_major_operand(keys, step), step > 0);
        wgmma_commit();
        return absent;
    }
    // kLater: groups of products committed after S.
    template <int kLater>
    __device__ __forceinline__ void finish_scores(State& c, PipelineState<Traits::kStages>& k) const {
        wgmma_wait<kLater>();
        wgmma_fence_operand(c.s);
        release_stage(k, c.lane);
    }

    // Computes P in c.s. Returns whether O must be scaled.
    __device__ __forceinline__ bool compute_probabilities(State& c, int tile, uint32_t absent) const {
        const DecodeRowsScores<Traits> scores{context, c.row, c.lane % 4 * 2};
        const int first_key = work_tile().begin + tile * kBlockN;
        const float scale_log2 = scores.apply_options(c.s, first_key);
        if (work_tile().is_edge(first_key, kBlockN)) scores.mask(c.s, first_key);
        if (absent) scores.hide_absent(c.s, absent);
        return c.softmax.exponentiate(c.s, scale_log2);
    }
    __device__ __forceinline__ static void scale_output(State& c) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) c.o[i] *= c.softmax.factor[i / 2 % 2];
    }

    __device__ __forceinline__ void wait_for_values(const State& c, const PipelineState<Traits::kStages>& v, int tile) const {
        v.wait_full();
        zero_values(c, tile, v.stage);
    }
    // Zeroes values of keys outside the split, because they may be NaN or infinity and products multiply them by 0. Each
    // warpgroup zeroes all of them, so that none waits for another.
    __device__ __forceinline__ void zero_values(const State& c, int tile, int stage) const {
        const int first_key = work_tile().begin + tile * kBlockN;
        const int before = work_tile().first - first_key, count = work_tile().last - first_key;
        if (before <= 0 && count >= kBlockN) return;
        constexpr int kVectors = Traits::kHeadDimV / 8;
#pragma unroll 1
        for (int i = 32 * c.warp + c.lane; i < kBlockN * kVectors; i += 128) {
            const int row = i / kVectors;
            if (row < before || row >= count) store_zeros_16(context.tiles.v(stage) + VTile::offset(row, i % kVectors));
        }
        fence_shared_for_async();
        named_barrier_wait(1 + c.group, 128);
    }

    // o += P V.
    __device__ __forceinline__ void begin_values(State& c, const PipelineState<Traits::kStages>& v) const {
        const uint32_t values = uniform(context.tiles.v(v.stage));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step)
            Wgmma<T, Traits::kHeadDimV>::template multiply<true>(c.o, c.p[step], VTile::mn_major_operand(values, step), true);
        wgmma_commit();
    }
    __device__ __forceinline__ void finish_values(State& c, PipelineState<Traits::kStages>& v) const {
        wgmma_wait<0>();
        wgmma_fence_operand(c.o);
        release_stage(v, c.lane);
    }
};

}  // namespace libflash::cuda::sm90
