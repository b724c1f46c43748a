// The loads of a thread block of decode: the queries, the keys and values of a tile, and the prefetch of the first tile. `Body`:
// Decode in decode_range.cuh.
#pragma once

#include "cuda/attention/decode_keys.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/prefetch.cuh"

namespace libflash::cuda::sm80 {

template <class Body>
struct DecodeLoads {
    using T = typename Body::Element;
    using Slab = typename Body::Slab;
    static constexpr int kHeadDim = Body::kChannels, kHeads = Body::kHeadsOfBlock, kThreads = Body::kThreads;
    static constexpr int kTileK = Body::kTileK, kTileRows = Body::kTileRows;
    static constexpr int kChunkValues = Body::kChunkValues, kChunks = kHeadDim / kChunkValues;
    // The elements and 16-byte chunks of a row of the cache.
    using Stored = typename Body::Stored;
    static constexpr int kStoredValues = 16 / sizeof(Stored), kStoredChunks = kHeadDim / kStoredValues;
    static constexpr int kLanesPerRow = kStoredChunks < 32 ? kStoredChunks : 32, kRowsAtOnce = 32 / kLanesPerRow;

    Body& body;

    // Copies `count` values of any alignment; the rest of the chunk becomes zeros.
    template <class E>
    static __device__ __forceinline__ void copy_slowly(char* to, const E* from, int count) {
#pragma unroll 1
        for (int i = 0; i < static_cast<int>(16 / sizeof(E)); ++i) reinterpret_cast<E*>(to)[i] = i < count ? from[i] : E(0.0f);
    }

    __device__ __forceinline__ void load_queries() {
        for (int i = threadIdx.x; i < kTileRows * kChunks; i += kThreads) {
            const int row = i / kChunks, chunk = i % kChunks, of_head = kHeads > 1 ? row % Body::kQueryRows : row;
            const int head_k = body.work_tile.head_k + (kHeads > 1 ? row / Body::kQueryRows : 0),
                      packed = body.work_tile.first_row + min(of_head, body.work_tile.rows - 1);
            const T* from = static_cast<const T*>(body.params.q.data) + body.work_tile.batch * body.params.q.batch +
                            body.tensor_row(packed) * body.params.q.row + body.query_head(head_k, packed) * body.params.q.head +
                            chunk * kChunkValues;
            const int count = of_head < body.work_tile.rows ? body.params.head_dim - chunk * kChunkValues : 0;
            char* const to = body.queries() + Slab::offset(row, chunk);
            if (body.params.vector_q) {
                cp_async_16(shared_address(to), from, count > 0);
            } else {
                copy_slowly(to, from, count);
            }
        }
    }

    // Starts the loads of this warp's 16 keys and values of a tile; with kLoadsInTurn of the keys alone. Keys that do not exist
    // become zeros. `location`: of key `lane`, in the first 16 lanes. `consecutive`: keys that exist are consecutive rows of the
    // cache, and can be read 16 bytes at a time.
    __device__ __forceinline__ void load_keys(int head_k, int stage, const KeyLocation& location, bool consecutive = false) {
        const bool exists = static_cast<uint32_t>(location.page) < static_cast<uint32_t>(body.params.cache.pages);
        const uint32_t all = __ballot_sync(0xffffffffu, exists);
        if (body.lane == 0 && body.part() == 0) body.existing(stage, body.warp) = all;
        if constexpr (Body::kHasFewRows) {
            if (all == (1u << kDecodeSlab) - 1 && consecutive) return load_consecutive_keys(head_k, stage, location);
        }
        load_rows<true, !Body::kLoadsInTurn>(head_k, stage, location, all);
        if constexpr (Body::kHasRareOptions) {
            if (body.params.rope.channels > 0) load_rope(head_k, stage, location, all);
        }
    }

    // Starts the loads of the warp's keys, of its values, or of both. The first 16 lanes compute the address of a key each, the
    // other lanes that of a value. Bit i of `all`: key i exists.
    template <bool kKeys, bool kValues>
    __device__ __forceinline__ void load_rows(int head_k, int stage, const KeyLocation& location, uint32_t all) {
        const RowsParams& rows = body.lane < kDecodeSlab ? body.params.cache.k : body.params.cache.v;
        const int64_t page = __shfl_sync(0xffffffffu, location.page, body.lane % kDecodeSlab);
        const int64_t at = __shfl_sync(0xffffffffu, location.row, body.lane % kDecodeSlab);
        const auto own = reinterpret_cast<uintptr_t>(static_cast<const Stored*>(rows.data) + page * rows.batch + at * rows.row +
                                                     head_k * rows.head);
        const auto copy_rows = [&](int step, const auto& copy) {
            const int row = step * kRowsAtOnce + body.lane / kLanesPerRow;
            const auto* const k = reinterpret_cast<const Stored*>(__shfl_sync(0xffffffffu, own, row));
            const auto* const v = reinterpret_cast<const Stored*>(__shfl_sync(0xffffffffu, own, kDecodeSlab + row));
            const bool there = all >> row & 1;
#pragma unroll
            for (int chunk = body.lane % kLanesPerRow; chunk < kStoredChunks; chunk += kLanesPerRow) {
                const int first = chunk * kStoredValues, offset = Body::stored_offset(row, chunk);
                if (kKeys && has_key_chunk(first))
                    copy(body.stored_keys(stage, body.warp) + offset, k + first, there ? key_channels() - first : 0);
                if (kValues && has_value_chunk(first))
                    copy(body.stored_values(stage, body.warp) + offset, v + first, there ? body.params.head_dim_v - first : 0);
            }
        };
        if (body.params.vector_kv) {
#pragma unroll(Slab::kRowBytes > 512 ? 2 : kDecodeSlab)
            for (int step = body.part(); step < kDecodeSlab / kRowsAtOnce; step += Body::kParts)
                copy_rows(step,
                          [](char* to, const Stored* rows, int count) { cp_async_16(shared_address(to), rows, count > 0); });
        } else {
#pragma unroll 1
            for (int step = body.part(); step < kDecodeSlab / kRowsAtOnce; step += Body::kParts)
                copy_rows(step, copy_slowly<Stored>);
        }
    }

