// Tests the additions of ptx/tma.cuh: consecutive floats, and boxes by a tensor map, from many thread blocks to the same
// addresses. The numbers are such that no sum is rounded.
#include "check.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/tensor_map.cuh"

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

// Each thread block adds one box with rows of 128 bytes; rows and columns of the tensor end within boxes.
constexpr int kBoxRows = 16, kBoxes = 300;
struct Corner {
    int column, row, head, batch;
};
struct Layout {
    int columns, rows, heads, batch, row_stride;
    int64_t at(int b, int r, int h, int c) const {
        return ((int64_t{b} * rows + r) * heads + h) * static_cast<int64_t>(row_stride) + c;
    }
    int64_t count() const { return int64_t{batch} * rows * heads * row_stride; }
    TensorExtent extent(void* data) const {
        return {data, columns, rows, heads, batch, int64_t{heads} * row_stride, row_stride, int64_t{rows} * heads * row_stride};
    }
};

template <class T>
constexpr int kBoxColumns = 128 / sizeof(T);
template <class T>
constexpr int kVector = 16 / sizeof(T);

template <class T>
__host__ __device__ Corner corner_of(int block) {
    return {block % 2 * kBoxColumns<T>, block * 11 % 40, block % 3, block % 4 / 2};
}
// The addend of a row and column of a box.
template <class T>
__host__ __device__ float box_addend(int block, int row, int column) {
    return static_cast<float>((block * 3 + row * 7 + column * 5) % 13 - 6);
}

template <class T>
__global__ void add_boxes(const __grid_constant__ CUtensorMap map) {
    __shared__ __align__(1024) T box[kBoxRows * kBoxColumns<T>];
    const int block = blockIdx.x;
    for (int i = threadIdx.x; i < kBoxRows * kBoxColumns<T>; i += kThreads) {
        // The 16-byte groups of a row are swizzled as swizzled_tile.cuh describes.
        const int row = i / kBoxColumns<T>, group = i % kBoxColumns<T> / kVector<T>;
        box[i] = static_cast<T>(box_addend<T>(block, row, (group ^ row % 8) * kVector<T> + i % kVector<T>));
    }
    fence_shared_for_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        const Corner corner = corner_of<T>(block);
        tma_add(shared_address(box), map, corner.column, corner.row, corner.head, corner.batch);
        tma_store_commit();
        tma_store_wait<0>();
    }
}

template <class T>
void check_boxes(const char* name) {
    const Layout layout{kBoxColumns<T> + 3 * kVector<T>, 45, 3, 2, 2 * kBoxColumns<T> + kVector<T>};
    std::vector<T> memory(layout.count());
    std::vector<double> expected(layout.count());
    for (int64_t i = 0; i < layout.count(); ++i) {
        expected[i] = first_value(i);
        memory[i] = static_cast<T>(first_value(i));
    }
    const blocks::Device<T> target(memory);
    CUtensorMap map;
    blocks::cuda_check(encode_map<T>(&map, layout.extent(target.get()), kBoxRows), "encode_map");
    add_boxes<T><<<kBoxes, kThreads>>>(map);
    blocks::finish("tma_add");
    for (int block = 0; block < kBoxes; ++block) {
        const Corner corner = corner_of<T>(block);
        for (int r = 0; r < kBoxRows && corner.row + r < layout.rows; ++r)
            for (int c = 0; c < kBoxColumns<T> && corner.column + c < layout.columns; ++c)
                expected[layout.at(corner.batch, corner.row + r, corner.head, corner.column + c)] += box_addend<T>(block, r, c);
    }
    const std::vector<T> got = target.read();
    blocks::Check check(std::string("tma_add, ") + name);
    for (int64_t i = 0; i < layout.count(); ++i)
        check.equal(static_cast<float>(got[i]), expected[i], "element %d", static_cast<int>(i));
}

}  // namespace

int main() {
    check_ranges();
    check_boxes<float>("float");
    check_boxes<__half>("half");
    return blocks::failed_checks() > 0;
}
