#include "decode_case.h"

#include <algorithm>

namespace fuzz {
namespace {

constexpr int64_t kMostWork = int64_t{1} << 20;

}  // namespace

void DecodeCase::choose_sizes(Bytes& bytes) {
    dtype = bytes.one_of<int32_t>({FLASH_DTYPE_FLOAT32, FLASH_DTYPE_BFLOAT16, FLASH_DTYPE_FLOAT16, FLASH_DTYPE_FLOAT64});
    cache_dtype = dtype;
    if (dtype != FLASH_DTYPE_FLOAT64 && bytes.chance(80))
        cache_dtype = bytes.one_of<int32_t>({FLASH_DTYPE_FLOAT8_E4M3, FLASH_DTYPE_FLOAT8_E5M2, FLASH_DTYPE_INT8});
    batch = bytes.chance(6) ? 0 : bytes.between(1, 3);
    heads_k = bytes.between(1, 3);
    heads_q = heads_k * bytes.one_of<int64_t>({1, 2, 3, 4, 8});
    const std::initializer_list<int64_t> dims = {1, 2, 3, 4, 8, 15, 16, 17, 32, 33, 64, 80, 128, 576};
    head_dim = bytes.one_of(dims);
    head_dim_v = bytes.chance(180) ? head_dim : bytes.one_of(dims);
    seqlen_q = bytes.chance(6) ? 0 : bytes.chance(100) ? bytes.between(1, 20) : 1;
    capacity = bytes.one_of<int64_t>({0, 1, 2, 16, 63, 64, 65, 127, 128, 129, 256, 257, 384, 500});
    if (bytes.chance(128)) page_size = bytes.one_of<int64_t>({1, 2, 3, 7, 16, 64, 128, 256});
    while (batch * heads_q * seqlen_q * capacity * (head_dim + head_dim_v) > kMostWork) {
        if (capacity > 32) {
            capacity = capacity / 2 + 1;
        } else {
            seqlen_q = std::min<int64_t>(seqlen_q, 2), head_dim = std::min<int64_t>(head_dim, 64);
            head_dim_v = std::min<int64_t>(head_dim_v, 64);
        }
    }
    choose_parts(bytes);
    append = capacity > 0 && bytes.chance(100);
    if (append) seqlen_new = bytes.chance(128) ? 1 : bytes.between(0, std::min<int64_t>(capacity, 20));
}

void DecodeCase::choose_parts(Bytes& bytes) {
    if (head_dim > 1 && bytes.chance(80)) rope_dim = bytes.chance(128) ? (head_dim + 8) / 9 : bytes.between(1, head_dim - 1);
    rope_in_k = rope_dim > 0 && !codes() && bytes.chance(128);
    v_in_k = bytes.chance(rope_dim > 0 ? 128 : 30);
    if (v_in_k) head_dim_v = bytes.chance(128) ? channels_k() : bytes.between(1, channels_k());
}

void DecodeCase::choose_options(Bytes& bytes) {
    options.struct_size = sizeof options;
    if (bytes.chance(140)) options.flags |= FLASH_FLAG_CAUSAL;
    if (bytes.chance(60)) {
        options.flags |= FLASH_FLAG_WINDOW;
        options.window_left = bytes.between(-1, 60);
        options.window_right = bytes.between(-1, 60);
    }
    if (bytes.chance(100)) {
        options.flags |= FLASH_FLAG_SCALE;
        options.softmax_scale = bytes.one_of<double>({0.125, 1.0, 0.0, -0.5});
    }
    if (bytes.chance(50)) options.softcap = bytes.one_of<double>({1.0, 30.0});
    if (bytes.chance(100)) {
        options.num_splits = bytes.between(1, 9);
    } else if (bytes.chance(100)) {
        options.split_size = 128 * bytes.between(1, 4);
    }
    if (options.num_splits == 0 && bytes.chance(80)) options.flags |= FLASH_FLAG_INVARIANT_ROWS;
    options.num_threads = static_cast<int32_t>(bytes.between(0, 4));
}

void DecodeCase::choose_rows(Bytes& bytes) {
    packed = bytes.chance(80);
    rows.assign(static_cast<size_t>(batch), seqlen_q), new_rows.assign(static_cast<size_t>(batch), append ? seqlen_new : 0);
    for (int64_t b = 0; packed && b < batch; ++b) {
        rows[static_cast<size_t>(b)] = bytes.below(seqlen_q + 1);
        if (append) new_rows[static_cast<size_t>(b)] = bytes.below(seqlen_new + 1);
    }
}

void DecodeCase::make_prefix_sums(DecodeRole role, const std::vector<int64_t>& counts, Bytes& bytes) {
    allocate(role, contiguous(FLASH_DTYPE_INT32, {batch + 1}), bytes);
    int32_t* cu = tensor[role].ints();
    cu[0] = 0;
    for (size_t b = 0; b < counts.size(); ++b) cu[b + 1] = cu[b] + static_cast<int32_t>(counts[b]);
}

void DecodeCase::make_packing(Bytes& bytes) {
    if (!packed) return;
    if (append) make_prefix_sums(kCuNew, new_rows, bytes);
    make_prefix_sums(kCuQ, rows, bytes);
}

// Query rows of all sequences.
int64_t DecodeCase::all_rows() const {
    int64_t total = 0;
    for (const int64_t count : rows) total += count;
    return total;
}

// Any positions that the rotary tables have.
void DecodeCase::make_positions(Bytes& bytes, Random& random) {
    if (!bytes.chance(70)) return;
    allocate(kPositions, packed ? contiguous(FLASH_DTYPE_INT32, {all_rows()}) : contiguous(FLASH_DTYPE_INT32, {batch, seqlen_q}),
             bytes);
    each_element(tensor[kPositions].view, [&](int64_t offset) {
        tensor[kPositions].ints()[offset] = static_cast<int32_t>(random.below(capacity + seqlen_q + 1));
    });
}

// Any bits, also such that are no tree.
void DecodeCase::make_tree(Bytes& bytes, Random& random) {
    const bool window = (options.flags & FLASH_FLAG_WINDOW) != 0;
    if ((window && !tensor[kPositions].present()) || !bytes.chance(70)) return;
    int64_t total = all_rows();
    if (bytes.chance(128)) {
        std::vector<int64_t> counts = rows;
        for (int64_t& count : counts)
            if (bytes.chance(100)) total -= count, count = 0;
        make_prefix_sums(kCuTree, counts, bytes);
    }
    allocate(kTree, strided(bytes, FLASH_DTYPE_INT32, {total, (seqlen_q + 31) / 32 + bytes.below(2)}, true), bytes);
    each_element(tensor[kTree].view, [&](int64_t offset) {
        const auto bits = static_cast<uint32_t>(random.below(int64_t{1} << 32));
        tensor[kTree].ints()[offset] = static_cast<int32_t>(bits);
    });
}

int64_t DecodeCase::cached(int64_t b) const {
    if (!tensor[kSeqlens].present()) return append ? 0 : capacity;
    return static_cast<const int32_t*>(tensor[kSeqlens].view.data)[b];
}

int64_t DecodeCase::leftpad(int64_t b) const {
    return tensor[kLeftpad].present() ? static_cast<const int32_t*>(tensor[kLeftpad].view.data)[b] : 0;
}

void DecodeCase::make_lengths(Bytes& bytes) {
    if (bytes.chance(200)) {
        allocate(kSeqlens, contiguous(FLASH_DTYPE_INT32, {batch}), bytes);
        for (int64_t b = 0; b < batch; ++b)
            tensor[kSeqlens].ints()[b] = static_cast<int32_t>(bytes.below(capacity - seqlen_new + 1));
    }
    if (!packed && bytes.chance(40)) {
        allocate(kLeftpad, contiguous(FLASH_DTYPE_INT32, {batch}), bytes);
        for (int64_t b = 0; b < batch; ++b) tensor[kLeftpad].ints()[b] = static_cast<int32_t>(bytes.below(cached(b) + 1));
    }
}

// Chooses the cache entry or pages of each sequence: its own if it appends keys, else possibly shared.
void DecodeCase::make_block_table(Bytes& bytes, Random& random) {
    if (page_size > 0) {
        const int64_t columns = (capacity + page_size - 1) / page_size;
        capacity = columns * page_size;
        pages = batch * columns + bytes.below(3);
        allocate(kTable, strided(bytes, FLASH_DTYPE_INT32, {batch, columns}, false), bytes);
        const std::vector<int32_t> order = shuffled(pages, random);
        size_t next = 0;
        const bool shared = !append && bytes.chance(60);
        each_element(tensor[kTable].view, [&](int64_t offset) {
            tensor[kTable].ints()[offset] = shared ? static_cast<int32_t>(random.below(pages)) : order[next++];
        });
        return;
    }
    entries = batch;
    if (!bytes.chance(60)) return;
    entries = batch + bytes.between(1, 2);
    allocate(kBatchIdx, contiguous(FLASH_DTYPE_INT32, {batch}), bytes);
    const std::vector<int32_t> order = shuffled(entries, random);
    const bool shared = !append && bytes.chance(60);
    for (int64_t b = 0; b < batch; ++b)
        tensor[kBatchIdx].ints()[b] = shared ? static_cast<int32_t>(random.below(entries)) : order[static_cast<size_t>(b)];
}

// The cache as one of several shards: it has room for the keys of all. Their lengths must be known, and each query row needs a
// new row.
void DecodeCase::make_shard(Bytes& bytes) {
    if (!bytes.chance(50) || tensor[kLeftpad].present() || (!append && !tensor[kSeqlens].present())) return;
    for (int64_t b = 0; append && b < batch; ++b)
        if (new_rows[static_cast<size_t>(b)] < rows[static_cast<size_t>(b)]) return;
    if (append && !packed && seqlen_new < seqlen_q) return;
    options.shard_count = bytes.between(2, 8);
    options.shard_index = bytes.below(options.shard_count);
    options.shard_keys = bytes.one_of<int64_t>({0, 1, 3, 16, 100});
}

// Groups of one sequence each, for which every length is true, and now and then all sequences with no shared key.
void DecodeCase::make_shared_keys(Bytes& bytes) {
    if (!bytes.chance(50)) return;
    const bool each = bytes.chance(200);
    const int64_t groups = each ? batch : 1;
    allocate(kGroups, contiguous(FLASH_DTYPE_INT32, {groups + 1}), bytes);
    allocate(kShared, contiguous(FLASH_DTYPE_INT32, {groups}), bytes);
    tensor[kGroups].ints()[0] = 0;
    for (int64_t i = 0; i < groups; ++i) {
        tensor[kGroups].ints()[i + 1] = static_cast<int32_t>(each ? i + 1 : batch);
        tensor[kShared].ints()[i] = static_cast<int32_t>(each ? bytes.below(cached(i) + 1) : 0);
    }
}

// Sets the block table columns before the first key and after the last key, which are unused, to an invalid page.
void DecodeCase::forget_spare_pages() {
    for (int64_t b = 0; page_size > 0 && b < batch; ++b)
        for (int64_t column = 0; column < capacity / page_size; ++column) {
            const int64_t first = column * page_size, last = first + page_size,
                          length = cached(b) + new_rows[static_cast<size_t>(b)];
            if (leftpad(b) < length && leftpad(b) < last && first < length) continue;
            tensor[kTable].ints()[b * tensor[kTable].view.stride[0] + column * tensor[kTable].view.stride[1]] = 0x7fffffff;
        }
}

void DecodeCase::make_rotary(Bytes& bytes, Random& random) {
    const int64_t channels = rope_dim > 0 ? rope_dim : head_dim;
    if (channels < 2 || !bytes.chance(rope_dim > 0 ? 128 : 60)) return;
    if (bytes.chance(128)) options.flags |= FLASH_FLAG_ROTARY_INTERLEAVED;
    const int64_t pairs = bytes.between(1, channels / 2), positions = capacity + seqlen_q + 1;
    const int32_t type = bytes.chance(128) ? dtype : FLASH_DTYPE_FLOAT32;
    for (const DecodeRole role : {kCos, kSin}) {
        allocate(role, strided(bytes, type, {positions, pairs}, false), bytes);
        tensor[role].fill(random, 0.7);
    }
    magnitudes.q *= 1.4;
}

void DecodeCase::make_head_terms(Bytes& bytes, Random& random) {
    const int32_t type = bytes.chance(128) ? dtype : FLASH_DTYPE_FLOAT32;
    if (bytes.chance(50)) {
        allocate(kSlopes, bytes.chance(128) ? contiguous(type, {heads_q}) : contiguous(type, {batch, heads_q}), bytes);
        tensor[kSlopes].fill(random, 0.25);
        magnitudes.added = 0.25 * static_cast<double>(capacity + seqlen_q);
    }
    if (bytes.chance(50)) {
        allocate(kDecodeSink, contiguous(type, {heads_q}), bytes);
        tensor[kDecodeSink].fill(random, 4);
        magnitudes.sink = 4;
    }
}

int64_t DecodeCase::cache_block(int64_t b, int64_t j) const {
    const flash_tensor_t &table = tensor[kTable].view, &entry = tensor[kBatchIdx].view;
    if (page_size > 0) return static_cast<const int32_t*>(table.data)[b * table.stride[0] + j / page_size * table.stride[1]];
    return tensor[kBatchIdx].present() ? static_cast<const int32_t*>(entry.data)[b] : b;
}

// One scale for all, or for each head, sequence, row or group of channels; the last two for codes, since an append computes them.
void DecodeCase::make_scale(DecodeRole role, int64_t channels, Bytes& bytes) {
    const flash_tensor_t& t = tensor[kKCache].view;
    const int64_t groups = channels % 4 == 0 ? 4 : channels % 3 == 0 ? 3 : 1;
    const int32_t type = FLASH_DTYPE_FLOAT32;
    flash_tensor_t shape;
    const bool of_rows = codes() && !(role == kVScale && v_in_k && append);
    switch (bytes.below(of_rows ? 5 : 3)) {
        case 0: shape = contiguous(type, {1}); break;
        case 1: shape = contiguous(type, {heads_k}); break;
        case 2: shape = contiguous(type, {batch, heads_k}); break;
        case 3: shape = contiguous(type, {t.shape[0], t.shape[1], heads_k}); break;
        default: shape = contiguous(type, {t.shape[0], t.shape[1], heads_k, groups}); break;
    }
    const int64_t spread = bytes.between(1, 2);  // any strides
    for (int n = 0; n < shape.ndim; ++n) shape.stride[n] *= spread;
    allocate(role, shape, bytes);
}

// Values in k_cache have its scales, or v_scale. That is required if they end inside a group of channels, and not allowed if an
// append computes k_scale; so they end with a group then.
void DecodeCase::make_scales(Bytes& bytes) {
    const int chance = codes() ? 128 : 30;
    if (cache_dtype == FLASH_DTYPE_INT8 || bytes.chance(chance)) make_scale(kKScale, channels_k(), bytes);
    if (!v_in_k) {
        if (cache_dtype == FLASH_DTYPE_INT8 || bytes.chance(chance)) make_scale(kVScale, head_dim_v, bytes);
        return;
    }
    const bool computed = append && scale_of_rows(kKScale), groups = tensor[kKScale].present() && tensor[kKScale].view.ndim == 4;
    const int64_t of_group = groups ? channels_k() / tensor[kKScale].view.shape[3] : 1;
    if (!computed && bytes.chance(60)) return make_scale(kVScale, head_dim_v, bytes);
    head_dim_v = (head_dim_v + of_group - 1) / of_group * of_group;
}

// Cached rows that no sequence may read stay NaN, or what the bits of NaN are as a code: those past the lengths, before the
// leftpad and on unused pages.
void DecodeCase::fill_cached(DecodeRole cache, Random& random) {
    const flash_tensor_t& t = tensor[cache].view;
    // A code of at most 1, and of INT8 any.
    const int64_t codes_of_sign = cache_dtype == FLASH_DTYPE_INT8 ? 128 : cache_dtype == FLASH_DTYPE_FLOAT8_E4M3 ? 0x39 : 0x3d;
    const auto any_code = [&] { return static_cast<uint8_t>(random.below(codes_of_sign) + (random.below(2) ? 128 : 0)); };
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t j = leftpad(b); j < cached(b); ++j)
            for (int64_t h = 0; h < heads_k; ++h) {
                const int64_t first = cache_block(b, j) * t.stride[0] + row_in_block(j) * t.stride[1] + h * t.stride[2];
                for (int64_t c = 0; c < t.shape[3]; ++c) {
                    if (t.dtype != dtype) {
                        static_cast<uint8_t*>(t.data)[first + c] = any_code();
                    } else {
                        tensor[cache].set(first + c, random.uniform());
                    }
                }
            }
}

