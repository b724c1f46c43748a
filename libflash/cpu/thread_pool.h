// The threads that the library keeps between calls. They start when a call first wants them, sleep while there is nothing to do,
// and stay until the process ends.
//
//   - Any number of calls use the pool at once. No call waits for a thread of the pool to become free: the caller's own thread
//     works through everything, and threads of the pool help it.
//   - Nothing is destroyed at exit. The object file that holds this code stays loaded once there are threads, even after
//     dlclose().
//   - After fork() the child has no such threads and forgets the pool. Its first call makes another one.
//   - The threads block all signals. While they help, they run on the processors that the calling thread may use, and with its
//     floating-point environment.
#pragma once

#include <cfenv>

namespace libflash::cpu {

struct Pool;

// Threads of the pool at work for one caller. Lives on the caller's stack; finish() must have returned true before it goes.
class Helpers {
public:
    // Asks for `count` threads, each of which calls run(context, number) once, number from 1 to `count`. Fewer may come, or none.
    Helpers(int count, void (*run)(void* context, int number), void* context);

    // No more threads may join. Waits until those that did are done; for no longer than `milliseconds`, unless that is 0. Returns
    // whether they are done.
    bool finish(int milliseconds);

    // True in a child that was forked while the threads were at work: they are not there, and what they had begun is not done.
    bool lost() const;

private:
    friend struct Pool;
    static constexpr int kAffinityWords = 64;  // 4096 processors
    struct Affinity {
        unsigned long word[kAffinityWords] = {};
    };

    void (*run_)(void*, int);
    void* context_;
    Pool* pool_;
    int wanted_, joined_ = 0, active_ = 0;
    Helpers* next_ = nullptr;  // in the pool's list
    Affinity affinity_;
    std::fenv_t arithmetic_;
};

}  // namespace libflash::cpu
