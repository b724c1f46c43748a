// A new row of keys and values: where it comes from, its number and position in its sequence, and where it is written.
#pragma once

#include "cuda/attention/decode_keys.cuh"
#include "cuda/attention/ragged_keys.cuh"

namespace libflash::cuda {

struct AppendedKey {
    int32_t batch;      // negative: there is no such row
    int32_t in_tensor;  // the row in the batch entry or the packed tensor
    int32_t key;        // its number in the sequence
    int32_t position;   // for the rotary embedding

    // `row`: counted over all sequences.
    static __device__ __forceinline__ AppendedKey of(const DecodeParams& params, int row) {
        if (params.ragged.active) return of_ragged(params, row);
        const int news = params.cache.seqlen_new, batch = row / news, in_sequence = row - batch * news;
        const int key = cached_keys(params, batch) + in_sequence;
        return {batch, in_sequence, key, key};
    }

    // The page is invalid if the row does not fit, is on another shard, or has no page.
    __device__ __forceinline__ KeyLocation location(const DecodeParams& params) const {
        if (!has_key(params.shard, key)) return {-1, 0};
        const int cached = row_of_key(params.shard, key);
        return cached < params.cache.capacity ? KeyLocations(params.cache, batch).of(cached) : KeyLocation{-1, 0};
    }

private:
    static __device__ __forceinline__ AppendedKey of_ragged(const DecodeParams& params, int row) {
        const RaggedParams& ragged = params.ragged;
        const RaggedRow own = RaggedRow::of(ragged.news, params.batch, row);
        if (own.batch < 0 || own.batch >= params.batch) return {-1, 0, 0, 0};
        const int key = cached_keys(params, own.batch) + own.row;
        int position = key;
        if (ragged.positions) {  // positions of the last keys, one for each query row
            const RaggedSequence queries = RaggedSequence::of(ragged, own.batch);
            const int n = key - (ragged_key_count(params, own.batch).length - queries.rows);
            if (n >= 0) position = ragged_position(ragged.positions, queries.before + n);
        }
        return {own.batch, ragged.news.cu ? row : own.row, key, position};
    }
};

}  // namespace libflash::cuda
