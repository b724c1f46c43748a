// The only exception type that the library throws: a status and a text for the caller. capi/guard.h returns the status and stores
// the text for flash_last_error().
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
