#include "cpu/thread_count.h"

#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "problem/check.h"
#include "problem/options.h"

namespace libflash::cpu {
namespace {

// Settings from the environment. `bad`: the value of LIBFLASH_NUM_THREADS if it is invalid.
struct Environment {
    int threads = 0;  // 0: not set
    char bad[64] = "";
};

// A whole number from 1 to kMaxThreads, followed by `end` or the end of the text; 0 if there is none.
int read_threads(const char* text, char end) {
    char* stop = nullptr;
    errno = 0;
    const long number = std::strtol(text, &stop, 10);
    return stop != text && (*stop == '\0' || *stop == end) && errno == 0 && number >= 1 && number <= kMaxThreads
               ? static_cast<int>(number)
               : 0;
}

// OMP_NUM_THREADS may be a list with one number for each nesting level; the first one counts. An invalid OMP_NUM_THREADS is
// ignored: OpenMP reports it.
Environment read_environment() {
    Environment read;
    const char* ours = std::getenv("LIBFLASH_NUM_THREADS");
    if (ours && *ours) {
        read.threads = read_threads(ours, '\0');
        if (read.threads == 0) std::snprintf(read.bad, sizeof read.bad, "%s", ours);
        return read;
    }
    if (const char* openmp = std::getenv("OMP_NUM_THREADS")) read.threads = read_threads(openmp, ',');
    return read;
}

// Processors in the affinity mask of the calling thread.
int processors_allowed() {
    constexpr int kMost = 8192;
    alignas(cpu_set_t) unsigned char mask[kMost / 8] = {};
    auto* set = reinterpret_cast<cpu_set_t*>(mask);
    if (sched_getaffinity(0, sizeof mask, set) == 0) return CPU_COUNT_S(sizeof mask, set);
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? static_cast<int>(online) : 1;
}

// Processors that a control group (version 2) may use, rounded up, from its file cpu.max: "200000 100000" or "max 100000".
// INT_MAX without a limit.
int read_quota(const char* folder) {
    char path[PATH_MAX + 64];
    std::snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", folder);
    std::FILE* file = std::fopen(path, "re");
    if (!file) return INT_MAX;
    long long quota = 0, period = 0;
    // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): the kernel writes this file
    const bool limited = std::fscanf(file, "%lld %lld", &quota, &period) == 2 && quota > 0 && period > 0;
    std::fclose(file);
    const long long processors = limited ? (quota + period - 1) / period : INT_MAX;
    return processors < INT_MAX ? static_cast<int>(processors) : INT_MAX;
}

// The smallest quota of the process's control group and all its ancestors.
int read_quotas() {
    char folder[PATH_MAX + 8] = "";
    if (std::FILE* file = std::fopen("/proc/self/cgroup", "re")) {
        char line[PATH_MAX + 8];
        while (std::fgets(line, sizeof line, file))
            if (std::strncmp(line, "0::/", 4) == 0) {
                line[std::strcspn(line, "\n")] = '\0';
                std::snprintf(folder, sizeof folder, "%s", line + 3);
            }
        std::fclose(file);
    }
    int least = read_quota("");
    while (char* slash = std::strrchr(folder, '/')) {
        const int quota = slash[1] ? read_quota(folder) : INT_MAX;
        if (quota < least) least = quota;
        *slash = '\0';
    }
    return least;
}

}  // namespace

// The environment and the control group are read once: reading the environment while another thread writes it is undefined. The
// affinity mask is read at every call.
int default_threads() {
    static const Environment environment = read_environment();
    if (environment.bad[0])
        invalid("LIBFLASH_NUM_THREADS", "this environment variable must be a whole number from 1 to 4096", "\"", environment.bad,
                "\"");
    if (environment.threads > 0) return environment.threads;
    static const int quota = read_quotas();
    int threads = processors_allowed();
    if (threads > quota) threads = quota;
    return threads < 1 ? 1 : threads < kMaxThreads ? threads : kMaxThreads;
}

int threads_or_default(int given) { return given > 0 ? given : default_threads(); }

}  // namespace libflash::cpu
