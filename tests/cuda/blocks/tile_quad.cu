// Tests tile/quad.cuh: the destination of each word of each lane.
#include "check.cuh"
#include "cuda/tile/quad.cuh"

using namespace libflash::cuda;

namespace {

// Word k of lane t is 4 * t + k.
__global__ void transpose(uint32_t* out) {
    const int lane = threadIdx.x;
    uint32_t words[4];
    for (int k = 0; k < 4; ++k) words[k] = 4 * lane + k;
    transpose_quad(words, lane);
    for (int k = 0; k < 4; ++k) out[4 * lane + k] = words[k];
}

void check_transpose() {
    const blocks::Device<uint32_t> out(128, 0);
    transpose<<<1, 32>>>(out.get());
    blocks::finish("transpose_quad");
    const std::vector<uint32_t> got = out.read();
    blocks::Check check("transpose_quad");
    for (int lane = 0; lane < 32; ++lane)
        for (int k = 0; k < 4; ++k) check.equal(got[4 * lane + k], 4 * (lane / 4 * 4 + k) + lane % 4, "lane %d word %d", lane, k);
}

}  // namespace

int main() {
    check_transpose();
    return blocks::failed_checks() > 0;
}
