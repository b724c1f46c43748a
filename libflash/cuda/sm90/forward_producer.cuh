// The producer of the forward kernel for sm_90a: a warp finds out what there is to do, and one of its threads copies.
#pragma once

#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm90/forward_rows.cuh"

namespace libflash::cuda::sm90 {

template <class Row, ForwardKind kKind>
struct ForwardProducer : ForwardRows<Row, kKind> {
    using Base = ForwardRows<Row, kKind>;
    using Base::Base, Base::common, Base::first_rounds, Base::kAhead, Base::following, Base::k_smem, Base::kFirstApart,
        Base::kBlockN, Base::kUnequal, Base::kGroupRows, Base::kGroups, Base::kQStages, Base::kStages, Base::kVStages,
        Base::kWalks, Base::maps, Base::next_work, Base::preceding, Base::fill, Base::q_tile, Base::start_again, Base::start_of,
        Base::v_smem, Base::walk_of;
    using typename Base::GroupTiles, typename Base::Item, typename Base::KTile, typename Base::Mend, typename Base::QTile,
        typename Base::Rounds, typename Base::Turn, typename Base::VTile;

    // Where it stands.
    struct Producer {
        bool leader;  // the thread that writes and copies
        Ring<kStages> k;
        Ring<kVStages> v;
        Ring<kQStages> q;  // of any group: they go in step
        Ring<kAhead> ahead;
        int slot;  // the item's
    };

    __device__ __forceinline__ Producer begin() const {
        return {elect_one(),
                Ring<kStages>(common.k),
                Ring<kVStages>(common.v),
                Ring<kQStages>(common.q[0]),
                Ring<kAhead>(common.ahead),
                0};
    }

    // Keys go from the last tile to the first; V of a tile comes after K of the next. What is first copied, the kernel ahead may be about to write.
    __device__ __forceinline__ void produce() const {
        Producer p = begin();
        Rounds rounds{};
        wait_for_kernel_ahead();
        do {
            bool found = take_item(p);
            if (!kFirstApart && found && p.leader) hand_over_no_values(p);
            for (; found; found = take_item(p)) hand_over(p);
            hand_over_end(p);
            rounds.safe = common.items[preceding(p.slot)].safe;  // not kept, for want of registers
        } while (start_again(rounds));
    }

    // The next item that has keys. False: the rounds are over, and the item has none.
    __device__ __forceinline__ bool find_item(Rounds& rounds, bool leader, Item& item) const {
        Turn turn;
        while (next_work(rounds, turn)) {
            bool has_keys = false;
            if (leader) {
                fill(item, turn, rounds.safe);
                has_keys = item.keys.begin != item.keys.end;
            }
            if (__any_sync(0xffffffffu, has_keys)) return true;  // and all see the item
        }
        if (leader) {
            item.keys.begin = item.keys.end = 0;
            for (GroupTiles& tiles : item.of_group) tiles.begin = tiles.end = 0;
            item.safe = rounds.safe;
        }
        return false;
    }

    // A warp of its own is one item ahead of the one that copies, which has K of an item's second tile to ask for when it would look for the next item.
    // Where work is unequal it takes several answers from memory to know an item, which the kernel ahead may be about to write. Else the first one's Q and keys
    // are on their way into the L2 cache while that kernel ends. The next one may begin when no item is left to be found; it waits for the end of all of this.
    __device__ __forceinline__ void look_ahead() const {
        if constexpr (kUnequal) wait_for_kernel_ahead();
        const bool leader = elect_one();
        Ring<kAhead> ahead(common.ahead);
        Rounds rounds = first_rounds();
        int slot = 0;
        bool first = !kUnequal;
        do {
            bool found = true;
#pragma unroll 1
            while (found) {
                ahead.wait_empty();
                __syncwarp();  // all have seen it, before it can be taken and be empty for the second time
                Item& item = common.items[slot];
                found = find_item(rounds, leader, item);
                if (leader) {
                    if (found) prefetch_q(item);
                    if (found && first) prefetch_keys(item);
                    ahead.full().arrive();
                }
                __syncwarp();
                ahead.advance();
                slot = following(slot);
                first = false;
            }
            if (leader) let_next_kernel_begin();  // said again after what is done again, it is nothing
        } while (start_again(rounds));
    }
    __device__ __forceinline__ bool take_item(Producer& p) const {
        p.ahead.wait_full();
        __syncwarp();  // all have seen it, before it can be full for the second time
        if (p.leader) p.ahead.empty().arrive();
        p.ahead.advance();
        const Item& item = common.items[p.slot];
        return item.keys.begin != item.keys.end;
    }

    // The item without keys, and that no tile of V is to be mended any more.
    __device__ __forceinline__ void hand_over_end(Producer& p) const {
        if (p.leader) {
            if constexpr (kUnequal) to_be_mended(p, -1).arrive();
            load_q(p, common.items[p.slot], false);
        }
        done_with(p);
    }
    __device__ __forceinline__ void done_with(Producer& p) const {
        __syncwarp();
        p.q.advance();
        p.slot = following(p.slot);
    }

