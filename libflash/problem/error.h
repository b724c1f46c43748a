// The one exception type of the library: a status and a text for the person who made the call. capi/guard.h turns it into a status
// and the per-thread error text.
#pragma once

#include <stdexcept>
#include <string>

#include "libflash.h"

namespace libflash {

class Error : public std::runtime_error {
public:
    Error(flash_status_t status, const std::string& text) : std::runtime_error(text), status_(status) {}
    flash_status_t status() const { return status_; }

private:
    flash_status_t status_;
};

}  // namespace libflash
