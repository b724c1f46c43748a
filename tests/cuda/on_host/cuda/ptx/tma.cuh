// Replaces the library's header.
#pragma once

#include <deque>
#include <memory>

#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/tensor_map.cuh"

namespace libflash::cuda {

inline void tma_prefetch_map(const CUtensorMap&) {}
inline void tma_prefetch(const CUtensorMap&, int, int, int, int) {}

inline void copy_box(uint32_t address, const MapWords& words, const MBarrier& barrier, const int (&at)[4]) {
    const TensorExtent& from = words.tensor;
    const int row_bytes = words.row_bytes(), bytes = words.element_bytes;
    for (int row = 0; row < words.box_rows; ++row) {
        char values[128]{};
        const int64_t element = at[3] * from.batch_stride + at[2] * from.head_stride + (at[1] + row) * from.row_stride + at[0];
        if (at[1] + row < from.rows && at[3] < from.batch && at[0] < from.columns)
            std::memcpy(values, static_cast<const char*>(from.data) + element * bytes,
                        min<int64_t>(words.box_columns, from.columns - at[0]) * bytes);
        for (int first = 0; first < row_bytes; first += 16) {
            const uint32_t to = address + row * row_bytes + first;
            std::memcpy(shared_pointer(row_bytes == 128 ? to ^ (to >> 7 & 7) << 4 : to), values + first, 16);
        }
    }
    barrier.have_come(words.box_rows * row_bytes);
}

inline void tma_load(uint32_t address, const CUtensorMap& map, const MBarrier& barrier, int c0, int c1, int c2, int c3) {
    MapWords words;
    std::memcpy(&words, &map, sizeof words);
    emulation::do_later([=] { copy_box(address, words, barrier, {c0, c1, c2, c3}); });
}

inline void tma_load_to(uint32_t ranks, uint32_t address, const CUtensorMap& map, const MBarrier& barrier, int c0, int c1, int c2,
                        int c3) {
    for (unsigned rank = 0; rank < emulation::machine.cluster; ++rank)
        if (ranks >> rank & 1) emulation::in_block_of_cluster(rank, [&] { tma_load(address, map, barrier, c0, c1, c2, c3); });
}

inline void tma_load_bytes(uint32_t address, const void* global, int bytes, const MBarrier& barrier) {
    emulation::do_later([=] {
        std::memcpy(shared_pointer(address), global, bytes);
        barrier.have_come(bytes);
    });
}

inline void tma_store(uint32_t address, const CUtensorMap& map, int c0, int c1, int c2, int c3) {
    MapWords words;
    std::memcpy(&words, &map, sizeof words);
    const TensorExtent& to = words.tensor;
    for (int row = 0; row < words.box_rows && c1 + row < to.rows; ++row)
        for (int col = 0; col < 64 && c0 + col < to.columns; ++col) {
            const uint32_t at = address + row * 128 + col * 2;
            uint16_t value;
            std::memcpy(&value, shared_pointer(at ^ (at >> 7 & 7) << 4), 2);
            static_cast<uint16_t*>(to.data)[c3 * to.batch_stride + c2 * to.head_stride + (c1 + row) * to.row_stride + c0 + col] =
                value;
        }
}

// How many additions of a group have not read shared memory yet, and how many are not complete.
struct BulkGroup {
    int unread = 0, incomplete = 0;
};
struct BulkGroups {
    std::shared_ptr<BulkGroup> open = std::make_shared<BulkGroup>();
    std::deque<std::shared_ptr<BulkGroup>> committed;
};
inline BulkGroups bulk_groups[emulation::kMostResident * emulation::kMaxWarps * 32];  // [resident thread]
inline BulkGroups& groups_of_thread() { return bulk_groups[emulation::resident_thread()]; }

// In disorder, shared memory is read at a random later time, and the sums change even later.
inline void tma_add_floats(float* global, uint32_t address, int bytes) {
    const std::shared_ptr<BulkGroup> group = groups_of_thread().open;
    ++group->unread, ++group->incomplete;
    emulation::do_later([=] {
        std::vector<float> x(bytes / 4);
        std::memcpy(x.data(), shared_pointer(address), bytes);
        --group->unread;
        emulation::do_later([=] {
            for (int i = 0; i < bytes / 4; ++i) global[i] += x[i];
            --group->incomplete;
        });
    });
}
inline void tma_store_commit() {
    BulkGroups& groups = groups_of_thread();
    groups.committed.push_back(std::exchange(groups.open, std::make_shared<BulkGroup>()));
    while (groups.committed.front()->incomplete == 0 && groups.committed.size() > 1) groups.committed.pop_front();
}
// Waits until `left` is 0 for all groups but the last `pending`.
inline void wait_for_groups(int BulkGroup::* left, int pending) {
    const auto& committed = groups_of_thread().committed;
    for (int i = 0; i < int(committed.size()) - pending; ++i)
        while ((*committed[i]).*left > 0) emulation::poll();
}
template <int kPending>
void tma_store_wait_read() {
    wait_for_groups(&BulkGroup::unread, kPending);
}
template <int kPending>
void tma_store_wait() {
    wait_for_groups(&BulkGroup::incomplete, kPending);
}

}  // namespace libflash::cuda
