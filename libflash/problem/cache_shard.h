// A shard of a KV cache: the keys of each sequence are divided over several caches in blocks, in turn.
#pragma once

#include <cstdint>

namespace libflash {

// Key t is on shard t / keys % count. The keys of a shard follow each other in its cache: its rows are 0, 1, 2, ...
struct CacheShard {
    int64_t count = 1, index = 0, keys = 1;

    bool whole() const { return count == 1; }
    bool has(int64_t key) const { return whole() || key / keys % count == index; }
    // How many keys before `key` this shard has: the row of `key` if it is here.
    int64_t row_of(int64_t key) const {
        if (whole()) return key;
        const int64_t round = count * keys, rest = key % round - index * keys;
        return key / round * keys + (rest < 0 ? 0 : rest < keys ? rest : keys);
    }
    int64_t key_of(int64_t row) const { return whole() ? row : (row / keys * count + index) * keys + row % keys; }
};

}  // namespace libflash