// Scales of rows that no sequence may read stay NaN.
void DecodeCase::fill_scale(DecodeRole scale, Random& random) {
    const flash_tensor_t& s = tensor[scale].view;
    const double unit = cache_dtype == FLASH_DTYPE_INT8 ? 1.0 / 127 : 1.0;
    const auto set = [&](int64_t offset) { tensor[scale].set(offset, unit * (0.75 + 0.25 * random.uniform())); };
    if (!scale_of_rows(scale)) return each_element(s, set);
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t j = leftpad(b); j < cached(b); ++j)
            for (int64_t h = 0; h < heads_k; ++h)
                for (int64_t g = 0; g < (s.ndim == 4 ? s.shape[3] : 1); ++g)
                    set(cache_block(b, j) * s.stride[0] + row_in_block(j) * s.stride[1] + h * s.stride[2] + g * s.stride[3]);
}

void DecodeCase::make_caches(Bytes& bytes) {
    const int64_t first = page_size > 0 ? pages : entries, second = page_size > 0 ? page_size : capacity;
    const auto shape = [&](int32_t type, int64_t channels) {
        return strided(bytes, type, {first, second, heads_k, channels}, false);
    };
    allocate(kKCache, shape(cache_dtype, rope_in_k ? head_dim : channels_k()), bytes);
    tensor[kKCache].view.shape[3] = channels_k();
    if (rope_dim > 0 && !rope_in_k) allocate(kRopeCache, shape(dtype, rope_dim), bytes);
    make_scales(bytes);
    if (v_in_k) return;
    // With the strides of the keys, as if both were slices of one buffer: without addresses they could be one cache.
    flash_tensor_t values = shape(cache_dtype, head_dim_v);
    if (head_dim_v <= channels_k() && bytes.chance(60)) values = tensor[kKCache].view, values.shape[3] = head_dim_v;
    allocate(kVCache, values, bytes);
}

