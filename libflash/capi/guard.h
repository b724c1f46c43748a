// The one edge between C++ and C: runs a body, and turns whatever it throws into a status and the text of flash_last_error().
#pragma once

#include <new>
#include <system_error>

#include "problem/error.h"

namespace libflash {

// The text of this thread: plain characters, so that neither the end of a thread nor unloading has anything to destroy.
void set_last_error(const char* text) noexcept;  // cut if it is very long
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
