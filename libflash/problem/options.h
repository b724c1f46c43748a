// Checks of the plain values of the option structs: version, flags, numbers, names.
#pragma once

#include <algorithm>
#include <cstring>

#include "problem/attention.h"
#include "problem/check.h"

namespace libflash {

constexpr uint32_t kMaxStructSize = 4096;  // a larger struct_size is an error, not a later version
constexpr int64_t kMaxSplits = 1024;
constexpr int32_t kMaxThreads = FLASH_MAX_THREADS;

// Refuses a struct_size below `version_1` or above kMaxStructSize, and bytes other than 0 after the `known` bytes of this
// library's struct.
void check_struct(const void* options, uint32_t struct_size, size_t version_1, size_t known);

// A copy of the caller's options. Fields that the caller's version of the struct lacks get their defaults; all fields do if
// `options` is null. `version_1`: the size of the struct in the first version of libflash that has it.
template <class Options>
Options read_options(const Options* options, size_t version_1) {
    Options known = {};
    if (!options) return known;
    check_struct(options, options->struct_size, version_1, sizeof(Options));
    std::memcpy(&known, options, std::min<size_t>(options->struct_size, sizeof(Options)));
    return known;
}

void check_flags(uint32_t flags, uint32_t known);
void check_reserved(int32_t reserved);

double read_dropout(double p);
void check_max_seqlen(int64_t max_seqlen, const Argument& argument);
int64_t read_num_splits(int64_t num_splits);
int64_t read_split_size(int64_t split_size, int64_t num_splits);

const char* read_backend(const char* backend);
int read_num_threads(int32_t num_threads);
int read_tile(int32_t tile, const Argument& argument);

// Reads the options that all operations have.
template <class Options>
void read_request(Request& request, const Options& given) {
    request.backend = read_backend(given.backend);
    request.kernel = given.kernel;
    request.num_threads = read_num_threads(given.num_threads);
}

}  // namespace libflash
