// The producer of the forward kernel for sm_90a: a warp finds out what there is to do, and one of its threads copies.
#pragma once

#include "cuda/ptx/opaque.cuh"
#include "cuda/sm90/forward_rows.cuh"

namespace libflash::cuda::sm90 {

template <class Row, ForwardKind kKind>
struct ForwardProducer : ForwardRows<Row, kKind> {
    using Base = ForwardRows<Row, kKind>;
    using Base::Base, Base::common, Base::first_rounds, Base::kAhead, Base::following, Base::k_smem, Base::kBlockN,
        Base::kUnequal, Base::kGroupRows, Base::kGroups, Base::kQStages, Base::kSkips, Base::kStages, Base::kVStages, Base::maps,
        Base::next_work, Base::fill, Base::q_tile, Base::start_again, Base::v_smem, Base::walk_of;
    using typename Base::Item, typename Base::KTile, typename Base::Nothing, typename Base::QTile, typename Base::Rounds,
        typename Base::VTile;

    // Where it stands.
    struct Producer {
        bool leader;  // the thread that writes and copies
        Ring<kStages> k;
        Ring<kVStages> v;
        Ring<kQStages> q;  // of any group: they go in step
        int slot;          // the item's
        std::conditional_t<kUnequal, Ring<kAhead>, Nothing> ahead;
    };

    __device__ __forceinline__ auto ahead() const {
        if constexpr (kUnequal) {
            return Ring<kAhead>(common.walk.ahead);
        } else {
            return Nothing{};
        }
    }

    // Keys go from the last tile to the first; V of a tile comes after K of the next.
    __device__ __forceinline__ void produce() {
        Producer p{elect_one(), Ring<kStages>(common.k), Ring<kVStages>(common.v), Ring<kQStages>(common.q[0]), 0, ahead()};
        Rounds rounds = first_rounds();
        do {
            hand_over_all(p, rounds);
        } while (start_again(rounds));
    }

    __device__ __forceinline__ void hand_over_all(Producer& p, Rounds& rounds) const {
        bool pending = false, found = true;  // an item is known, and not yet handed over
#pragma unroll 1
        while (found) {
            Item& item = common.items[pending ? slot_after(p) : p.slot];
            if constexpr (kUnequal) {
                found = take_item(p, item);
            } else {
                found = find_item(rounds, p.leader, item);
            }
            if (p.leader && pending) {
                common.items[p.slot].more = found;
                if (found) prefetch_q(common.items[slot_after(p)]);
            }
            if constexpr (kSkips) put_away(p, found);
            if (pending || !found) hand_over(p, pending);
            if constexpr (kSkips) fetch(p, found);
            pending = true;
        }
    }

    // Where registers are short: into shared memory what the loop over an item's tiles does not need, and back.
    __device__ __forceinline__ void put_away(const Producer& p, bool found) const {
        if (p.leader) common.walk.put_away = {p.slot, p.q.stage, p.q.phase, p.ahead.phase, found};
        __syncwarp();
    }
    __device__ __forceinline__ void fetch(Producer& p) const {
        const volatile auto& from = common.walk.put_away;
        p.slot = from.slot, p.q.stage = from.q_stage, p.q.phase = from.q_phase;
    }
    __device__ __forceinline__ void fetch(Producer& p, bool& found) const {
        const volatile auto& from = common.walk.put_away;
        p.ahead.phase = from.ahead_phase, found = from.found;
        __syncwarp();  // before they are written again
    }

    // The next item that has keys. False: the rounds are over, and the item has none.
    __device__ __forceinline__ bool find_item(Rounds& rounds, bool leader, Item& item) const {
        int round;
        WorkTile work;
        while (next_work(rounds, round, work)) {
            bool has_keys = false;
            if (leader) {
                fill(item, round, work, rounds.safe);
                has_keys = item.keys.begin != item.keys.end;
            }
            if (__any_sync(0xffffffffu, has_keys)) return true;  // and all see the item
        }
        if (leader) {
            item.keys.begin = item.keys.end = 0;
            item.safe = rounds.safe;
        }
        return false;
    }

    // Where work is unequal it takes several answers from memory to know the next item, so that another warp is ahead by one.
    __device__ __forceinline__ void look_ahead() const {
        const bool leader = elect_one();
        Ring<kAhead> ahead(common.walk.ahead);
        Rounds rounds = first_rounds();
        do {
            bool found = true;
#pragma unroll 1
            while (found) {
                ahead.wait_empty();
                found = find_item(rounds, leader, common.walk.items_ahead[ahead.stage]);
                if (leader) ahead.full().arrive();
                __syncwarp();
                ahead.advance();
            }
        } while (start_again(rounds));
    }
    __device__ __forceinline__ bool take_item(Producer& p, Item& item) const {
        p.ahead.wait_full();
        const Item& found = common.walk.items_ahead[p.ahead.stage];
        static_assert(sizeof(Item) % 4 == 0 && std::is_trivially_copyable<Item>::value, "copied word by word");
        for (int i = static_cast<int>(threadIdx.x % 32); i < static_cast<int>(sizeof(Item)) / 4; i += 32)
            reinterpret_cast<uint32_t*>(&item)[i] = reinterpret_cast<const uint32_t*>(&found)[i];
        __syncwarp();
        if (p.leader) p.ahead.empty().arrive();
        p.ahead.advance();
        return item.keys.begin != item.keys.end;
    }

