#include "problem/workspace.h"

#include <cstdint>
#include <cstring>

#include "problem/check.h"

namespace libflash {

size_t Workspace::add(const char* name, size_t bytes) {
    const size_t offset = bytes_;
    size_t padded = 0;
    if (count_ == kMaxRegions) throw Error(FLASH_STATUS_INTERNAL, "more workspace regions than there is room for");
    if (__builtin_add_overflow(bytes, kWorkspaceAlignment - 1, &padded) ||
        __builtin_add_overflow(bytes_, padded / kWorkspaceAlignment * kWorkspaceAlignment, &bytes_) ||
        bytes_ > static_cast<size_t>(PTRDIFF_MAX)) {
        refuse(FLASH_STATUS_UNSUPPORTED, "workspace", "its size in bytes must be below 2^63", text_of("region ", name));
    }
    regions_[count_++] = {name, offset};
    return offset;
}

size_t Workspace::offset(const char* name) const {
    for (int i = 0; i < count_; ++i) {
        if (std::strcmp(regions_[i].name, name) == 0) return regions_[i].offset;
    }
    throw Error(FLASH_STATUS_INTERNAL, text_of("no workspace region ", name));
}

void check_workspace(size_t needed, const void* workspace, size_t bytes) {
    if (needed == 0) return;
    if (!workspace) {
        refuse(FLASH_STATUS_WORKSPACE, "workspace", "must not be NULL for this call", text_of("it needs ", needed, " bytes"));
    }
    if (bytes < needed) {
        refuse(FLASH_STATUS_WORKSPACE, "workspace_bytes", "must be at least the size that the workspace query returns",
               text_of("it is ", bytes, ", the call needs ", needed));
    }
    if (reinterpret_cast<uintptr_t>(workspace) % kWorkspaceAlignment != 0) {
        refuse(FLASH_STATUS_WORKSPACE, "workspace", "must be aligned to 256",
               text_of("address modulo 256 is ", reinterpret_cast<uintptr_t>(workspace) % kWorkspaceAlignment,
                       ", the call needs ", needed, " bytes"));
    }
}

}  // namespace libflash
