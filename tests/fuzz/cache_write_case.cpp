#include "cache_write_case.h"

#include <algorithm>
#include <limits>

namespace fuzz {
namespace {

constexpr int64_t kMostElements = int64_t{1} << 18;

// Any finite elements: where a NaN is expected, it was written.
void random_bytes(const flash_tensor_t& t, Random& random) {
    const int64_t size = bytes_of(t.dtype);
    const uint64_t top_of_exponent = uint64_t{1} << (8 * size - 2);
    each_element(t, [&](int64_t offset) {
        const uint64_t word = random.word() & ~top_of_exponent;
        std::memcpy(static_cast<char*>(t.data) + offset * size, &word, static_cast<size_t>(size));
    });
}

// A slot outside of a cache of `slots` rows.
int64_t outside(int64_t slots, bool wide, Random& random) {
    const int64_t largest = wide ? INT64_MAX : INT32_MAX, smallest = wide ? INT64_MIN : INT32_MIN;
    const int64_t choices[] = {-1, slots, slots + 1, -slots - 1, largest, smallest, wide ? int64_t{1} << 32 : -2};
    return choices[random.below(7)];
}

}  // namespace

const char* name_of(WriteRole role) {
    constexpr const char* kNames[] = {"k_new", "v_new",   "k_rope_new", "k_cache",    "v_cache",    "k_rope_cache",
                                      "slots", "k_scale", "v_scale",    "rotary_cos", "rotary_sin", "positions"};
    static_assert(sizeof kNames / sizeof kNames[0] == kWriteRoles, "a name for each role");
    return kNames[role];
}

void WriteCase::choose_sizes(Bytes& bytes) {
    dtype = bytes.one_of<int32_t>({FLASH_DTYPE_FLOAT32, FLASH_DTYPE_BFLOAT16, FLASH_DTYPE_FLOAT16, FLASH_DTYPE_FLOAT64});
    cache_dtype = dtype;
    if (dtype != FLASH_DTYPE_FLOAT64 && bytes.chance(128))
        cache_dtype = bytes.one_of<int32_t>({FLASH_DTYPE_FLOAT8_E4M3, FLASH_DTYPE_FLOAT8_E5M2, FLASH_DTYPE_INT8});
    const std::initializer_list<int64_t> dims = {1, 2, 3, 4, 8, 12, 17, 64, 128, 512, 576};
    rows = bytes.chance(20) ? bytes.between(100, 300) : bytes.below(33);
    heads = bytes.chance(6) ? 0 : bytes.between(1, 4);
    blocks = bytes.chance(6) ? 0 : bytes.between(1, 6);
    block_rows = bytes.one_of<int64_t>({0, 1, 2, 3, 7, 16, 64});
    channels_k = bytes.one_of(dims);
    channels_v = bytes.chance(60) ? 0 : bytes.chance(6) ? 577 : bytes.one_of(dims);
    if (bytes.chance(100)) channels_rope = bytes.one_of<int64_t>({1, 2, 3, 8, 16, 64});
    while (std::max(rows, blocks * block_rows) * heads * (channels_k + channels_v + channels_rope) > kMostElements) {
        rows /= 2;
        if (block_rows > 1) block_rows /= 2;
    }
}

// Now and then with values that are not finite, or beyond every code.
void WriteCase::make_new_rows(Bytes& bytes, Random& random) {
    const bool special = bytes.chance(60);
    const double values[] = {0.0,   -0.0, std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
                             6.0e4, 1e-7, std::numeric_limits<double>::quiet_NaN()};
    const int64_t channels[] = {channels_k, channels_v, channels_rope};
    for (const WriteRole role : {kNewK, kNewV, kNewRope}) {
        if (channels[role] == 0) continue;
        allocate(role, strided(bytes, dtype, {rows, heads, channels[role]}, true), bytes);
        tensor[role].fill(random, bytes.one_of<double>({1, 300}));
        if (special)
            each_element(tensor[role].view, [&](int64_t offset) {
                if (random.below(8) == 0) tensor[role].set(offset, values[random.below(7)]);
            });
    }
}

// Random contents, so that it shows if a row is written that no slot names.
void WriteCase::make_caches(Bytes& bytes, Random& random) {
    rope_in_k = channels_rope > 0 && !codes() && bytes.chance(128);
    flash_tensor_t keys =
        strided(bytes, cache_dtype, {blocks, block_rows, heads, channels_k + (rope_in_k ? channels_rope : 0)}, false);
    allocate(kCacheK, keys, bytes);
    random_bytes(tensor[kCacheK].view, random);
    tensor[kCacheK].view.shape[3] = channels_k;
    if (channels_v > 0) {
        allocate(kCacheV, strided(bytes, cache_dtype, {blocks, block_rows, heads, channels_v}, false), bytes);
        random_bytes(tensor[kCacheV].view, random);
    }
    if (channels_rope > 0 && !rope_in_k) {
        allocate(kCacheRope, strided(bytes, dtype, {blocks, block_rows, heads, channels_rope}, false), bytes);
        random_bytes(tensor[kCacheRope].view, random);
    }
}

// Each slot at most once, in any order; slots outside of the cache any number of times.
void WriteCase::make_slots(Bytes& bytes, Random& random) {
    const int64_t slots = blocks * block_rows;
    const std::vector<int32_t> order = shuffled(slots, random);
    const bool wide = bytes.chance(128);
    const int64_t skipped_of_8 = bytes.below(5);
    allocate(kSlots, contiguous(wide ? FLASH_DTYPE_INT64 : FLASH_DTYPE_INT32, {rows}), bytes);
    for (int64_t i = 0; i < rows; ++i) {
        const bool skipped = i >= slots || random.below(8) < skipped_of_8;
        const int64_t slot = skipped ? outside(slots, wide, random) : order[static_cast<size_t>(i)];
        if (wide) {
            static_cast<int64_t*>(tensor[kSlots].view.data)[i] = slot;
        } else {
            tensor[kSlots].ints()[i] = static_cast<int32_t>(slot);
        }
    }
}

// Scales of all heads or of each are read; those of rows and of groups of channels are written.
void WriteCase::make_scale(WriteRole role, int64_t channels, Bytes& bytes, Random& random) {
    if (channels == 0 || (cache_dtype != FLASH_DTYPE_INT8 && !bytes.chance(codes() ? 180 : 60))) return;
    const int64_t groups = channels % 4 == 0 ? 4 : channels % 3 == 0 ? 3 : 1;
    const int32_t type = FLASH_DTYPE_FLOAT32;
    flash_tensor_t shape;
    switch (bytes.below(codes() ? 4 : 2)) {
        case 0: shape = contiguous(type, {1}); break;
        case 1: shape = contiguous(type, {heads}); break;
        case 2: shape = contiguous(type, {blocks, block_rows, heads}); break;
        default: shape = contiguous(type, {blocks, block_rows, heads, groups}); break;
    }
    const int64_t spread = bytes.between(1, 2);  // any strides
    for (int n = 0; n < shape.ndim; ++n) shape.stride[n] *= spread;
    allocate(role, shape, bytes);
    if (shape.ndim > 2) return random_bytes(tensor[role].view, random);
    const double unit = bytes.one_of<double>({1, 0, 1.0 / 127, -1, 1e30});
    each_element(tensor[role].view, [&](int64_t offset) { tensor[role].set(offset, unit * (0.75 + 0.25 * random.uniform())); });
}

// A row that is not written may have any position.
void WriteCase::make_rotary(Bytes& bytes, Random& random) {
    const int64_t channels = channels_rope > 0 ? channels_rope : channels_k;
    if (channels < 2 || !bytes.chance(128)) return;
    if (bytes.chance(128)) options.flags |= FLASH_FLAG_ROTARY_INTERLEAVED;
    const int64_t pairs = bytes.between(1, channels / 2), table_rows = bytes.between(1, 20);
    const int32_t type = bytes.chance(128) ? dtype : FLASH_DTYPE_FLOAT32;
    for (const WriteRole role : {kTableCos, kTableSin}) {
        allocate(role, strided(bytes, type, {table_rows, pairs}, false), bytes);
        tensor[role].fill(random, 1);
    }
    allocate(kRowPositions, contiguous(FLASH_DTYPE_INT32, {rows}), bytes);
    for (int64_t i = 0; i < rows; ++i)
        tensor[kRowPositions].ints()[i] =
            writes(i) || random.below(2) ? static_cast<int32_t>(random.below(table_rows)) : (random.below(2) ? -1 : INT32_MAX);
}

WriteCase::WriteCase(Bytes& bytes) {
    options.struct_size = sizeof options;
    choose_sizes(bytes);
    Random random(bytes.word());
    make_new_rows(bytes, random);
    make_caches(bytes, random);
    make_slots(bytes, random);
    make_scale(kScaleK, channels_k, bytes, random);
    make_scale(kScaleV, channels_v, bytes, random);
    make_rotary(bytes, random);
    options.num_threads = static_cast<int32_t>(bytes.between(0, 4));
}

int64_t WriteCase::slot(int64_t row) const {
    const flash_tensor_t& t = tensor[kSlots].view;
    return t.dtype == FLASH_DTYPE_INT64 ? static_cast<const int64_t*>(t.data)[row] : static_cast<const int32_t*>(t.data)[row];
}

WriteCall WriteCase::call() const {
    WriteCall call;
    call.options = options;
    for (int role = 0; role < kWriteRoles; ++role) {
        call.given[role] = tensor[role].present();
        call.view[role] = tensor[role].view;
    }
    call.given[kCacheRope] = channels_rope > 0;
    if (rope_in_k) call.view[kCacheRope] = channels_of(call.view[kCacheK], channels_k, channels_rope);
    return call;
}

StoredTensors::StoredTensors(const WriteCase& problem, WriteCall& call) {
    for (const WriteRole role : kStored) {
        const Tensor& from = problem.tensor[role];
        if (!from.present()) continue;
        tensor[role].copy(from);
        call.view[role] = tensor[role].view;
    }
    if (problem.rope_in_k) call.view[kCacheRope] = channels_of(call.view[kCacheK], problem.channels_k, problem.channels_rope);
}

void WriteCall::bind() {
    options.k_scale = at(kScaleK), options.v_scale = at(kScaleV);
    options.k_rope_cache = at(kCacheRope), options.k_rope_new = at(kNewRope);
    options.rotary_cos = at(kTableCos), options.rotary_sin = at(kTableSin), options.positions = at(kRowPositions);
}

flash_status_t WriteCall::workspace_size(size_t* bytes) const {
    return flash_cache_write_workspace_size(at(kNewK), at(kNewV), at(kCacheK), at(kCacheV), at(kSlots), &options, bytes);
}

flash_status_t WriteCall::run() const {
    return flash_cache_write(at(kNewK), at(kNewV), at(kCacheK), at(kCacheV), at(kSlots), &options, nullptr);
}

}  // namespace fuzz
