// The producer of the forward kernel for sm_90a: a warp finds out what there is to do, and one of its threads copies.
#pragma once

#include "cuda/sm90/forward_rows.cuh"

namespace libflash::cuda::sm90 {

template <class Row, bool kGeneral>
struct ForwardProducer : ForwardRows<Row, kGeneral> {
    using Base = ForwardRows<Row, kGeneral>;
    using Base::Base, Base::common, Base::first_rounds, Base::following, Base::k_smem, Base::kBlockN, Base::kGroupRows,
        Base::kGroups, Base::kQStages, Base::kStages, Base::kVStages, Base::maps, Base::next_work, Base::fill, Base::q_tile,
        Base::start_again, Base::v_smem;
    using typename Base::Item, typename Base::KTile, typename Base::QTile, typename Base::Rounds, typename Base::VTile;

    // Where it stands.
    struct Producer {
        bool leader;  // the thread that writes and copies
        Ring<kStages> k;
        Ring<kVStages> v;
        Ring<kQStages> q;  // of any group: they go in step
        int slot;          // the item's
    };

    // Keys go from the last tile to the first; V of a tile comes after K of the next.
    __device__ __forceinline__ void produce() {
        Producer p{elect_one(), Ring<kStages>(common.k), Ring<kVStages>(common.v), Ring<kQStages>(common.q[0]), 0};
        Rounds rounds = first_rounds();
        do {
            hand_over_all(p, rounds);
        } while (start_again(rounds));
    }

    __device__ __forceinline__ void hand_over_all(Producer& p, Rounds& rounds) const {
        bool pending = false, found = true;  // an item is known, and not yet handed over
#pragma unroll 1
        while (found) {
            found = find_item(rounds, p.leader, pending ? following(p.slot) : p.slot);
            if (p.leader && pending) {
                common.items[p.slot].more = found;
                if (found) prefetch_q(common.items[following(p.slot)]);
            }
            if (pending || !found) hand_over(p, pending);
            pending = true;
        }
    }

    // The next item that has keys. False: the rounds are over, and the item in the slot has none.
    __device__ __forceinline__ bool find_item(Rounds& rounds, bool leader, int slot) const {
        Item& item = common.items[slot];
        int round;
        WorkTile work;
        while (next_work(rounds, round, work)) {
            bool has_keys = false;
            if (leader) {
                fill(item, round, work, rounds.safe);
                has_keys = item.keys.begin != item.keys.end;
            }
            if (__any_sync(0xffffffffu, has_keys)) return true;
        }
        if (leader) {
            item.keys.begin = item.keys.end = 0;
            item.safe = rounds.safe;
        }
        return false;
    }

    // Tells the others of an item, and copies what it needs, if it has keys.
    __device__ __forceinline__ void hand_over(Producer& p, bool has_keys) const {
        if (p.leader) {
            const Item& item = common.items[p.slot];
            if (has_keys) load_k(p, item, item.keys.end - 1);
            for (int group = 0; group < kGroups; ++group) load_q(p, item, group, has_keys);
            if (has_keys) load_keys(p, item);
        }
        __syncwarp();
        p.q.advance();
        p.slot = following(p.slot);
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