// Query rows, or rows to append.
flash_tensor_t DecodeCase::rows_shape(bool of_queries, int64_t heads, int64_t channels, bool repeats, Bytes& bytes) const {
    int64_t total = 0;
    for (const int64_t count : of_queries ? rows : new_rows) total += count;
    if (packed) return strided(bytes, dtype, {total, heads, channels}, repeats);
    return strided(bytes, dtype, {batch, of_queries ? seqlen_q : seqlen_new, heads, channels}, repeats);
}

void DecodeCase::make_new_rows(Bytes& bytes) {
    if (!append) return;
    allocate(kKNew, rows_shape(false, heads_k, channels_k(), true, bytes), bytes);
    if (rope_dim > 0) allocate(kRopeNew, rows_shape(false, heads_k, rope_dim, true, bytes), bytes);
    if (!v_in_k) allocate(kVNew, rows_shape(false, heads_k, head_dim_v, true, bytes), bytes);
}

// Any size and any numbers: the CPU has no use for a schedule.
void DecodeCase::make_schedule(Bytes& bytes, Random& random) {
    if (!bytes.chance(60)) return;
    allocate(kSchedule, contiguous(FLASH_DTYPE_INT32, {bytes.below(40)}), bytes);
    each_element(tensor[kSchedule].view,
                 [&](int64_t offset) { tensor[kSchedule].ints()[offset] = static_cast<int32_t>(random.word() >> 32); });
}

