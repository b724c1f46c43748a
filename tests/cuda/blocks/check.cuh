// Shared by the programs of this folder: comparisons that print one line each, device memory, random numbers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace blocks {

inline int& failed_checks() {
    static int count = 0;
    return count;
}

// Prints one line when it is destroyed: "ok" or "FAILED", what was compared and how often, and before it the first differences.
// A check without comparisons fails.
class Check {
public:
    explicit Check(std::string name) : name_(std::move(name)) {}
    ~Check() {
        const bool good = compared_ > 0 && different_ == 0;
        std::printf("%s %s: %lld compared, %lld differ%s\n", good ? "ok" : "FAILED", name_.c_str(), compared_, different_,
                    note_.c_str());
        failed_checks() += !good;
    }
    Check(const Check&) = delete;
    Check& operator=(const Check&) = delete;

    // `format` and `place` describe where the value is, as for printf.
    template <class... Place>
    void equal(double got, double expected, const char* format, Place... place) {
        const bool same = got == expected || (got != got && expected != expected);
        judge(same, got, expected, format, place...);
    }
    template <class... Place>
    void at_most(double got, double limit, const char* format, Place... place) {
        judge(got <= limit, got, limit, format, place...);
    }
    // Adds text to the line.
    void note(const std::string& text) { note_ += "; " + text; }
    // Counts values that the device compared itself.
    void compared_there(long long count) { compared_ += count; }

private:
    template <class... Place>
    void judge(bool good, double got, double expected, const char* format, Place... place) {
        ++compared_;
        if (good || ++different_ > 4) return;
        char where[200];
        std::snprintf(where, sizeof where, format, place...);
        std::printf("%s at %s: got %.17g, expected %.17g\n", name_.c_str(), where, got, expected);
    }

    std::string name_, note_;
    long long compared_ = 0, different_ = 0;
};

inline std::string text(const char* format, double value) {
    char line[100];
    std::snprintf(line, sizeof line, format, value);
    return line;
}

// Ends the program on a CUDA error, since no later result would be valid.
inline void cuda_check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    std::printf("FAILED %s: %s\n", what, cudaGetErrorString(error));
    std::exit(2);
}

// Called after a launch: waits for it and checks for errors.
inline void finish(const char* what) {
    cuda_check(cudaGetLastError(), what);
    cuda_check(cudaDeviceSynchronize(), what);
}

// An array on the device.
template <class T>
class Device {
public:
    explicit Device(const std::vector<T>& host) : count_(host.size()) {
        cuda_check(cudaMalloc(reinterpret_cast<void**>(&data_), (count_ + 1) * sizeof(T)), "cudaMalloc");
        cuda_check(cudaMemcpy(data_, host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "copy to the device");
    }
    Device(size_t count, T value) : Device(std::vector<T>(count, value)) {}
    ~Device() { cudaFree(data_); }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    T* get() const { return data_; }
    std::vector<T> read() const {
        std::vector<T> host(count_);
        cuda_check(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "copy from the device");
        return host;
    }

private:
    T* data_ = nullptr;
    size_t count_;
};

// A random number generator with the same results everywhere (splitmix64).
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t word() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }
    // A number in [first, last].
    int between(int first, int last) {
        return first + static_cast<int>(word() % static_cast<uint64_t>(int64_t{last} - first + 1));
    }

private:
    uint64_t state_;
};

inline float float_of_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline bool has_stmatrix() {
    cudaDeviceProp device;
    cuda_check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    return device.major >= 9;
}

}  // namespace blocks
