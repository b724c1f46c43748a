// Planted faults that compute-sanitizer must find; only then does a clean report about the library mean anything.
//
//     canary clean      nothing wrong: it must not be reported
//     canary memory     one write past the end of an allocation: memcheck
//     canary race       a read of shared memory that another warp writes, without a barrier between: racecheck
//     canary barrier    a warp-level barrier that a thread outside its mask calls: synccheck
#include <cuda_runtime.h>
#include <cstdio>
#include <cstring>

constexpr int kThreads = 128;

__global__ void innocent(int* out) {
    __shared__ int values[kThreads];
    values[threadIdx.x] = static_cast<int>(threadIdx.x);
    __syncthreads();
    out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

__global__ void planted_write(int* out) { out[threadIdx.x + 1] = 1; }

__global__ void planted_race(int* out) {
    __shared__ int values[kThreads];
    values[threadIdx.x] = static_cast<int>(threadIdx.x);
    out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

__global__ void planted_barrier(int* out) {
    if (threadIdx.x < 32) __syncwarp(0x0000ffff);
    out[threadIdx.x] = 1;
}

int main(int argc, char** argv) {
    const char* what = argc > 1 ? argv[1] : "clean";
    void (*kernel)(int*) = std::strcmp(what, "memory") == 0    ? planted_write
                           : std::strcmp(what, "race") == 0    ? planted_race
                           : std::strcmp(what, "barrier") == 0 ? planted_barrier
                                                               : innocent;
    int* out = nullptr;
    cudaError_t status = cudaMalloc(&out, kThreads * sizeof(int));
    if (status == cudaSuccess) {
        kernel<<<1, kThreads>>>(out);
        status = cudaGetLastError();
    }
    if (status == cudaSuccess) status = cudaDeviceSynchronize();
    std::printf("canary %s: %s\n", what, cudaGetErrorString(status));
    cudaFree(out);
    return status == cudaSuccess ? 0 : 3;
}
