// Replaces the library's header. Each lane is alone, which is one of the things that can happen on a GPU.
#pragma once

namespace libflash::cuda {

struct ActiveLanes {
    static ActiveLanes now() { return {}; }

    int count() const { return 1; }
    int rank() const { return 0; }
    int max(int x) const { return x; }
};

}  // namespace libflash::cuda
