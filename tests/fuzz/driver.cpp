// Runs the fuzz target without libFuzzer: first every file named on the command line (folders: every file in them), then random
// inputs until the time is up. An input that ends the process stays in the current folder.
//
//   fuzz_driver [-seconds=N] [-runs=N] [-seed=N] [file or folder]...       default time: LIBFLASH_FUZZ_SECONDS, else 20
#include <dirent.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "bytes.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

std::vector<uint8_t> input;
std::string input_name;
bool keep_input = false;

void leave_input() {
    std::fprintf(stderr, "the input was %s\n", input_name.c_str());
    if (!keep_input) return;
    keep_input = false;
    if (FILE* file = std::fopen("crash-input", "wb")) {
        std::fwrite(input.data(), 1, input.size(), file);
        std::fclose(file);
        std::fprintf(stderr, "and is kept in ./crash-input\n");
    }
}

void on_abort(int) {
    leave_input();
    signal(SIGABRT, SIG_DFL);
    std::abort();
}

void run_file(const std::string& path) {
    struct stat about;
    if (stat(path.c_str(), &about) != 0) {
        std::fprintf(stderr, "%s: no such file\n", path.c_str());
        std::exit(2);
    }
    if (S_ISDIR(about.st_mode)) {
        std::vector<std::string> names;
        DIR* folder = opendir(path.c_str());
        while (const dirent* entry = folder ? readdir(folder) : nullptr)
            if (entry->d_name[0] != '.') names.push_back(path + "/" + entry->d_name);
        if (folder) closedir(folder);
        std::sort(names.begin(), names.end());
        for (const std::string& name : names) run_file(name);
        return;
    }
    input.clear();
    FILE* file = std::fopen(path.c_str(), "rb");
    for (int byte; file && (byte = std::fgetc(file)) != EOF;) input.push_back(static_cast<uint8_t>(byte));
    if (file) std::fclose(file);
    input_name = path;
    LLVMFuzzerTestOneInput(input.data(), input.size());
}

void run_random(uint64_t seed, uint64_t run) {
    fuzz::Random random(seed * 0x2545F4914F6CDD1Du + run);
    input.resize(static_cast<size_t>(32 + random.below(480)));
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(random.word() >> 56);
    input_name = "-seed=" + std::to_string(seed) + " run " + std::to_string(run);
    // A copy of exactly the input's size: AddressSanitizer reports reads past its end.
    const std::vector<uint8_t> exact(input);
    LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

}  // namespace

int main(int argc, char** argv) {
    const char* budget = std::getenv("LIBFLASH_FUZZ_SECONDS");
    double seconds = budget ? std::atof(budget) : 20;
    uint64_t seed = 1, runs = UINT64_MAX;
    signal(SIGABRT, on_abort);
    __sanitizer_set_death_callback(leave_input);
    uint64_t files = 0;
    for (int n = 1; n < argc; ++n) {
        const std::string argument = argv[n];
        if (argument.rfind("-seconds=", 0) == 0) {
            seconds = std::atof(argv[n] + 9);
        } else if (argument.rfind("-runs=", 0) == 0) {
            runs = std::strtoull(argv[n] + 6, nullptr, 10);
        } else if (argument.rfind("-seed=", 0) == 0) {
            seed = std::strtoull(argv[n] + 6, nullptr, 10);
        } else {
            run_file(argument);
            ++files;
        }
    }
    keep_input = true;
    const auto start = std::chrono::steady_clock::now();
    const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
    uint64_t run = 0;
    for (; run < runs && elapsed() < seconds; ++run) run_random(seed, run);
    std::printf("seed %llu: %llu random inputs and %llu named in %.1f s, no failure\n", static_cast<unsigned long long>(seed),
                static_cast<unsigned long long>(run), static_cast<unsigned long long>(files), elapsed());
    return 0;
}