    // Tells the others of an item, and copies what it needs, if it has keys.
    __device__ __forceinline__ void hand_over(Producer& p, bool has_keys) const {
        if constexpr (kUnequal) {
            if (has_keys) return hand_over_tiles(p);
        }
        if (p.leader) {
            const Item& item = common.items[p.slot];
            if (has_keys) load_k(p, item, item.keys.end - 1);
            for (int group = 0; group < kGroups; ++group) load_q(p, item, group, has_keys);
            if (has_keys) load_keys(p, item);
        }
        done_with(p);
    }
    __device__ __forceinline__ void done_with(Producer& p) const {
        __syncwarp();
        p.q.advance();
        p.slot = slot_after(p);
    }
    // Made anew each time where registers are short.
    __device__ __forceinline__ int slot_after(const Producer& p) const { return following(kSkips ? opaque(p.slot) : p.slot); }

    // The same where work is unequal; the whole warp looks for the next tile. An item of which all are left out has one that no row sees.
    __device__ __forceinline__ void hand_over_tiles(Producer& p) const {
        const Item& item = common.items[p.slot];
        auto walk = walk_of(item);
        if (p.leader) common.walk.found = TileWord::of(item.keys.begin, false, 0, 0);
        bool first = true;
        int tile;
#pragma unroll 1
        do {
            uint32_t seen = 0;
            tile = walk.next(seen);
            // A tile is asked for when it is known whether another one follows.
            if (p.leader && (tile < 0 || common.walk.found.seen() != 0)) {
                load_tile(p, item, tile < 0, first);
                first = false;
            }
            if (p.leader) common.walk.found = TileWord::of(tile, false, 0, seen);
        } while (tile >= 0);
        if (p.leader) load_v(p, item, loaded_tile(p, 1));
        if constexpr (kSkips) fetch(p);
        done_with(p);
    }
    __device__ __forceinline__ void load_tile(Producer& p, const Item& item, bool last, bool first) const {
        const TileWord found = common.walk.found;
        p.k.wait_empty();
        common.walk.tiles[p.k.stage] = TileWord::of(found.tile(), last, groups_that_do(last, found.seen()), found.seen());
        load_k(p, item, found.tile());
        if (!first) return load_v(p, item, loaded_tile(p, 2));
        if constexpr (kSkips) fetch(p);
        for (int group = 0; group < kGroups; ++group) load_q(p, item, group, true);
    }

    // The tile whose K was asked for last, or (2) the one before.
    __device__ __forceinline__ int loaded_tile(const Producer& p, int back) const {
        return common.walk.tiles[(p.k.stage + kStages - back) % kStages].tile();
    }

    // Every group does the last tile, and one after kStages - 1 others that it has left out, whether its rows see it or not: V of the tile before is given
    // back only after scores of the next have begun. `recent` has a digit for each of so many tiles: the groups that did it, a bit each.
    __device__ __forceinline__ uint32_t groups_that_do(bool last, uint32_t seen) const {
        constexpr uint32_t kAll = (1u << kGroups) - 1;
        if (!kSkips) return kAll;
        uint32_t did = 0;
#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) did |= common.walk.recent >> i * kGroups;
        const uint32_t some = last ? kAll : (seen | ~did) & kAll;
        common.walk.recent = common.walk.recent << kGroups | some;
        return some;
    }

    __device__ __forceinline__ void load_q(const Producer& p, const Item& item, int group, bool has_keys) const {
        Ring<kQStages> q = p.q;
        q.barriers = shared_address(&common.q[group]);
        q.wait_empty();
        if (!has_keys) return q.full().arrive();
        q.full().arrive_and_expect(QTile::kBytes);
        QTile::load(q_tile(q.stage, group), maps.q, q.full(), item.q_rows.start + item.keys.first_row + group * kGroupRows,
                    item.work.head, item.work.batch);
    }

    // Into the L2 cache: its place in shared memory may not be free before the present item is nearly done.
    __device__ __forceinline__ void prefetch_q(const Item& item) const {
        for (int group = 0; group < kGroups; ++group)
            for (int chunk = 0; chunk < QTile::kChunks; ++chunk)
                tma_prefetch(maps.q, chunk * 64, item.q_rows.start + item.keys.first_row + group * kGroupRows, item.work.head,
                             item.work.batch);
    }

    __device__ __forceinline__ void load_k(Producer& p, const Item& item, int tile) const {
        p.k.wait_empty();
        p.k.full().arrive_and_expect(KTile::kBytes);
        load_rows<KTile>(k_smem + p.k.stage * KTile::kBytes, maps.k, p.k.full(), item, tile);
        p.k.advance();
    }
    __device__ __forceinline__ void load_v(Producer& p, const Item& item, int tile) const {
        p.v.wait_empty();
        p.v.full().arrive_and_expect(VTile::kBytes);
        load_rows<VTile>(v_smem + p.v.stage * VTile::kBytes, maps.v, p.v.full(), item, tile);
        p.v.advance();
    }
    template <class Tile>
    __device__ __forceinline__ void load_rows(uint32_t shared, const CUtensorMap& map, const MBarrier& full, const Item& item,
                                              int tile) const {
        const int row = tile * kBlockN;
        if (!maps.ragged_keys) return Tile::load(shared, map, full, row, item.kv_head, item.work.batch);
        const int count = min(kBlockN, item.keys.length_k - row);
        Tile::load(shared, map, full, kBlockN - count, item.first_key + row + count, item.kv_head);
    }
    __device__ __forceinline__ void load_keys(Producer& p, const Item& item) const {
#pragma unroll 1
        for (int tile = item.keys.end - 2; tile >= item.keys.begin; --tile) {
            load_k(p, item, tile);
            load_v(p, item, tile + 1);
        }
        load_v(p, item, item.keys.begin);
    }
};

}  // namespace libflash::cuda::sm90
