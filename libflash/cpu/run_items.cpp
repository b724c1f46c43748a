#include "cpu/run_items.h"

#include "cpu/threads.h"

namespace libflash::cpu {

void run_items(int64_t items, int threads, void (*body)(const void*, int64_t, int), const void* context) {
    parallel_for(items, threads, [&](int64_t item, int thread) { body(context, item, thread); });
}

}  // namespace libflash::cpu
