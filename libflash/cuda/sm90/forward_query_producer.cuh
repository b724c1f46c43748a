// The warp of the sm_90a forward kernel that loads Q where a warpgroup of its own copies keys and values
// (forward_copy_warpgroup.cuh). It also announces work tiles to the consumers, which wait for Q.
#pragma once

#include "cuda/sm90/forward_producer.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardQueryProducer : ForwardProducer<Traits> {
    using Producer = ForwardProducer<Traits>;
    using Producer::context, Producer::scheduler;
    using typename Producer::State, typename Producer::Storage;

    __device__ __forceinline__ explicit ForwardQueryProducer(const ForwardContext<Traits>& of_kernel) : Producer{of_kernel} {}

    __device__ __forceinline__ void run() const {
        State p = this->initial_state();
        ScheduleCursor cursor{};
        wait_for_previous_kernel();
        do {
            bool found = true;
            while (found) {
                found = this->wait_for_work_tile(p);
                if (p.leader) this->load_q(p, context.storage.work_tiles[p.slot], found);
                this->go_to_next_slot(p);
            }
            cursor.exact_maximum = context.storage.work_tiles[Storage::previous_slot(p.slot)].exact_maximum;
        } while (scheduler.start_recompute(cursor));
    }
};

}  // namespace libflash::cuda::sm90
