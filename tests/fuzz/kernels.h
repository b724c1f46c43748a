// The kernels that the target chooses from: every one that this machine can run, by name.
#pragma once

#include <string>
#include <vector>

#include "check.h"

namespace fuzz {

inline std::vector<std::string> usable_kernels(const std::string& operation) {
    std::vector<std::string> names;
    for (int32_t n = 0; n < flash_kernel_count(); ++n) {
        flash_kernel_info_t info = {};
        info.struct_size = sizeof info;
        check_status(flash_kernel_info(n, &info), FLASH_STATUS_OK, "flash_kernel_info");
        if (info.usable && operation == info.operation && std::string("cpu") == info.backend) names.emplace_back(info.name);
    }
    return names;
}

// The name of a usable kernel of the operation, or nullptr for the library's choice.
inline const char* pick_kernel(const std::vector<std::string>& names, Bytes& bytes) {
    const auto n = static_cast<size_t>(bytes.below(static_cast<int64_t>(names.size()) + 1));
    return n == 0 ? nullptr : names[n - 1].c_str();
}

}  // namespace fuzz
