// Scratch memory: what a plan needs, as named regions of one block, and the check of the block that the caller passes.
#pragma once

#include <cstddef>

namespace libflash {

constexpr size_t kWorkspaceAlignment = 256;

// Regions one after the other, each aligned. A plan adds them in a fixed order; a launch finds them again by name.
class Workspace {
public:
    // Returns the offset. `name` must outlive the object. Refuses what does not fit into an address space.
    size_t add(const char* name, size_t bytes);
    size_t offset(const char* name) const;
    size_t bytes() const { return bytes_; }

private:
    static constexpr int kMaxRegions = 16;
    struct Region {
        const char* name;
        size_t offset;
    };
    Region regions_[kMaxRegions];
    int count_ = 0;
    size_t bytes_ = 0;
};

// Refuses a block that is missing, short or misaligned; `needed` of 0 needs none.
void check_workspace(size_t needed, const void* workspace, size_t bytes);

}  // namespace libflash
