#include "problem/options.h"

#include <string>

#include "build_info.h"

namespace libflash {

void check_struct(const void* options, uint32_t struct_size, size_t version_1, size_t known) {
    if (struct_size < version_1) {
        unknown_version("struct_size", "must be sizeof the options struct", struct_size, ", version 1 has ", version_1);
    }
    if (struct_size > kMaxStructSize) {
        unknown_version("struct_size", "is larger than any version's", struct_size, ", this library knows ", known);
    }
    const auto* bytes = static_cast<const unsigned char*>(options);
    for (size_t i = known; i < struct_size; ++i) {
        if (bytes[i] != 0) {
            unknown_version("struct_size", "fields that this library does not know must be 0", "byte ", i, " of ", struct_size,
                            " is set, this library knows ", known);
        }
    }
}

void check_flags(uint32_t flags, uint32_t known) {
    if (flags & ~known)
        invalid("flags", "an unknown bit, or one that this operation does not have", "unknown bits ", flags & ~known);
}

void check_reserved(int32_t reserved) {
    if (reserved != 0) invalid("reserved", "must be 0", reserved);
}

double read_dropout(double p) {
    if (!(p >= 0 && p < 1)) invalid("dropout_p", "must be at least 0 and below 1", p);
    return p;
}

void check_max_seqlen(int64_t max_seqlen, const Argument& argument) {
    if (max_seqlen < 0) invalid(argument, "must be positive, or 0 if not known", max_seqlen);
}

int64_t read_num_splits(int64_t num_splits) {
    if (num_splits < 0 || num_splits > kMaxSplits) invalid("num_splits", "must be 0 (the library chooses) to 1024", num_splits);
    return num_splits;
}

int64_t read_split_size(int64_t split_size, int64_t num_splits) {
    if (split_size < 0 || split_size % FLASH_BLOCK_SIZE != 0) {
        invalid("split_size", "must be 0 (not used) or a positive multiple of 128", split_size);
    }
    if (split_size != 0 && num_splits != 0) {
        invalid("split_size", "cannot be given together with num_splits", split_size, " and ", num_splits);
    }
    return split_size;
}

// Accepts "cpu" and every backend in kernels.table, compiled or not. If the build has no kernel of the backend, plan/ refuses the
// call.
const char* read_backend(const char* backend) {
    if (!backend) return nullptr;
    for (const char* name = LIBFLASH_BUILD_BACKENDS; *name;) {
        const size_t length = std::strcspn(name, " ");
        if (std::strlen(backend) == length && std::strncmp(name, backend, length) == 0) return backend;
        name += length + (name[length] ? 1 : 0);
    }
    const std::string start(backend, strnlen(backend, 40));
    const char* const names = LIBFLASH_BUILD_BACKENDS;
    invalid("backend", "must be the name of a backend, if it is given", "\"", start, "\", the names are ", names);
}

int read_num_threads(int32_t num_threads) {
    if (num_threads < 0 || num_threads > kMaxThreads) invalid("num_threads", "must be 0 (the default) to 4096", num_threads);
    return num_threads;
}

int read_tile(int32_t tile, const Argument& argument) {
    if (tile < 0 || tile > 512) invalid(argument, "must be 0 (the library chooses) to 512", tile);
    return tile;
}

}  // namespace libflash
