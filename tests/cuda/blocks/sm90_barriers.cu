// Tests ptx/barrier.cuh: the phases of an mbarrier, named barriers, changes of the register count, the elected lane.
#include "check.cuh"
#include "cuda/ptx/barrier.cuh"

using namespace libflash::cuda;

namespace {

constexpr int kThreads = 256;

// The result of try_wait() for both parities of a barrier of two arrivals: at first, then after each of four arrivals.
__global__ void phases(int* out) {
    __shared__ uint64_t word;
    const MBarrier barrier{shared_address(&word)};
    if (threadIdx.x != 0) return;
    barrier.init(2);
    fence_barrier_init();
    for (int arrivals = 0; arrivals <= 4; ++arrivals) {
        if (arrivals > 0) barrier.arrive();
        for (int parity = 0; parity < 2; ++parity) *out++ = barrier.try_wait(parity);
    }
}

void check_phases() {
    const blocks::Device<int> out(10, -1);
    phases<<<1, 32>>>(out.get());
    blocks::finish("mbarrier phases");
    const std::vector<int> got = out.read();
    blocks::Check check("mbarrier phases");
    for (int arrivals = 0; arrivals <= 4; ++arrivals)
        for (int parity = 0; parity < 2; ++parity)
            check.equal(got[2 * arrivals + parity], parity != arrivals / 2 % 2, "%d arrivals, parity %d", arrivals, parity);
}

// A pipeline of two stages: one warp writes numbers, another reads them. With a wrong parity a number is lost, or the kernel
// hangs.
__global__ void pipeline(int count, int* out) {
    __shared__ uint64_t words[4];
    __shared__ volatile int numbers[2];
    const auto barrier = [&](int i) { return MBarrier{shared_address(words + i)}; };  // full, full, empty, empty
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; ++i) barrier(i).init(1);
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 0; i < count; ++i) {
            barrier(2 + i % 2).wait(i / 2 % 2 ^ 1);
            numbers[i % 2] = 7 * i + 1;
            barrier(i % 2).arrive();
        }
    } else if (threadIdx.x == 32) {
        for (int i = 0; i < count; ++i) {
            barrier(i % 2).wait(i / 2 % 2);
            out[i] = numbers[i % 2];
            barrier(2 + i % 2).arrive();
        }
    }
}

void check_pipeline() {
    const int count = 1001;
    const blocks::Device<int> out(count, -1);
    pipeline<<<1, 64>>>(count, out.get());
    blocks::finish("mbarrier pipeline");
    const std::vector<int> got = out.read();
    blocks::Check check("mbarrier pipeline");
    for (int i = 0; i < count; ++i) check.equal(got[i], 7 * i + 1, "number %d", i);
}

// Two warpgroups alternate, after a change of their register counts. Which of them writes an element depends on the order
// alone.
__global__ void __launch_bounds__(kThreads, 1) turns(int rounds, int* out) {
    __shared__ volatile int counter;
    if (threadIdx.x == 0) counter = 0;
    __syncthreads();
    const int group = threadIdx.x / 128;
    if (group == 0) {
        decrease_registers<40>();
        named_barrier_arrive(1, kThreads);
    } else {
        increase_registers<232>();
    }
    for (int round = 0; round < rounds; ++round) {
        named_barrier_wait(1 + group, kThreads);
        if (threadIdx.x % 128 == 0) {
            out[counter] = group;
            counter = counter + 1;
        }
        if (group == 0 || round + 1 < rounds) named_barrier_arrive(2 - group, kThreads);
    }
}

void check_turns() {
    const int rounds = 100;
    const blocks::Device<int> out(2 * rounds, -1);
    turns<<<1, kThreads>>>(rounds, out.get());
    blocks::finish("named barriers");
    const std::vector<int> got = out.read();
    blocks::Check check("named barriers");
    for (int i = 0; i < 2 * rounds; ++i) check.equal(got[i], i % 2, "turn %d", i);
}

__global__ void elected(int* out) {
    if (elect_one()) atomicAdd(out + threadIdx.x / 32, 1);
}

void check_elected() {
    const blocks::Device<int> out(8, 0);
    elected<<<1, 256>>>(out.get());
    blocks::finish("elect_one");
    const std::vector<int> got = out.read();
    blocks::Check check("elect_one");
    for (int i = 0; i < 8; ++i) check.equal(got[i], 1, "warp %d", i);
}

}  // namespace

int main() {
    check_phases();
    check_pipeline();
    check_turns();
    check_elected();
    return blocks::failed_checks() > 0;
}
