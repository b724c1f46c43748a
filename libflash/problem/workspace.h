// The layout of a plan's workspace, as named regions of one block, and the check of the block that the caller passes.
#pragma once

#include <cstddef>

namespace libflash {

constexpr size_t kWorkspaceAlignment = 256;

// Regions one after another, each aligned to kWorkspaceAlignment. A plan adds them; a launch looks up their offsets by name.
class Workspace {
public:
    // Returns the offset of the region in bytes. `name` must outlive the object. Refuses a workspace of 2^63 bytes or more.
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

// Refuses a block that is missing, too small or misaligned. If `needed` is 0, any block is accepted.
void check_workspace(size_t needed, const void* workspace, size_t bytes);

}  // namespace libflash
