// Threads for one call: the caller's own and some that are started for it and joined before it returns. Nothing lives on between
// calls, so nothing is global, fork() is harmless, and calls from many threads do not meet. Starting a thread costs some 15 us;
// plans ask for few threads when the work is small.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace libflash::cpu {

// Calls body(item, thread) for every item in [0, items), in order of item but on whichever thread is free next; `thread` is in
// [0, threads) and no two calls with the same `thread` overlap. If the system gives no more threads, the call goes on with those
// it has. An exception of a body ends the loop and is thrown again here.
template <class Body>
void parallel_for(int64_t items, int threads, const Body& body) {
    if (threads > items) threads = static_cast<int>(items);
    if (threads <= 1) {
        for (int64_t item = 0; item < items; ++item) body(item, 0);
        return;
    }
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;
    auto work = [&](int thread) {
        try {
            for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(item, thread);
        } catch (...) {
            next.store(items, std::memory_order_relaxed);
            if (!failed.exchange(true)) error = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    try {
        others.reserve(static_cast<size_t>(threads) - 1);
        for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
    } catch (const std::exception&) {
        // No thread or no memory for one: fewer than hoped for; the items are shared out at run time, so nothing is lost.
    }
    work(0);
    for (std::thread& other : others) other.join();
    if (failed.load()) std::rethrow_exception(error);
}

}  // namespace libflash::cpu
