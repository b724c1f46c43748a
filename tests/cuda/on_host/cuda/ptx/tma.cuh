// Stands for the library's header of that name.
#pragma once

#include <stdexcept>

#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/tensor_map.cuh"

namespace libflash::cuda {

inline void tma_prefetch_map(const CUtensorMap&) {}
inline void tma_prefetch(const CUtensorMap&, int, int, int, int) {}

// Where a box begins, and how many of its rows lie in the tensor.
struct Box {
    MapWords words;
    int col, row, head, batch, rows;
};

inline Box box_of(const CUtensorMap& map, int col, int row, int head, int batch) {
    Box box{{}, col, row, head, batch, 0};
    std::memcpy(&box.words, &map, sizeof box.words);
    box.rows = static_cast<int>(std::min<int64_t>(box.words.box_rows, box.words.tensor.rows - row));
    return box;
}
// A map of encode_ending_map(): the rows behind the first `box_rows - i` lie outside.
inline Box box_of(const CUtensorMap& map, int col, int i, int j, int head, int batch) {
    Box box = box_of(map, col, 0, head, batch);
    const int count = box.words.box_rows - i;
    if (!box.words.ending || i < 0 || j < count || j > box.words.tensor.rows) throw std::runtime_error("a box that no map has");
    box.row = j - count;
    box.rows = count;
    return box;
}

inline int64_t first_element(const Box& box, int row) {
    const TensorExtent& of = box.words.tensor;
    return box.batch * of.batch_stride + box.head * of.head_stride + (box.row + row) * of.row_stride + box.col;
}
inline uint32_t place_in_box(int row, int col) {
    const uint32_t place = row * 128 + col * 2;
    return place ^ (place >> 7 & 7) << 4;
}

inline void copy_box(uint32_t address, const Box& box, const MBarrier& barrier) {
    const TensorExtent& from = box.words.tensor;
    for (int row = 0; row < box.words.box_rows; ++row)
        for (int col = 0; col < 64; ++col) {
            const bool inside = box.col + col < from.columns && row < box.rows;
            const uint16_t value = inside ? static_cast<const uint16_t*>(from.data)[first_element(box, row) + col] : 0;
            std::memcpy(shared_pointer(address + place_in_box(row, col)), &value, 2);
        }
    barrier.have_come(box.words.box_rows * 128);
}

template <class... At>
void tma_load(uint32_t address, const CUtensorMap& map, const MBarrier& barrier, At... at) {
    const Box box = box_of(map, at...);
    emulation::do_later([=] { copy_box(address, box, barrier); });
}

inline void tma_load_bytes(uint32_t address, const void* global, int bytes, const MBarrier& barrier) {
    emulation::do_later([=] {
        std::memcpy(shared_pointer(address), global, bytes);
        barrier.have_come(bytes);
    });
}

template <class... At>
void tma_store(uint32_t address, const CUtensorMap& map, At... at) {
    const Box box = box_of(map, at...);
    const TensorExtent& to = box.words.tensor;
    for (int row = 0; row < box.rows; ++row)
        for (int col = 0; col < 64 && box.col + col < to.columns; ++col) {
            uint16_t value;
            std::memcpy(&value, shared_pointer(address + place_in_box(row, col)), 2);
            static_cast<uint16_t*>(to.data)[first_element(box, row) + col] = value;
        }
}
inline void tma_store_commit() {}
template <int kPending>
void tma_store_wait_read() {}
template <int kPending>
void tma_store_wait() {}

}  // namespace libflash::cuda
