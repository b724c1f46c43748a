// One write of new rows to slots of a cache, and a call with it that can be made invalid.
#pragma once

#include <string>
#include <vector>

#include "check.h"

namespace fuzz {

enum WriteRole {
    kNewK,
    kNewV,
    kNewRope,
    kCacheK,
    kCacheV,
    kCacheRope,
    kSlots,
    kScaleK,
    kScaleV,
    kTableCos,
    kTableSin,
    kRowPositions,
    kWriteRoles
};

// The name of the argument in error texts.
const char* name_of(WriteRole role);

// What the call may write. The cache of keys comes before the rope part, which may lie in it.
constexpr WriteRole kStored[] = {kCacheK, kCacheV, kCacheRope, kScaleK, kScaleV};

struct WriteCall {
    flash_tensor_t view[kWriteRoles] = {};
    bool given[kWriteRoles] = {};
    flash_cache_write_options_t options = {};

    const flash_tensor_t* at(WriteRole role) const { return given[role] ? &view[role] : nullptr; }
    void bind();
    flash_status_t workspace_size(size_t* bytes) const;
    flash_status_t run() const;
};

struct WriteCase {
    Tensor tensor[kWriteRoles];
    flash_cache_write_options_t options = {};
    int32_t dtype = FLASH_DTYPE_FLOAT32, cache_dtype = FLASH_DTYPE_FLOAT32;
    int64_t rows = 1, heads = 1, blocks = 1, block_rows = 1;    // a block is an entry or a page
    int64_t channels_k = 1, channels_v = 0, channels_rope = 0;  // 0: without values, without a rope part
    bool rope_in_k = false;                                     // both parts of the keys in the buffer of kCacheK

    explicit WriteCase(Bytes& bytes);
    WriteCall call() const;
    bool codes() const { return cache_dtype != dtype; }
    int64_t slot(int64_t row) const;
    bool writes(int64_t row) const { return slot(row) >= 0 && slot(row) < blocks * block_rows; }
    bool rotated() const { return tensor[kTableCos].present(); }
    // Whether a kernel has so many channels.
    bool supported() const { return channels_k + channels_rope <= 576 && channels_v <= 576; }

private:
    void choose_sizes(Bytes& bytes);
    void make_new_rows(Bytes& bytes, Random& random);
    void make_caches(Bytes& bytes, Random& random);
    void make_slots(Bytes& bytes, Random& random);
    void make_scale(WriteRole role, int64_t channels, Bytes& bytes, Random& random);
    void make_rotary(Bytes& bytes, Random& random);
    void allocate(WriteRole role, const flash_tensor_t& shape, Bytes& bytes) { tensor[role].allocate(shape, bytes.below(4)); }
};

// Copies of the tensors that a call may write. `call` gets their views.
struct StoredTensors {
    Tensor tensor[kWriteRoles];

    StoredTensors(const WriteCase& problem, WriteCall& call);
};

// Writes to `stored`, whose views `call` has, what flash_cache_write must write.
void write_expected(const WriteCase& problem, const WriteCall& call, StoredTensors& stored);

// A way in which a call was made invalid: `what` is empty if the case has no place for it. `argument` is empty if the text may
// name any argument, because the fault lies between two.
struct WriteFault {
    std::string what, argument;
    flash_status_t expected = FLASH_STATUS_INVALID;
};

WriteFault invalidate(WriteCase& problem, WriteCall& call, Bytes& bytes);

}  // namespace fuzz
