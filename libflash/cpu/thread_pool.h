// The threads that the library keeps between calls. They are started when a call first needs them, sleep while there is no job,
// and run until the process ends.
//
// - Any number of calls may use the pool at once. No call waits for a free pool thread: the calling thread itself takes tasks
//   until none is left, and pool threads that are free join it.
// - Nothing is destroyed at exit. Once there are threads, the object file with this code stays loaded, even after dlclose().
// - After fork() the child has no pool threads. It drops the pool; its first call makes a new one.
// - The threads block all signals. For each job they take the affinity mask and the floating-point environment of the calling
//   thread.
#pragma once

#include <cfenv>

namespace libflash::cpu {

struct Pool;

// A function that pool threads run for one caller. It is on the caller's stack; finish() must have returned true before it is
// destroyed.
class Job {
public:
    // Requests `count` threads, each of which calls run(context, number) once, with number from 1 to `count`. Fewer threads may
    // come, or none.
    Job(int count, void (*run)(void* context, int number), void* context);

    // Lets no further thread join the job and waits until the threads that joined are done: at most `milliseconds`, or without a
    // limit if that is 0. Returns whether they are done.
    bool finish(int milliseconds);

    // True in a child process that was forked while the job ran: its threads do not exist there, and their work is incomplete.
    bool lost_in_fork() const;

private:
    friend struct Pool;
    static constexpr int kAffinityWords = 64;  // 4096 processors
    struct Affinity {
        unsigned long word[kAffinityWords] = {};
    };

    void (*run_)(void*, int);
    void* context_;
    Pool* pool_;
    int wanted_, joined_ = 0, active_ = 0;  // threads that may still join; that have joined; that have joined and are not done
    Job* next_ = nullptr;                   // in the pool's list of jobs
    Affinity affinity_;
    std::fenv_t fenv_;
};

}  // namespace libflash::cpu