    // Tells the others of an item, and copies what it needs.
    __device__ __forceinline__ void hand_over(Producer& p) const {
        if constexpr (kWalks) {
            hand_over_found(p);
        } else if (p.leader) {
            const Item& item = common.items[p.slot];
            load_k(p, item, item.keys.end - 1);
            load_q(p, item, true);
            load_keys(p, item);
        }
        done_with(p);
    }
    // The whole warp looks for the next tile. An item of which all are left out has one behind its keys.
    __device__ __forceinline__ void hand_over_found(Producer& p) const {
        const Item& item = common.items[p.slot];
        auto walk = walk_of(item);
        int found = -1, next;
        bool first = true;
#pragma unroll 1
        do {
            next = walk.next();
            if (found < 0 && next < 0) found = (item.keys.length_k + kBlockN - 1) / kBlockN;
            // A tile is asked for when it is known whether another one follows.
            if (p.leader && found >= 0) {
                load_tile(p, item, TileWord::of(found, next < 0), first);
                first = false;
            }
            found = next;
        } while (next >= 0);
        if (p.leader) load_v(p, item, loaded_tile(p, 1));
    }
    __device__ __forceinline__ void load_tile(Producer& p, const Item& item, TileWord word, bool first) const {
        p.k.wait_empty();
        common.unequal.tiles[p.k.stage] = word;
        load_k(p, item, word.tile());
        if (first) {
            load_q(p, item, true);
        } else {
            load_v(p, item, loaded_tile(p, 2));
        }
    }

    // The tile whose K was asked for last, or (2) the one before.
    __device__ __forceinline__ int loaded_tile(const Producer& p, int back) const {
        return common.unequal.tiles[(p.k.stage + kStages - back) % kStages].tile();
    }

    // Also tells the others of the item.
    __device__ __forceinline__ void load_q(const Producer& p, const Item& item, bool has_keys) const {
        for (int group = 0; group < kGroups; ++group) {
            Ring<kQStages> q = p.q;
            q.barriers = shared_address(&common.q[group]);
            q.wait_empty();
            if (has_keys) {
                q.full().arrive_and_expect(QTile::kBytes);
                QTile::load(q_tile(q.stage, group), maps.q, q.full(), start_of(item) + item.keys.first_row + group * kGroupRows,
                            item.work.head, item.work.batch);
            } else {
                q.full().arrive();
            }
        }
    }

    // Into the L2 cache: its place in shared memory may not be free before the present item is nearly done.
    __device__ __forceinline__ void prefetch_q(const Item& item) const {
        for (int group = 0; group < kGroups; ++group)
            QTile::prefetch(maps.q, start_of(item) + item.keys.first_row + group * kGroupRows, item.work.head, item.work.batch);
    }
    // The tile that is loaded first.
    __device__ __forceinline__ void prefetch_keys(const Item& item) const {
        const int row = key_row(item, item.keys.end - 1);
        KTile::prefetch(maps.k, row, item.kv_head, item.work.batch);
        VTile::prefetch(maps.v, row, item.kv_head, item.work.batch);
    }

    __device__ __forceinline__ void load_k(Producer& p, const Item& item, int tile) const {
        p.k.wait_empty();
        p.k.full().arrive_and_expect(KTile::kBytes);
        KTile::load(k_smem + p.k.stage * KTile::kBytes, maps.k, p.k.full(), key_row(item, tile), item.kv_head, item.work.batch);
        p.k.advance();
    }
    // For the product before the first one.
    __device__ __forceinline__ void hand_over_no_values(Producer& p) const {
        p.v.wait_empty();
        p.v.full().arrive();
        p.v.advance();
    }
    __device__ __forceinline__ void load_v(Producer& p, const Item& item, int tile) const {
        p.v.wait_empty();
        MBarrier full = p.v.full();
        if constexpr (kUnequal) {
            const int count = item.keys.length_k - tile * kBlockN;
            if (count < kBlockN && maps.keys_end_early) full = to_be_mended(p, max(count, 0));
        }
        full.arrive_and_expect(VTile::kBytes);
        VTile::load(v_smem + p.v.stage * VTile::kBytes, maps.v, full, key_row(item, tile), item.kv_head, item.work.batch);
        p.v.advance();
    }
    __device__ __forceinline__ int key_row(const Item& item, int tile) const {
        return (kUnequal ? item.first_key : 0) + tile * kBlockN;
    }

    // What a tile of V has of others is multiplied by 0; but that is NaN where they have NaN. So another warp waits for the tile and writes zeros over it
    // before it is handed over. (Of K nothing is done: scores beyond the end are hidden.)
    __device__ __forceinline__ MBarrier to_be_mended(Producer& p, int count) const {
        Mend& mend = common.unequal.mend;
        MBarrier{shared_address(mend.barriers.empty)}.wait(mend.phase ^ 1);
        mend.phase ^= 1;
        mend.stage = p.v.stage, mend.count = count;
        return {shared_address(mend.barriers.full)};
    }
    __device__ __forceinline__ void mend_values() const {
        Ring<1> mend(common.unequal.mend.barriers);
        Rounds rounds{};
        do {
#pragma unroll 1
            while (true) {
                mend.wait_full();
                const volatile Mend& there = common.unequal.mend;
                const bool first = threadIdx.x % 32 == 0;  // it alone reads what it then gives back
                const int stage = __shfl_sync(0xffffffffu, first ? there.stage : 0, 0),
                          count = __shfl_sync(0xffffffffu, first ? there.count : 0, 0);
                if (count >= 0) write_zeros(v_smem + stage * VTile::kBytes, count);
                fence_shared_for_async();
                __syncwarp();
                if (first) {
                    mend.empty().arrive();
                    if (count >= 0) MBarrier{shared_address(&common.v.full[stage])}.arrive();
                }
                mend.advance();
                if (count < 0) break;
            }
        } while (start_again(rounds));
    }
    __device__ __forceinline__ void write_zeros(uint32_t tile, int first_row) const {
        constexpr int kEights = VTile::kChunks * 8;
        for (int i = first_row * kEights + static_cast<int>(threadIdx.x % 32); i < kBlockN * kEights; i += 32)
            store_zeros_16(tile + VTile::offset(i / kEights, i % kEights));
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
