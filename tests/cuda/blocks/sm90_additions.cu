// Tests tma_add_floats of ptx/tma.cuh: additions of consecutive floats from many thread blocks to the same addresses. The numbers
// are such that no sum is rounded.
#include "check.cuh"
#include "cuda/ptx/tma.cuh"

using namespace libflash::cuda;

namespace {

constexpr int kThreads = 128;

// A small number that differs from address to address.
__host__ __device__ float addend(int block, int round, int i) {
    return static_cast<float>((block * 7 + round * 13 + i * 5) % 61 - 30) * 0.25f;
}
float first_value(int64_t i) { return static_cast<float>(i % 17 - 8); }

std::vector<float> first_values(int64_t count) {
    std::vector<float> values(count);
    for (int64_t i = 0; i < count; ++i) values[i] = first_value(i);
    return values;
}

// The range to which a thread block adds in a round: kPad floats lie before and after all ranges, and a few before each in
// shared memory.
constexpr int kBlocks = 200, kRounds = 7, kPad = 64, kStarts = 500, kMost = 256, kOwn = 32;
struct Range {
    int start, count, skipped;
};
__host__ __device__ Range range_of(int block, int round) {
    return {kPad + (block * 37 + round * 11) % (kStarts / 4) * 4, 4 + (block * 13 + round * 7) % (kMost / 4) * 4,
            (block + round) % 3 * 4};
}

// Adds from two buffers in shared memory alternately, each overwritten once the addition has read it; at last to floats of this
// thread block alone, which are then read.
__global__ void add_ranges(float* sums, float* own, float* seen) {
    __shared__ __align__(16) float places[2][kMost + 8];
    const int block = blockIdx.x;
    for (int round = 0; round < kRounds; ++round) {
        const Range range = range_of(block, round);
        float* const place = places[round % 2];
        if (threadIdx.x == 0) tma_store_wait_read<1>();
        __syncthreads();
        for (int i = threadIdx.x; i < kMost + 8; i += kThreads)
            place[i] = i < range.skipped || i >= range.skipped + range.count ? 1e6f : addend(block, round, i - range.skipped);
        fence_shared_for_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            tma_add_floats(sums + range.start, shared_address(place + range.skipped), range.count * 4);
            tma_store_commit();
        }
    }
    if (threadIdx.x == 0) {
        const Range range = range_of(block, kRounds - 1);
        tma_add_floats(own + block * kOwn, shared_address(places[(kRounds - 1) % 2] + range.skipped), 16);
        tma_store_commit();
        tma_store_wait<0>();
        for (int i = 0; i < 4; ++i) seen[block * 4 + i] = own[block * kOwn + i];
    }
}

void check_ranges() {
    const int count = kStarts + kMost + 2 * kPad;
    const blocks::Device<float> sums(first_values(count)), own(first_values(kBlocks * kOwn)), seen(kBlocks * 4, 0.5f);
    add_ranges<<<kBlocks, kThreads>>>(sums.get(), own.get(), seen.get());
    blocks::finish("tma_add_floats");
    std::vector<double> expected(count);
    for (int i = 0; i < count; ++i) expected[i] = first_value(i);
    for (int block = 0; block < kBlocks; ++block)
        for (int round = 0; round < kRounds; ++round) {
            const Range range = range_of(block, round);
            for (int i = 0; i < range.count; ++i) expected[range.start + i] += addend(block, round, i);
        }
    const std::vector<float> got = sums.read(), alone = own.read(), read = seen.read();
    blocks::Check check("tma_add_floats"), check_own("tma_add_floats, one block"), check_seen("tma_store_wait after additions");
    for (int i = 0; i < count; ++i) check.equal(got[i], expected[i], "float %d", i);
    for (int i = 0; i < kBlocks * kOwn; ++i) {
        const int block = i / kOwn, at = i % kOwn;
        const double sum = first_value(i) + (at < 4 ? addend(block, kRounds - 1, at) : 0);
        check_own.equal(alone[i], sum, "block %d float %d", block, at);
        if (at < 4) check_seen.equal(read[block * 4 + at], sum, "block %d float %d", block, at);
    }
}

}  // namespace

int main() {
    check_ranges();
    return blocks::failed_checks() > 0;
}
