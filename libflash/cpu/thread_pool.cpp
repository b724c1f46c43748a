#include "cpu/thread_pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <ctime>
#include <new>

namespace libflash::cpu {
namespace {

class Lock {
public:
    explicit Lock(pthread_mutex_t& mutex) : mutex_(mutex) { pthread_mutex_lock(&mutex_); }
    ~Lock() { pthread_mutex_unlock(&mutex_); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

private:
    pthread_mutex_t& mutex_;
};

timespec time_after(int milliseconds) {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    time.tv_nsec += milliseconds * 1'000'000L;
    time.tv_sec += time.tv_nsec / 1'000'000'000;
    time.tv_nsec %= 1'000'000'000;
    return time;
}

}  // namespace

// Never destroyed. It holds plain POSIX objects without destructors, because threads may still sleep on them at exit.
struct Pool {
    pthread_mutex_t mutex;
    pthread_cond_t job_added;  // signals the threads that there are jobs
    pthread_cond_t job_done;   // signals callers that a job has no active thread left
    Job* jobs = nullptr;       // linked list of jobs that can use more threads
    int threads = 0, idle = 0;
    int starting = 0;  // threads that do not run yet; they will take a job before they sleep
    const int processors = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));

    Pool() {
        pthread_condattr_t monotonic;
        pthread_condattr_init(&monotonic);
        pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
        pthread_mutex_init(&mutex, nullptr);
        pthread_cond_init(&job_added, nullptr);
        pthread_cond_init(&job_done, &monotonic);
        pthread_condattr_destroy(&monotonic);
    }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    void add(Job& job);
    bool finish(Job& job, int milliseconds);

private:
    static void* start(void* pool) {
        static_cast<Pool*>(pool)->serve();
        return nullptr;
    }
    void remove(Job& job);
    void grow(int wanted);
    void wake(int wanted);
    [[noreturn]] void serve();
};

namespace {

std::atomic<Pool*> the_pool{nullptr};

// Takes a reference to this object file that is never released: the pool threads' code must not be unmapped by dlclose().
void stay_loaded() {
    Dl_info object;
    if (dladdr(reinterpret_cast<void*>(&stay_loaded), &object) != 0 && object.dli_fname)
        dlopen(object.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

void forget_pool() { the_pool.store(nullptr, std::memory_order_relaxed); }

// Creates the pool at the first call. Returns nullptr if there is no memory.
Pool* find_pool() {
    Pool* pool = the_pool.load(std::memory_order_acquire);
    if (pool) return pool;
    Pool* made = new (std::nothrow) Pool;
    if (!made) return nullptr;
    if (!the_pool.compare_exchange_strong(pool, made, std::memory_order_acq_rel)) {
        delete made;  // another thread installed its pool first
        return pool;
    }
    static std::atomic<bool> prepared{false};
    if (!prepared.exchange(true)) {
        stay_loaded();
        pthread_atfork(nullptr, nullptr, forget_pool);
    }
    return made;
}

}  // namespace

void Pool::add(Job& job) {
    const Lock lock(mutex);
    job.next_ = jobs;
    jobs = &job;
    grow(job.wanted_);
    wake(job.wanted_);
}

// Starts as many threads as the jobs in the list still need, minus the threads that sleep or are being started. The pool has at
// most as many threads as there are processors, or `wanted` threads if the newest job needs more than that.
void Pool::grow(int wanted) {
    const int most = wanted > processors ? wanted : processors;
    int missing = -idle - starting;
    for (const Job* job = jobs; job; job = job->next_) missing += job->wanted_;
    if (missing <= 0 || threads >= most) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_t detached;
    if (pthread_attr_init(&detached) != 0) return;
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; missing > 0 && threads < most; --missing) {
        pthread_t thread;
        if (pthread_create(&thread, &detached, start, this) != 0) break;
        ++threads;
        ++starting;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&detached);
}

// Signals at most two threads; each thread that wakes up signals two more.
void Pool::wake(int wanted) {
    for (int n = 0; n < 2 && n < wanted && n < idle; ++n) pthread_cond_signal(&job_added);
}

void Pool::remove(Job& job) {
    for (Job** at = &jobs; *at; at = &(*at)->next_)
        if (*at == &job) {
            *at = job.next_;
            return;
        }
}

bool Pool::finish(Job& job, int milliseconds) {
    const Lock lock(mutex);
    if (job.wanted_ > 0) remove(job);
    job.wanted_ = 0;
    const timespec until = time_after(milliseconds);
    while (job.active_ > 0) {
        if (milliseconds == 0)
            pthread_cond_wait(&job_done, &mutex);
        else if (pthread_cond_timedwait(&job_done, &mutex, &until) != 0)
            break;
    }
    return job.active_ == 0;
}

// The main loop of a pool thread.
void Pool::serve() {
    pthread_setname_np(pthread_self(), "libflash");
    Job::Affinity mine;
    pthread_mutex_lock(&mutex);
    --starting;
    for (;;) {
        while (!jobs) {
            ++idle;
            pthread_cond_wait(&job_added, &mutex);
            --idle;
        }
        Job& job = *jobs;
        const int number = ++job.joined_;
        ++job.active_;
        if (--job.wanted_ == 0) jobs = job.next_;
        wake(job.wanted_);
        pthread_mutex_unlock(&mutex);
        if (std::memcmp(&mine, &job.affinity_, sizeof mine) != 0) {
            mine = job.affinity_;
            sched_setaffinity(0, sizeof mine, reinterpret_cast<const cpu_set_t*>(mine.word));
        }
        std::fesetenv(&job.fenv_);
        job.run_(job.context_, number);
        pthread_mutex_lock(&mutex);
        if (--job.active_ == 0) pthread_cond_broadcast(&job_done);
    }
}

Job::Job(int count, void (*run)(void* context, int number), void* context)
    : run_(run), context_(context), pool_(count > 0 ? find_pool() : nullptr), wanted_(count) {
    if (!pool_) return;
    sched_getaffinity(0, sizeof affinity_, reinterpret_cast<cpu_set_t*>(affinity_.word));
    std::fegetenv(&fenv_);
    pool_->add(*this);
}

bool Job::lost_in_fork() const { return pool_ && pool_ != the_pool.load(std::memory_order_relaxed); }

bool Job::finish(int milliseconds) { return !pool_ || lost_in_fork() || pool_->finish(*this, milliseconds); }

}  // namespace libflash::cpu
