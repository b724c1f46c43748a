// Calls of functions of the C library by their oldest version; see old_glibc.cmake. The linker turns each call of `name` into one
// of __wrap_name, which jumps to the old version.
#include <dlfcn.h>
#include <link.h>

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#define FLASH_VERSION_OF(version) version
#define FLASH_JUMP(name) "jmp old_" #name "@PLT\n"
#elif defined(__aarch64__)
#define FLASH_VERSION_OF(version) "2.17"
#define FLASH_JUMP(name) "b old_" #name "\n"
#else
#error "LIBFLASH_OLD_GLIBC: x86-64 or 64-bit Arm is needed"
#endif

// A section for each, so that the linker drops those that nobody calls.
#define FLASH_OLD(name, version)                                        \
    __asm__(".symver old_" #name ", " #name "@GLIBC_" FLASH_VERSION_OF( \
        version) "\n"                                                   \
                 ".pushsection .text.__wrap_" #name                     \
                 ", \"ax\", %progbits\n"                                \
                 ".globl __wrap_" #name                                 \
                 "\n"                                                   \
                 ".hidden __wrap_" #name                                \
                 "\n"                                                   \
                 ".type __wrap_" #name                                  \
                 ", %function\n"                                        \
                 "__wrap_" #name ":\n" FLASH_JUMP(name) ".popsection\n");
#include "old_glibc.inc"

extern "C" {

// libstdc++ takes shorter ways while this is not 0 (since 2.32).
extern char __libc_single_threaded;
char __libc_single_threaded = 0;

#if __GLIBC_PREREQ(2, 35)

namespace {

struct Search {
    uintptr_t address;
    dl_find_object* result;
};

// The object that contains the address, if it has tables for unwinding.
int look_at(dl_phdr_info* object, size_t, void* data) {
    Search& search = *static_cast<Search*>(data);
    bool contains = false;
    void* tables = nullptr;
    for (int i = 0; i < object->dlpi_phnum; ++i) {
        const ElfW(Phdr) & part = object->dlpi_phdr[i];
        const uintptr_t start = object->dlpi_addr + part.p_vaddr;
        if (part.p_type == PT_GNU_EH_FRAME) tables = reinterpret_cast<void*>(start);
        if (part.p_type != PT_LOAD || search.address < start || search.address >= start + part.p_memsz) continue;
        contains = true;
        search.result->dlfo_map_start = reinterpret_cast<void*>(start);
        search.result->dlfo_map_end = reinterpret_cast<void*>(start + part.p_memsz);
    }
    if (!contains || !tables) return 0;
    search.result->dlfo_flags = 0;
    search.result->dlfo_link_map = nullptr;
    search.result->dlfo_eh_frame = tables;
    return 1;
}

}  // namespace

// By which libgcc finds the tables for unwinding since 2.35. Returns 0 if it finds them.
int _dl_find_object(void* address, dl_find_object* result) noexcept {
    Search search = {reinterpret_cast<uintptr_t>(address), result};
    return dl_iterate_phdr(look_at, &search) == 1 ? 0 : -1;
}

#endif

}  // extern "C"