    // load_keys() for consecutive keys that all exist: the addresses of all rows follow from that of the first row.
    __device__ __forceinline__ void load_consecutive_keys(int head_k, int stage, const KeyLocation& location) {
        static_assert(kLanesPerRow == kStoredChunks);
        const int row = body.lane / kLanesPerRow, chunk = body.lane % kLanesPerRow, first = chunk * kStoredValues;
        // With unsigned numbers, 64-bit products take fewer instructions.
        const uint32_t page = __shfl_sync(0xffffffffu, location.page, 0), at = __shfl_sync(0xffffffffu, location.row, 0) + row,
                       head = head_k;
        const auto load = [&](const RowsParams& rows, char* to, int channels) {
            const Stored* from =
                static_cast<const Stored*>(rows.data) + page * rows.batch + at * rows.row + head * rows.head + first;
#pragma unroll
            for (int step = 0; step < kDecodeSlab / kRowsAtOnce; ++step) {
                cp_async_16(shared_address(to + Body::stored_offset(step * kRowsAtOnce + row, chunk)), from, first < channels);
                from += kRowsAtOnce * rows.row;
            }
        };
        load(body.params.cache.k, body.stored_keys(stage, body.warp), body.params.head_dim);
        load(body.params.cache.v, body.stored_values(stage, body.warp), body.params.head_dim_v);
    }

    // The channels of k_cache. In a tile of elements the channels of k_rope_cache follow them; with codes they are stored
    // separately.
    __device__ __forceinline__ int key_channels() const {
        if constexpr (Body::kHasRareOptions) return body.params.k_channels;
        return body.params.head_dim;
    }
    __device__ __forceinline__ bool has_key_chunk(int first) const {
        if constexpr (Body::kHasRareOptions && !Body::kCodes)
            return body.params.rope.channels == 0 || first < body.params.k_channels;
        return true;
    }
    __device__ __forceinline__ bool has_value_chunk(int first) const {
        if constexpr (Body::kMayBeInKeys) return first < Body::kValueChannels && !body.params.values_in_keys;
        return true;
    }
    // Starts the loads of the channels of k_rope_cache. Bit i of `exist`: key i of the warp exists.
    __device__ __forceinline__ void load_rope(int head_k, int stage, const KeyLocation& location, uint32_t exist) {
        const RopeParams& rope = body.params.rope;
        const int before = Body::kCodes ? 0 : body.params.k_channels / kChunkValues;
        const int chunks = (Body::kCodes ? Body::kRopeChannels : kHeadDim) / kChunkValues - before;
        const T* const from = static_cast<const T*>(rope.cache.data) + head_k * rope.cache.head;
#pragma unroll 1
        for (int i = body.part(); i < kDecodeSlab; i += Body::kParts) {
            const int64_t page = __shfl_sync(0xffffffffu, location.page, i), at = __shfl_sync(0xffffffffu, location.row, i);
            const int count = exist >> i & 1 ? rope.channels : 0;
            for (int chunk = body.lane; chunk < chunks; chunk += 32) {
                const int first = chunk * kChunkValues;
                char* const to = Body::kCodes ? body.stored_rope(stage, body.warp) + (i * chunks + chunk) * 16
                                              : body.stored_keys(stage, body.warp) + Slab::offset(i, before + chunk);
                const T* const row = from + page * rope.cache.batch + at * rope.cache.row + first;
                if (body.params.vector_kv) {
                    cp_async_16(shared_address(to), row, count > first);
                } else {
                    copy_slowly(to, row, count - first);
                }
            }
        }
    }

    // Prefetches the first tile into the L2 cache while the previous kernel ends and memory is idle. This is correct even if
    // that kernel still writes to the KV cache, because its writes go through L2, too. Lengths and block table may still
    // change; no result depends on what is read here.
    static __device__ __forceinline__ void fetch_early(const DecodeParams& params) {
        constexpr int kLine = 128 / sizeof(Stored), kLines = (kHeadDim + kLine - 1) / kLine;  // of a key of one head
        const typename Body::WorkTile work_tile(params, static_cast<int>(blockIdx.x));
        const CacheParams& cache = params.cache;
        const VisibleKeys range = Body::template keys_of<RelaxedLoad>(params, work_tile);
        const KeyLocationsOf<RelaxedLoad> locations(cache, work_tile.batch);
        const int begin = range.first / kTileK * kTileK;
#pragma unroll 1
        for (int i = threadIdx.x; i < kTileK * kHeads * kLines; i += kThreads) {
            const int key = begin + i / (kHeads * kLines), head_k = work_tile.head_k + i / kLines % kHeads,
                      channel = i % kLines * kLine;
            if (key < range.first || key >= range.last) continue;
            const KeyLocation at = locations.of(key);
            if (static_cast<uint32_t>(at.page) >= static_cast<uint32_t>(cache.pages)) continue;
            const auto fetch = [&](const RowsParams& rows, int channels) {
                const Stored* row =
                    static_cast<const Stored*>(rows.data) + at.page * rows.batch + at.row * rows.row + head_k * rows.head;
                if (channel < channels) prefetch_to_l2(row + channel);
            };
            fetch(cache.k, params.head_dim);
            fetch(cache.v, params.head_dim_v);
        }
    }
};

}  // namespace libflash::cuda::sm80
