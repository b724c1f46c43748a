// Makes every allocation of every operation fail in turn: first the n-th alone, then it and all later ones, for n = 1, 2, ...
// until the call makes no more. The call must succeed or return OUT_OF_MEMORY, and the next call must work. AddressSanitizer
// finds leaks.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "sample.h"

namespace {

std::atomic<long> allocations{0};
std::atomic<long> fail_at{0};  // 0: never
std::atomic<bool> fail_after{false};

void* allocate(size_t bytes) {
    const long number = ++allocations, at = fail_at.load();
    if (at && (number == at || (number > at && fail_after.load()))) return nullptr;
    return std::malloc(bytes ? bytes : 1);
}

}  // namespace

void* operator new(size_t bytes) {
    if (void* block = allocate(bytes)) return block;
    throw std::bad_alloc();
}
void* operator new[](size_t bytes) { return operator new(bytes); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void operator delete(void* block) noexcept { std::free(block); }
void operator delete[](void* block) noexcept { std::free(block); }
void operator delete(void* block, size_t) noexcept { std::free(block); }
void operator delete[](void* block, size_t) noexcept { std::free(block); }

using namespace fuzz;

namespace {

struct Count {
    long refused = 0, served = 0;
};

// Returns false if the call made fewer than n allocations.
bool fail_one(const Sample& sample, long n, bool all_after, Count& count) {
    allocations = 0, fail_after = all_after, fail_at = n;
    const flash_status_t status = sample.run(4, nullptr);
    const bool reached = allocations.load() >= n;
    fail_at = 0;
    FUZZ_CHECK(status == FLASH_STATUS_OK || status == FLASH_STATUS_OUT_OF_MEMORY, "allocation %ld: %s, \"%s\"", n,
               flash_status_name(status), flash_last_error());
    ++(status == FLASH_STATUS_OK ? count.served : count.refused);
    check_status(sample.run(2, nullptr), FLASH_STATUS_OK, "the next call");
    return reached;
}

// The error text of a refused call needs memory, too.
bool fail_refusal(long n, Count& count) {
    flash_attention_options_t options = {};
    options.struct_size = sizeof options, options.softcap = -12345.678;
    flash_tensor_t t = {};
    size_t bytes = 0;
    allocations = 0, fail_after = true, fail_at = n;
    const flash_status_t status = flash_attention_forward_workspace_size(&t, &t, &t, &t, nullptr, &options, &bytes);
    const bool reached = allocations.load() >= n;
    fail_at = 0;
    FUZZ_CHECK(status == FLASH_STATUS_INVALID || status == FLASH_STATUS_OUT_OF_MEMORY, "allocation %ld: %s", n,
               flash_status_name(status));
    ++(status == FLASH_STATUS_INVALID ? count.served : count.refused);
    return reached;
}

}  // namespace

int main() {
    const char* const names[] = {"forward", "backward", "decode", "merge", "compress", "explain"};
    for (const bool all_after : {false, true})
        for (const Operation operation : kOperations) {
            const Sample sample(operation, FLASH_DTYPE_FLOAT32, 5, true);
            check_status(sample.run(2, nullptr), FLASH_STATUS_OK, "before");
            Count count;
            long n = 1;
            while (fail_one(sample, n, all_after, count)) ++n;
            std::printf("%s: %ld allocations failed %s: %ld calls served all the same, %ld out of memory\n",
                        names[static_cast<int>(operation)], n - 1, all_after ? "with all after them" : "alone", count.served - 1,
                        count.refused);
        }
    Count count;
    long n = 1;
    while (fail_refusal(n, count)) ++n;
    std::printf("a refusal: %ld allocations failed: %ld said why, %ld out of memory\n", n - 1, count.served - 1, count.refused);
    return 0;
}
