// Eight threads call the library at the same time, each call with several threads of its own. Every result must equal that of a
// single thread bit for bit, and each thread must get its own error text. Built with ThreadSanitizer.
#include <atomic>
#include <cstdio>
#include <string>
#include <thread>

#include "sample.h"

using namespace fuzz;

namespace {

constexpr int kCallers = 8, kRounds = 3;
constexpr int32_t kTypes[] = {FLASH_DTYPE_FLOAT32, FLASH_DTYPE_BFLOAT16, FLASH_DTYPE_FLOAT16, FLASH_DTYPE_FLOAT64};

struct Expected {
    Sample sample;
    std::vector<char> results;
};

// Makes a call that is refused with a number in its text that only this thread uses.
bool own_error_text(int caller) {
    flash_decode_options_t options = {};
    options.struct_size = sizeof options;
    options.num_splits = -1000 - caller;
    flash_tensor_t t = {};
    size_t bytes = 0;
    const flash_status_t status = flash_attention_decode_workspace_size(&t, &t, &t, &t, nullptr, &options, &bytes);
    std::this_thread::yield();
    return status == FLASH_STATUS_INVALID &&
           std::string(flash_last_error()).find(std::to_string(-1000 - caller)) != std::string::npos;
}

}  // namespace

int main() {
    std::vector<Expected> all;
    uint64_t seed = 1;
    for (const Operation operation : kOperations)
        for (const int32_t dtype : kTypes) {
            // Every second one is large enough for several threads.
            all.push_back({Sample(operation, dtype, seed, seed % 2 == 0), {}});
            ++seed;
            check_status(all.back().sample.run(1, &all.back().results), FLASH_STATUS_OK, "serial");
        }
    std::atomic<int> wrong{0}, calls{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < kCallers; ++caller)
        callers.emplace_back([&, caller] {
            for (int round = 0; round < kRounds; ++round)
                for (size_t n = 0; n < all.size(); ++n) {
                    const Expected& one = all[(n * 7 + static_cast<size_t>(caller)) % all.size()];
                    std::vector<char> results;
                    check_status(one.sample.run(1 + (caller + round) % 4, &results), FLASH_STATUS_OK, "from many threads");
                    if (results != one.results || !own_error_text(caller)) ++wrong;
                    ++calls;
                }
        });
    for (std::thread& caller : callers) caller.join();
    std::printf("%d calls from %d threads, %d wrong\n", calls.load(), kCallers, wrong.load());
    return wrong.load() == 0 ? 0 : 1;
}
