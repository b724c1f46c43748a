// The epilogue of a work tile in the consumer warps of the sm_90a forward kernel: finishes the softmax of its rows, and writes
// LSE and O. Each warp writes its 16 rows, through shared memory by TMA, or from registers.
#pragma once

#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/sm90/forward_consumer_thread.cuh"
#include "cuda/sm90/forward_output_rows.cuh"
#include "cuda/sm90/online_softmax.cuh"
#include "cuda/sm90/tma_row_store.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardEpilogue {
    using T = typename Traits::T;
    using WorkTile = ForwardWorkTile<Traits>;
    using OutTile = typename Traits::OutTile;
    using Thread = ForwardConsumerThread;
    static constexpr int kHeadDimV = Traits::kHeadDimV, kSums = kHeadDimV / 2;
    using RowStore = TmaRowStore<OutTile, kHeadDimV>;
    using Sums = float[kSums];  // of P V, in the layout of wgmma

    const ForwardContext<Traits>& context;
    const ForwardOutputRows<Traits> rows{context};

    // Called when all scores of a work tile are complete. Writes the LSE, and computes the factors for the sums of P V. Returns
    // whether this warp writes its rows. `softmax`: OnlineSoftmax or InvariantSums::Rows.
    template <class Softmax>
    __device__ __forceinline__ bool finish_softmax(Softmax& softmax, const WorkTile& work_tile, const Thread& thread,
                                                   float (&inverse)[2]) const {
        const bool writes =
            // __any_sync tells the compiler that the value is uniform.
            __any_sync(0xffffffffu, work_tile.assignment.writers >> thread.warp() & 1);
        bool overflowed = false;
        const bool row_overflowed[2] = {softmax.finish(0), softmax.finish(1)};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int local_row = thread.local_row(r);
            const bool is_used =
                local_row < work_tile.length_q(context.params) - work_tile.keys.first_row;  // other rows may hold any value
            overflowed |= row_overflowed[r] && is_used;
            inverse[r] = rows.finish_row(work_tile, local_row, is_used, softmax.kept_maximum[r], softmax.sum[r],
                                         writes && thread.is_first_of_row());
            if constexpr (Traits::kStatistics)
                rows.write_statistics(work_tile, local_row, is_used, row_overflowed[r], softmax, r, writes,
                                      writes && thread.is_first_of_row());
        }
        if (__any_sync(0xffffffffu, overflowed)) request_recompute(work_tile, thread);
        return writes;
    }

    // Writes the rows: the sums of P V times `inverse`. Where `inverse` is 0 it writes zeros, even if the sums are NaN.
    __device__ __forceinline__ void write_rows(const Sums& o, const float (&inverse)[2], const WorkTile& work_tile,
                                               const Thread& thread) const {
        bool overflowed = false;
        // A TMA store writes 16 rows. It must not write beyond the end of a sequence, where the rows of the next sequence begin.
        const bool by_tma = Traits::kTmaStore && !(Traits::kDynamic && __any_sync(0xffffffffu, ends_in_warp(work_tile, thread)));
        if (by_tma) {
            overflowed = write_by_tma(o, inverse, work_tile, thread);
        } else if constexpr (!Traits::kTmaStore || Traits::kDynamic) {
#pragma unroll
            for (int r = 0; r < 2; ++r) overflowed |= write_row(o, inverse[r], work_tile, thread, r);
        }
        if (__any_sync(0xffffffffu, overflowed)) request_recompute(work_tile, thread);
    }

private:
    __device__ __forceinline__ bool ends_in_warp(const WorkTile& work_tile, const Thread& thread) const {
        return thread.first_row_of_warp(work_tile) + Thread::kWarpRows > work_tile.owned_q(context.params);
    }
    __device__ __forceinline__ void request_recompute(const WorkTile& work_tile, const Thread& thread) const {
        if (!work_tile.exact_maximum && thread.lane == 0)
            context.storage.recompute.add(work_tile.assignment.index, thread.warp());
    }

    // write_by_tma() and write_row() return true if a row has values that are not finite although its factor is not NaN: the sum
    // of P V may have overflowed float.
    __device__ __forceinline__ bool write_by_tma(const Sums& o, const float (&inverse)[2], const WorkTile& work_tile,
                                                 const Thread& thread) const {
        const uint32_t tile = context.tiles.out(thread.warp());
        // Addresses are recomputed where registers are scarce.
        const int address_lane = Traits::kDynamic ? hide_from_compiler(thread.lane) : thread.lane;
        RowStore::wait_for_rows(thread.lane);
        uint32_t trace[2] = {};
        RowStore::write_rows(tile, 0, address_lane, o, [&](const float* pair, int i) {
            const float factor = inverse[i % 2];
            const uint32_t word = factor == 0.0f ? 0 : pack_pair(pair[0] * factor, pair[1] * factor, T());
            trace_pair(trace[i % 2], word, T());
            return word;
        });
        if (thread.lane == 0) store_tile(tile, work_tile, thread);
        return (trace[0] != 0 && inverse[0] == inverse[0]) || (trace[1] != 0 && inverse[1] == inverse[1]);
    }
    __device__ __forceinline__ void store_tile(uint32_t tile, const WorkTile& work_tile, const Thread& thread) const {
        const int row = thread.first_row_of_warp(work_tile);
        if (row >= work_tile.owned_q(context.params)) return;
        RowStore::store_chunks(tile, [&](uint32_t chunk, int col) {
            tma_store(chunk, context.maps.out, col, work_tile.start_q() + row, work_tile.head(), work_tile.batch());
        });
    }

    // Writes row r of this thread. Of every 32 channels, each of the row's four lanes writes eight neighbouring channels.
    __device__ __forceinline__ bool write_row(const Sums& o, float inverse, const WorkTile& work_tile, const Thread& thread,
                                              int r) const {
        T* out = rows.address(work_tile, thread.row(work_tile, r));
        const int lane = hide_from_compiler(thread.lane);
        uint32_t trace = 0;
#pragma unroll
        for (int first = 0; first < kHeadDimV / 8; first += 4) {
            if (first * 8 >= context.params.head_dim_v) break;  // also keeps the compiler from starting all iterations at once
            uint32_t words[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float left = o[4 * (first + k) + 2 * r], right = o[4 * (first + k) + 2 * r + 1];
                words[k] = inverse == 0.0f ? 0 : pack_pair(left * inverse, right * inverse, T());
                trace_pair(trace, words[k], T());
            }
            transpose_quad(words, lane);
            rows.write_eight(out, (first + (lane & 3)) * 8, make_uint4(words[0], words[1], words[2], words[3]));
        }
        return trace != 0 && inverse == inverse && thread.row(work_tile, r) < work_tile.length_q(context.params);
    }
};

}  // namespace libflash::cuda::sm90