void DecodeCase::find_magnitudes() {
    Magnitudes& m = magnitudes;
    if (codes()) m.q *= 1.2, m.v *= 1.2;                          // new rows, rounded to codes
    m.k = m.q;                                                    // new keys are rotated, too
    if (v_in_k) m.v = tensor[kVScale].present() ? 2 * m.k : m.k;  // a new key divided by k_scale, times v_scale
    m.scale = options.flags & FLASH_FLAG_SCALE ? options.softmax_scale : 1 / std::sqrt(static_cast<double>(head_dim));
    m.softcap = options.softcap;
    m.head_dim = static_cast<double>(head_dim), m.head_dim_v = static_cast<double>(head_dim_v);
    m.keys = static_cast<double>(capacity + 1);
}

DecodeCase::DecodeCase(Bytes& bytes) {
    choose_sizes(bytes);
    choose_options(bytes);
    choose_rows(bytes);
    Random random(bytes.word());
    make_block_table(bytes, random);
    make_packing(bytes);
    make_lengths(bytes);
    make_positions(bytes, random);
    make_tree(bytes, random);
    make_shared_keys(bytes);
    make_shard(bytes);
    forget_spare_pages();
    make_rotary(bytes, random);
    make_head_terms(bytes, random);
    make_caches(bytes);
    make_new_rows(bytes);
    make_schedule(bytes, random);
    allocate(kQuery, rows_shape(true, heads_q, head_dim, true, bytes), bytes);
    allocate(kDecodeOut, rows_shape(true, heads_q, head_dim_v, false, bytes), bytes);
    const int32_t type = dtype == FLASH_DTYPE_FLOAT64 ? FLASH_DTYPE_FLOAT64 : FLASH_DTYPE_FLOAT32;
    if (bytes.chance(200)) {
        const int64_t total = tensor[kQuery].view.shape[0];
        allocate(kDecodeLse, packed ? contiguous(type, {heads_q, total}) : contiguous(type, {batch, heads_q, seqlen_q}), bytes);
    }
    for (const DecodeRole role : {kQuery, kKNew, kVNew, kRopeNew})
        if (tensor[role].present()) tensor[role].fill(random, 1);
    tensor[kKCache].view.shape[3] = rope_in_k ? head_dim : channels_k();
    for (const DecodeRole role : {kKCache, kVCache, kRopeCache})
        if (tensor[role].present()) fill_cached(role, random);
    tensor[kKCache].view.shape[3] = channels_k();
    for (const DecodeRole role : {kKScale, kVScale})
        if (tensor[role].present()) fill_scale(role, random);
    find_magnitudes();
}

