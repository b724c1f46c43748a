// The boundary between C++ and C: guard() runs a body and turns an exception into a status and the text of flash_last_error().
#pragma once

#include <new>
#include <system_error>

#include "problem/error.h"

namespace libflash {

// The error text of this thread is a plain character array, so no destructor runs when a thread ends or the library is unloaded.
void set_last_error(const char* text) noexcept;  // truncated to 2047 characters
const char* last_error() noexcept;

template <class Body>
flash_status_t guard(const Body& body) noexcept {
    try {
        body();
        set_last_error("");
        return FLASH_STATUS_OK;
    } catch (const Error& error) {
        set_last_error(error.what());
        return error.status();
    } catch (const std::bad_alloc&) {
        set_last_error("out of host memory");
        return FLASH_STATUS_OUT_OF_MEMORY;
    } catch (const std::system_error& error) {
        set_last_error(error.what());
        return FLASH_STATUS_OUT_OF_MEMORY;
    } catch (const std::exception& error) {
        set_last_error(error.what());
        return FLASH_STATUS_INTERNAL;
    } catch (...) {
        set_last_error("an exception of unknown type");
        return FLASH_STATUS_INTERNAL;
    }
}

}  // namespace libflash
