// The producer of the forward kernel for sm_90a: a warp finds out what there is to do, and one of its threads copies.
#pragma once

#include "cuda/sm90/forward_rows.cuh"

namespace libflash::cuda::sm90 {

template <class Row, bool kGeneral>
struct ForwardProducer : ForwardRows<Row, kGeneral> {
    using Base = ForwardRows<Row, kGeneral>;
    using Base::Base, Base::common, Base::first_rounds, Base::following, Base::k_smem, Base::kFirstApart, Base::kBlockN,
        Base::kGroupRows, Base::kGroups, Base::kQStages, Base::kStages, Base::kVStages, Base::maps, Base::next_work,
        Base::preceding, Base::fill, Base::q_tile, Base::start_again, Base::v_smem;
    using typename Base::Item, typename Base::KTile, typename Base::QTile, typename Base::Rounds, typename Base::Turn,
        typename Base::VTile;

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
        bool prepared = false;
        do {
            hand_over_all(p, rounds, prepared);
        } while (start_again(rounds));
    }

    // The next item is looked for while the first copies for the present one are under way; the first one while others prepare the barriers, because a
    // warp that executes something for the first time waits for most instructions. After the last item comes one without keys.
    __device__ __forceinline__ void hand_over_all(Producer& p, Rounds& rounds, bool& prepared) const {
        bool found = true, present = false;
#pragma unroll 1
        do {
            found = find_item(rounds, p.leader, p.slot);
            if (!prepared) __syncthreads();
            prepared = true;
            const Item& item = common.items[p.slot];
            if (p.leader) {
                if (present) {
                    if (kQStages == 1 && found) prefetch_q(item);
                    load_keys(p, common.items[preceding(p.slot)]);
                }
                if (found) load_k(p, item, item.keys.end - 1);
                load_q(p, item, found);
                if (!kFirstApart && found && !present) hand_over_no_values(p);
            }
            __syncwarp();
            p.q.advance();
            p.slot = following(p.slot);
            present = true;
        } while (found);
    }

    // The next item that has keys. False: the rounds are over, and the item in the slot has none.
    __device__ __forceinline__ bool find_item(Rounds& rounds, bool leader, int slot) const {
        Item& item = common.items[slot];
        Turn turn;
        while (next_work(rounds, turn)) {
            bool has_keys = false;
            if (leader) {
                fill(item, turn, rounds.safe);
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

    // Also tells the others of the item.
    __device__ __forceinline__ void load_q(const Producer& p, const Item& item, bool has_keys) const {
        for (int group = 0; group < kGroups; ++group) {
            Ring<kQStages> q = p.q;
            q.barriers = shared_address(&common.q[group]);
            q.wait_empty();
            if (has_keys) {
                q.full().arrive_and_expect(QTile::kBytes);
                QTile::load(q_tile(q.stage, group), maps.q, q.full(),
                            item.q_rows.start + item.keys.first_row + group * kGroupRows, item.work.head, item.work.batch);
            } else {
                q.full().arrive();
            }
        }
    }

    // Into the L2 cache: its place in shared memory is not free before the present item is nearly done.
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
    // For the product before the first one.
    __device__ __forceinline__ void hand_over_no_values(Producer& p) const {
        p.v.wait_empty();
        p.v.full().arrive();
        p.v.advance();
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
        Tile::load_first(shared, map, full, item.first_key + row, min(kBlockN, item.keys.length_k - row), item.kv_head,
                         item.work.batch);
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
