// A shard of a KV cache: the keys of each sequence are divided into blocks of `keys` keys, which are assigned to `count` caches
// in turn.
#pragma once

#include <cstdint>

namespace libflash {

// Key t is on shard t / keys % count. The keys of a sequence that a shard has are rows 0, 1, 2, ... of its cache, without gaps.
struct CacheShard {
    int64_t count = 1, index = 0, keys = 1;

    bool whole() const { return count == 1; }
    bool has(int64_t key) const { return whole() || key / keys % count == index; }
    // How many keys before `key` this shard has. This is the row of `key` if the shard has it.
    int64_t row_of(int64_t key) const {
        if (whole()) return key;
        const int64_t round = count * keys, rest = key % round - index * keys;
        return key / round * keys + (rest < 0 ? 0 : rest < keys ? rest : keys);
    }
    // The key in row `row` of this shard.
    int64_t key_of(int64_t row) const { return whole() ? row : (row / keys * count + index) * keys + row % keys; }
};

}  // namespace libflash
