// Tests ptx/cp_async.cuh, reduction.cuh and hide_from_compiler.cuh: valid and invalid copies, groups of copies, and additions
// of many warps to the same floats.
#include "check.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/reduction.cuh"

using namespace libflash::cuda;

namespace {

constexpr int kThreads = 128;
constexpr uint32_t kJunk = 0xdeadbeefu;

// Two groups: every third thread's copy is invalid in the first, every fifth's in the second. `first_seen` is what a thread
// reads of its first copy while the second group may be incomplete.
__global__ void copy_groups(const uint4* source, uint4* first_seen, uint4* out) {
    __shared__ uint4 copies[2][kThreads];
    const int thread = threadIdx.x;
    for (int group = 0; group < 2; ++group) copies[group][thread] = make_uint4(kJunk, kJunk, kJunk, kJunk);
    cp_async_16(shared_address(&copies[0][thread]), source + thread, thread % 3 != 0);
    cp_async_commit();
    cp_async_16(shared_address(&copies[1][thread]), source + kThreads + thread, thread % 5 != 0);
    cp_async_commit();
    cp_async_wait<1>();
    first_seen[thread] = copies[0][thread];
    cp_async_wait<0>();
    for (int group = 0; group < 2; ++group) out[group * kThreads + thread] = copies[group][thread];
}

// Invalid copies, from addresses without memory.
__global__ void copy_from_nowhere(uint4* out) {
    __shared__ uint4 copies[kThreads];
    const int thread = threadIdx.x;
    copies[thread] = make_uint4(kJunk, kJunk, kJunk, kJunk);
    cp_async_16(shared_address(&copies[thread]), static_cast<const uint4*>(nullptr) + thread, false);
    cp_async_commit();
    cp_async_wait<0>();
    out[thread] = copies[thread];
}

uint32_t word_of(const uint4& x, int w) { return w == 0 ? x.x : w == 1 ? x.y : w == 2 ? x.z : x.w; }

void check_copies() {
    std::vector<uint4> source(2 * kThreads);
    for (uint32_t i = 0; i < source.size(); ++i) source[i] = make_uint4(4 * i + 1, 4 * i + 2, 4 * i + 3, 4 * i + 4);
    const blocks::Device<uint4> there(source), first(kThreads, uint4{}), out(2 * kThreads, uint4{});
    copy_groups<<<1, kThreads>>>(there.get(), first.get(), out.get());
    blocks::finish("cp_async_16");
    const std::vector<uint4> early = first.read(), got = out.read();
    blocks::Check check("cp_async_16"), waited("cp_async_wait<1>");
    for (int i = 0; i < 2 * kThreads; ++i)
        for (int w = 0; w < 4; ++w) {
            const bool valid = i < kThreads ? i % 3 != 0 : i % kThreads % 5 != 0;
            const uint32_t expected = valid ? word_of(source[i], w) : 0;
            check.equal(word_of(got[i], w), expected, "copy %d word %d", i, w);
            if (i < kThreads) waited.equal(word_of(early[i], w), expected, "copy %d word %d", i, w);
        }
}

void check_nowhere() {
    const blocks::Device<uint4> out(kThreads, make_uint4(kJunk, kJunk, kJunk, kJunk));
    copy_from_nowhere<<<1, kThreads>>>(out.get());
    blocks::finish("cp_async_16 of nothing");
    const std::vector<uint4> got = out.read();
    blocks::Check check("cp_async_16 of nothing");
    for (int i = 0; i < kThreads; ++i)
        for (int w = 0; w < 4; ++w) check.equal(word_of(got[i], w), 0, "copy %d word %d", i, w);
}

__global__ void store_words(uint32_t* out, int* same) {
    __shared__ uint32_t words[32];
    const int lane = threadIdx.x;
    store_shared(shared_address(&words[31 - lane]), 1000 + lane);
    __syncthreads();
    out[lane] = words[lane];
    same[lane] = hide_from_compiler(lane - 16);
}

void check_words() {
    const blocks::Device<uint32_t> out(32, 0);
    const blocks::Device<int> same(32, 0);
    store_words<<<1, 32>>>(out.get(), same.get());
    blocks::finish("store_shared");
    const std::vector<uint32_t> got = out.read();
    const std::vector<int> values = same.read();
    blocks::Check check("store_shared"), check_hidden("hide_from_compiler");
    for (int i = 0; i < 32; ++i) {
        check.equal(got[i], 1000 + 31 - i, "word %d", i);
        check_hidden.equal(values[i], i - 16, "lane %d", i);
    }
}

// What a warp adds: integers, so that no order of additions rounds.
__host__ __device__ float addend(int warp, int lane, int e) { return static_cast<float>(lane * 4 + e + warp % 7 - 3); }

constexpr int kQuads = 5, kBlocks = 300, kWarps = kThreads / 32, kPad = 32;

// Each warp adds to the 128 floats of quad (warp % kQuads).
__global__ void add_quads(float* sums) {
    const int lane = threadIdx.x % 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const float x[4] = {addend(warp, lane, 0), addend(warp, lane, 1), addend(warp, lane, 2), addend(warp, lane, 3)};
    WarpQuad::add(sums + kPad + warp % kQuads * 128, lane, x);
}

__global__ void load_quads(const float* sums, float* out) {
    float x[4];
    WarpQuad::load(sums + kPad + blockIdx.x * 128, threadIdx.x, x);
    for (int e = 0; e < 4; ++e) out[(blockIdx.x * 32 + threadIdx.x) * 4 + e] = x[e];
}

void check_quads() {
    const blocks::Device<float> sums(kQuads * 128 + 2 * kPad, 0.0f), out(kQuads * 128, 0.0f);
    add_quads<<<kBlocks, kThreads>>>(sums.get());
    load_quads<<<kQuads, 32>>>(sums.get(), out.get());
    blocks::finish("WarpQuad");
    const std::vector<float> got = out.read(), all = sums.read();
    blocks::Check check("WarpQuad"), outside("WarpQuad outside its floats");
    for (int quad = 0; quad < kQuads; ++quad)
        for (int i = 0; i < 128; ++i) {
            double expected = 0;
            for (int warp = quad; warp < kBlocks * kWarps; warp += kQuads) expected += addend(warp, i / 4, i % 4);
            check.equal(got[quad * 128 + i], expected, "quad %d lane %d element %d", quad, i / 4, i % 4);
        }
    for (int i = 0; i < kPad; ++i) {
        outside.equal(all[i], 0, "float %d", i - kPad);
        outside.equal(all[kPad + kQuads * 128 + i], 0, "float %d", kQuads * 128 + i);
    }
}

}  // namespace

int main() {
    check_words();
    check_quads();
    check_copies();
    check_nowhere();
    return blocks::failed_checks() > 0;
}