void DecodeCase::place_parts(DecodeCall& call) const {
    const flash_tensor_t& k = call.view[kKCache];
    if (v_in_k) call.view[kVCache] = k, call.view[kVCache].shape[3] = head_dim_v;
    if (rope_in_k) call.view[kRopeCache] = channels_of(k, channels_k(), rope_dim);
}

DecodeCall DecodeCase::call() const {
    DecodeCall call;
    call.options = options;
    for (int role = 0; role < kDecodeRoles; ++role) {
        call.given[role] = tensor[role].present();
        call.view[role] = tensor[role].view;
    }
    call.given[kVCache] = true;
    call.given[kRopeCache] = rope_dim > 0;
    place_parts(call);
    return call;
}

void DecodeCall::bind() {
    options.cache_seqlens = at(kSeqlens), options.block_table = at(kTable), options.cache_batch_idx = at(kBatchIdx);
    options.cache_leftpad = at(kLeftpad), options.k_new = at(kKNew), options.v_new = at(kVNew);
    options.rotary_cos = at(kCos), options.rotary_sin = at(kSin);
    options.alibi_slopes = at(kSlopes), options.learnable_sink = at(kDecodeSink);
    options.cu_seqlens_q = at(kCuQ), options.cu_seqlens_new = at(kCuNew), options.q_positions = at(kPositions);
    options.k_scale = at(kKScale), options.v_scale = at(kVScale);
    options.k_rope_cache = at(kRopeCache), options.k_rope_new = at(kRopeNew);
    options.tree_mask = at(kTree), options.cu_seqlens_tree = at(kCuTree);
    options.shared_groups = at(kGroups), options.shared_lens = at(kShared);
    options.schedule = at(kSchedule);
}

flash_status_t DecodeCall::workspace_size(size_t* bytes) const {
    return flash_attention_decode_workspace_size(at(kQuery), at(kKCache), at(kVCache), at(kDecodeOut), at(kDecodeLse), &options,
                                                 bytes);
}

flash_status_t DecodeCall::schedule_size(size_t* bytes) const {
    return flash_attention_decode_schedule_size(at(kQuery), at(kKCache), at(kVCache), at(kDecodeOut), at(kDecodeLse), &options,
                                                bytes);
}

flash_status_t DecodeCall::write_schedule(const flash_tensor_t* schedule) const {
    return flash_attention_decode_schedule(at(kQuery), at(kKCache), at(kVCache), at(kDecodeOut), at(kDecodeLse), &options,
                                           schedule, nullptr);
}

flash_status_t DecodeCall::run(void* workspace, size_t bytes) const {
    return flash_attention_decode(at(kQuery), at(kKCache), at(kVCache), at(kDecodeOut), at(kDecodeLse), &options, workspace,
                                  bytes, nullptr);
}

}  // namespace fuzz
