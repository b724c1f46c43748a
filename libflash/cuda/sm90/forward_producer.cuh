// The producer of the forward kernel for sm_90a: one thread finds out what there is to do, and copies.
#pragma once

#include "cuda/sm90/forward_rows.cuh"

namespace libflash::cuda::sm90 {

template <class Row>
struct ForwardProducer : ForwardRows<Row> {
    using Base = ForwardRows<Row>;
    using Base::Base, Base::common, Base::first_rounds, Base::following, Base::k_smem, Base::kBlockN, Base::kGroupRows,
        Base::kGroups, Base::kQStages, Base::kStages, Base::kVStages, Base::maps, Base::next_item, Base::q_tile,
        Base::start_again, Base::v_smem;
    using typename Base::Item, typename Base::KTile, typename Base::QTile, typename Base::Rounds, typename Base::VTile;

    // Where it stands.
    struct Producer {
        Ring<kStages> k;
        Ring<kVStages> v;
        Ring<kQStages> q;  // of any group: they go in step
        int slot;          // the item's
    };

    // One warp, of which one lane works. Keys go from the last tile to the first; V of a tile comes after K of the next.
    __device__ __forceinline__ void produce() {
        const bool leader = elect_one();
        Producer p{Ring<kStages>(common.k), Ring<kVStages>(common.v), Ring<kQStages>(common.q[0]), 0};
        Rounds rounds = first_rounds();
        do {
            if (leader) hand_over_all(p, rounds);
            __syncwarp();
        } while (start_again(rounds));
    }

    __device__ __forceinline__ void hand_over_all(Producer& p, Rounds& rounds) const {
        bool pending = false, found = true;  // an item is known, and not yet handed over
#pragma unroll 1
        while (found) {
            Item& item = common.items[pending ? following(p.slot) : p.slot];
            found = find_item(rounds, item);
            if (pending) {
                common.items[p.slot].more = found;
                if (found) prefetch_q(item);
            }
            if (pending || !found) hand_over(p, pending);
            pending = true;
        }
    }

    // The next item that has keys. False: the rounds are over, and the item has none.
    __device__ __forceinline__ bool find_item(Rounds& rounds, Item& item) const {
        while (next_item(rounds, item)) {
            if (item.keys.begin != item.keys.end) return true;
        }
        item.keys.begin = item.keys.end = 0;
        item.safe = rounds.safe;
        return false;
    }

    // Tells the others of an item, and copies what it needs, if it has keys.
    __device__ __forceinline__ void hand_over(Producer& p, bool has_keys) const {
        const Item& item = common.items[p.slot];
        if (has_keys) load_k(p, item, item.keys.end - 1);
        for (int group = 0; group < kGroups; ++group) {
            Ring<kQStages> q = p.q;
            q.barriers = shared_address(&common.q[group]);
            q.wait_empty();
            if (!has_keys) {
                q.full().arrive();
                continue;
            }
            q.full().arrive_and_expect(QTile::kBytes);
            QTile::load(q_tile(q.stage, group), maps.q, q.full(), item.keys.first_row + group * kGroupRows, item.work.head,
                        item.work.batch);
        }
        if (has_keys) load_keys(p, item);
        p.q.advance();
        p.slot = following(p.slot);
    }
    // Into the L2 cache: its place in shared memory is not free before the present item is nearly done.
    __device__ __forceinline__ void prefetch_q(const Item& item) const {
        for (int group = 0; group < kGroups; ++group)
            for (int chunk = 0; chunk < QTile::kChunks; ++chunk)
                tma_prefetch(maps.q, chunk * 64, item.keys.first_row + group * kGroupRows, item.work.head, item.work.batch);
    }

    __device__ __forceinline__ void load_k(Producer& p, const Item& item, int tile) const {
        p.k.wait_empty();
        p.k.full().arrive_and_expect(KTile::kBytes);
        KTile::load(k_smem + p.k.stage * KTile::kBytes, maps.k, p.k.full(), tile * kBlockN, item.kv_head, item.work.batch);
        p.k.advance();
    }
    __device__ __forceinline__ void load_v(Producer& p, const Item& item, int tile) const {
        p.v.wait_empty();
        p.v.full().arrive_and_expect(VTile::kBytes);
        VTile::load(v_smem + p.v.stage * VTile::kBytes, maps.v, p.v.full(), tile * kBlockN, item.kv_head, item.work.batch);
        p.v.advance();
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
