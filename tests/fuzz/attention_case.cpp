#include "attention_case.h"

#include <algorithm>

namespace fuzz {
namespace {

constexpr int64_t kMostWork = int64_t{1} << 20;  // multiply-adds of the forward pass

int64_t choose_length(Bytes& bytes) {
    if (bytes.chance(12)) return 0;
    if (bytes.chance(40)) return bytes.one_of<int64_t>({1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 256, 257, 300});
    return bytes.between(1, 40);
}

int64_t blocks(int64_t length) { return (length + FLASH_BLOCK_SIZE - 1) / FLASH_BLOCK_SIZE; }

// Rows or keys of a bias or mask: on a packed side at least the longest sequence and the caller's max_seqlen.
int64_t covered(bool packed, int64_t seqlen, int64_t max_seqlen, Bytes& bytes) {
    return packed ? std::max(seqlen, max_seqlen) + bytes.below(3) : seqlen;
}

// Tensors whose last dimension need not be contiguous.
flash_tensor_t loose(Bytes& bytes, flash_tensor_t t) {
    if (bytes.chance(40))
        for (int n = 0; n < t.ndim; ++n) t.stride[n] *= 2;
    return t;
}

}  // namespace

void AttentionCase::choose_sizes(Bytes& bytes) {
    dtype = bytes.one_of<int32_t>({FLASH_DTYPE_FLOAT32, FLASH_DTYPE_BFLOAT16, FLASH_DTYPE_FLOAT16, FLASH_DTYPE_FLOAT64});
    batch = bytes.chance(8) ? 0 : bytes.between(1, 3);
    heads_k = bytes.between(1, 3);
    heads_q = heads_k * bytes.between(1, 4);
    const std::initializer_list<int64_t> dims = {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 64, 65, 96, 128, 160};
    head_dim = bytes.one_of(dims);
    head_dim_v = bytes.chance(180) ? head_dim : bytes.one_of(dims);
    if (bytes.chance(4)) head_dim = 512;
    seqlen_q = choose_length(bytes);
    seqlen_k = choose_length(bytes);
    while (batch * heads_q * seqlen_q * seqlen_k * (head_dim + head_dim_v) > kMostWork) {
        int64_t& largest = seqlen_q > seqlen_k ? seqlen_q : seqlen_k;
        if (largest > 16) {
            largest = largest / 2 + 1;
        } else {
            heads_k = heads_q = 1, batch = std::min<int64_t>(batch, 1), head_dim = std::min<int64_t>(head_dim, 64),
            head_dim_v = std::min<int64_t>(head_dim_v, 64);
        }
    }
    packed_q = bytes.chance(60);
    packed_k = bytes.chance(60);
}

void AttentionCase::choose_options(Bytes& bytes) {
    if (bytes.chance(100)) options.flags |= FLASH_FLAG_CAUSAL;
    if (bytes.chance(60)) options.flags |= FLASH_FLAG_TOP_LEFT;
    if (bytes.chance(60)) {
        options.flags |= FLASH_FLAG_WINDOW;
        options.window_left = bytes.between(-1, 40);
        options.window_right = bytes.between(-1, 40);
    }
    if (bytes.chance(100)) {
        options.flags |= FLASH_FLAG_SCALE;
        options.softmax_scale = bytes.one_of<double>({0.125, 1.0, 0.0, -0.5, 0.01, 2.0});
    }
    if (bytes.chance(50)) options.softcap = bytes.one_of<double>({1.0, 0.5, 30.0, 1e-3, 1e30});
    if (bytes.chance(40)) {
        options.dropout_p = bytes.one_of<double>({0.25, 0.5, 0.125, 0.75});
        options.seed = bytes.word() * uint64_t{0x100000001};
        options.offset = bytes.word() * uint64_t{0x300000001};
    }
    if (bytes.chance(60)) options.num_splits = bytes.between(1, 5);
    if (bytes.chance(60)) options.flags |= FLASH_FLAG_DETERMINISTIC;
    if (bytes.chance(128)) options.tile_q = bytes.one_of<int32_t>({1, 2, 3, 16, 17, 32, 64, 100, 128, 512});
    if (bytes.chance(128)) options.tile_k = bytes.one_of<int32_t>({1, 2, 3, 16, 17, 32, 64, 100, 128, 512});
    options.num_threads = static_cast<int32_t>(bytes.between(0, 4));
}

void AttentionCase::make_lengths(Role cu, Role used, Bytes& bytes, int64_t rows, int64_t seqlen, bool packed) {
    if (packed) {
        allocate(cu, contiguous(FLASH_DTYPE_INT32, {batch + 1}), bytes);
        int32_t* sums = tensor[cu].ints();
        sums[0] = 0;
        for (int64_t b = 0; b < batch; ++b)
            sums[b + 1] = sums[b] + static_cast<int32_t>(b == 0 ? seqlen : bytes.below(seqlen + 1));
        (cu == kCuQ ? rows_q : rows_k) = rows = sums[batch] + bytes.below(3);
        if (bytes.chance(60)) (cu == kCuQ ? options.max_seqlen_q : options.max_seqlen_k) = seqlen + bytes.below(4);
    }
    if (!bytes.chance(60)) return;
    allocate(used, contiguous(FLASH_DTYPE_INT32, {batch}), bytes);
    for (int64_t b = 0; b < batch; ++b) {
        const int64_t owned = packed ? tensor[cu].ints()[b + 1] - tensor[cu].ints()[b] : seqlen;
        tensor[used].ints()[b] = static_cast<int32_t>(bytes.below(owned + 1));
    }
}

void AttentionCase::make_rows(Role role, Bytes& bytes, bool query, int64_t channels, bool input) {
    const int64_t heads = query ? heads_q : heads_k;
    if (query ? packed_q : packed_k) {
        allocate(role, strided(bytes, dtype, {query ? rows_q : rows_k, heads, channels}, input), bytes);
    } else {
        allocate(role, strided(bytes, dtype, {batch, query ? seqlen_q : seqlen_k, heads, channels}, input), bytes);
    }
}

void AttentionCase::make_lse(Role role, Bytes& bytes) {
    const int32_t type = dtype == FLASH_DTYPE_FLOAT64 ? FLASH_DTYPE_FLOAT64 : FLASH_DTYPE_FLOAT32;
    allocate(role, loose(bytes, packed_q ? contiguous(type, {heads_q, rows_q}) : contiguous(type, {batch, heads_q, seqlen_q})),
             bytes);
}

void AttentionCase::make_score_terms(Bytes& bytes, Random& random) {
    const auto small_type = [&] { return bytes.chance(128) ? dtype : FLASH_DTYPE_FLOAT32; };
    if (bytes.chance(50)) {
        const int32_t type = small_type();
        allocate(kAlibi, loose(bytes, bytes.chance(128) ? contiguous(type, {heads_q}) : contiguous(type, {batch, heads_q})),
                 bytes);
        tensor[kAlibi].fill(random, 0.25);
        magnitudes.added += 0.25 * static_cast<double>(seqlen_q + seqlen_k);
    }
    if (bytes.chance(50)) {
        allocate(kSink, loose(bytes, contiguous(small_type(), {heads_q})), bytes);
        tensor[kSink].fill(random, 4);
        magnitudes.sink = 4;
    }
    for (const Role role : {kBias, kMask}) {
        if (!bytes.chance(50)) continue;
        const int64_t rows = covered(packed_q, seqlen_q, options.max_seqlen_q, bytes);
        const int64_t keys = covered(packed_k, seqlen_k, options.max_seqlen_k, bytes);
        const auto size = [&](int64_t full) { return bytes.chance(60) ? 1 : full; };
        flash_tensor_t t = contiguous(role == kMask ? static_cast<int32_t>(FLASH_DTYPE_BOOL) : small_type(),
                                      {size(batch), size(heads_q), size(rows), size(keys)});
        for (int64_t cut = bytes.below(3); cut > 0 && t.shape[0] == 1; --cut) {
            --t.ndim;
            for (int n = 0; n < t.ndim; ++n) t.shape[n] = t.shape[n + 1], t.stride[n] = t.stride[n + 1];
        }
        allocate(role, loose(bytes, t), bytes);
        if (role == kMask) {
            tensor[kMask].fill_bools(random, 6);
        } else {
            tensor[kBias].fill(random, 2);
            magnitudes.added += 2;
            if (bytes.chance(60))
                each_element(tensor[kBias].view, [&](int64_t offset) {
                    if (random.below(8) == 0) tensor[kBias].set(offset, -HUGE_VAL);
                });
        }
    }
}

void AttentionCase::make_rng_state(Bytes& bytes) {
    if (!bytes.chance(60)) return;
    allocate(kRngState, contiguous(FLASH_DTYPE_INT64, {2}), bytes);
    const uint64_t state[2] = {options.seed, options.offset};
    std::memcpy(tensor[kRngState].view.data, state, sizeof state);
    options.seed = options.offset = 0;
}

void AttentionCase::make_block_mask(Bytes& bytes, Random& random) {
    if (!bytes.chance(50)) return;
    const int64_t b = bytes.chance(128) ? 1 : batch, h = bytes.chance(128) ? 1 : heads_q;
    const int64_t nq = blocks(covered(packed_q, seqlen_q, options.max_seqlen_q, bytes));
    const int64_t nk = blocks(covered(packed_k, seqlen_k, options.max_seqlen_k, bytes));
    allocate(kBlockMask, contiguous(FLASH_DTYPE_BOOL, {b, h, nq, nk}), bytes);
    tensor[kBlockMask].fill_bools(random, 5);
    const std::pair<Role, flash_tensor_t> shapes[] = {{kRowCounts, contiguous(FLASH_DTYPE_INT32, {b, h, nq})},
                                                      {kRowIndices, contiguous(FLASH_DTYPE_INT32, {b, h, nq, nk})},
                                                      {kColCounts, contiguous(FLASH_DTYPE_INT32, {b, h, nk})},
                                                      {kColIndices, contiguous(FLASH_DTYPE_INT32, {b, h, nk, nq})}};
    for (const auto& [role, shape] : shapes) allocate(role, shape, bytes);
}

void AttentionCase::make_positions_of_rows(Role role, Bytes& bytes, bool query) {
    const int64_t rows = query ? rows_q : rows_k, seqlen = query ? seqlen_q : seqlen_k;
    const bool packed = query ? packed_q : packed_k;
    allocate(role, packed ? contiguous(FLASH_DTYPE_INT32, {rows}) : contiguous(FLASH_DTYPE_INT32, {batch, seqlen}), bytes);
    int32_t position = 0;
    for (int64_t i = 0; i < (packed ? rows : batch * seqlen); ++i) {
        if (!packed && i % seqlen == 0) position = static_cast<int32_t>(bytes.below(20));
        tensor[role].ints()[i] = position;
        position += static_cast<int32_t>(1 + bytes.below(3));
    }
}

// A part of longer sequences, and of more heads.
void AttentionCase::make_positions(Bytes& bytes) {
    if (bytes.chance(30)) {
        options.head_begin = bytes.below(4);
        options.heads_total = heads_q + options.head_begin + bytes.below(3);
    }
    if (bytes.chance(20)) options.sm_margin = static_cast<int32_t>(bytes.below(200));
    if (!bytes.chance(50)) return;
    options.flags = (options.flags | FLASH_FLAG_POSITIONS) & ~static_cast<uint32_t>(FLASH_FLAG_TOP_LEFT);
    if (bytes.chance(80)) {
        make_positions_of_rows(kRowPositions, bytes, true);
    } else {
        options.row_begin = bytes.below(60), options.row_step = bytes.below(4);
    }
    if (bytes.chance(80)) {
        make_positions_of_rows(kColumnPositions, bytes, false);
    } else {
        options.column_begin = bytes.below(60), options.column_step = bytes.below(4);
    }
    if (tensor[kAlibi].present())
        magnitudes.added += 0.25 * static_cast<double>(120 + 3 * (rows_q + rows_k + seqlen_q + seqlen_k));
}

AttentionCase::AttentionCase(Bytes& bytes) {
    options.struct_size = sizeof options;
    choose_sizes(bytes);
    choose_options(bytes);
    Random random(bytes.word());
    make_lengths(kCuQ, kUsedQ, bytes, rows_q, seqlen_q, packed_q);
    make_lengths(kCuK, kUsedK, bytes, rows_k, seqlen_k, packed_k);
    make_rows(kQ, bytes, true, head_dim, true);
    make_rows(kK, bytes, false, head_dim, true);
    make_rows(kV, bytes, false, head_dim_v, true);
    make_rows(kOut, bytes, true, head_dim_v, false);
    make_rows(kDout, bytes, true, head_dim_v, true);
    make_rows(kDq, bytes, true, head_dim, false);
    make_rows(kDk, bytes, false, head_dim, false);
    make_rows(kDv, bytes, false, head_dim_v, false);
    make_lse(kLse, bytes);
    if (bytes.chance(60)) make_lse(kDlse, bytes);
    const double magnitude = bytes.one_of<double>({1.0, 2.0, 0.25});
    for (const Role role : {kQ, kK, kV, kDout, kDlse})
        if (tensor[role].present()) tensor[role].fill(random, magnitude);
    make_score_terms(bytes, random);
    make_block_mask(bytes, random);
    make_rng_state(bytes);
    if (tensor[kBias].present() && bytes.chance(160)) tensor[kDbias].allocate(tensor[kBias].view);
    if (tensor[kSink].present() && bytes.chance(160)) tensor[kDsink].allocate(tensor[kSink].view);
    make_positions(bytes);

    Magnitudes& m = magnitudes;
    m.q = m.k = m.v = m.dout = magnitude;
    m.dlse = tensor[kDlse].present() ? magnitude : 0;
    m.scale = options.flags & FLASH_FLAG_SCALE ? options.softmax_scale : 1 / std::sqrt(static_cast<double>(head_dim));
    m.softcap = options.softcap;
    m.keep = 1 / (1 - options.dropout_p);  // dropout_p is a multiple of 2^-16
    m.head_dim = static_cast<double>(head_dim), m.head_dim_v = static_cast<double>(head_dim_v);
    m.rows = static_cast<double>(seqlen_q), m.keys = static_cast<double>(seqlen_k);
    m.group = static_cast<double>(heads_q / heads_k);
}

AttentionCall AttentionCase::call(bool backward) const {
    AttentionCall call;
    call.backward = backward;
    call.options = options;
    for (int role = 0; role < kRoles; ++role) {
        call.given[role] = tensor[role].present();
        call.view[role] = tensor[role].view;
    }
    if (!backward) call.given[kDlse] = call.given[kDbias] = call.given[kDsink] = false;
    for (const Role role : {kRowCounts, kRowIndices, kColCounts, kColIndices}) call.given[role] = false;
    return call;
}

void AttentionCall::bind() {
    options.cu_seqlens_q = at(kCuQ), options.cu_seqlens_k = at(kCuK);
    options.seqused_q = at(kUsedQ), options.seqused_k = at(kUsedK);
    options.alibi_slopes = at(kAlibi), options.bias = at(kBias), options.mask = at(kMask);
    options.learnable_sink = at(kSink), options.block_mask = at(kBlockMask);
    options.dlse = at(kDlse), options.dbias = at(kDbias), options.dsink = at(kDsink), options.rng_state = at(kRngState);
    options.row_positions = at(kRowPositions), options.column_positions = at(kColumnPositions);
    lists = {view[kRowCounts], view[kRowIndices], view[kColCounts], view[kColIndices]};
    options.block_lists = given[kRowCounts] ? &lists : nullptr;
}

flash_status_t AttentionCall::workspace_size(size_t* bytes) const {
    const flash_attention_options_t* with = null_options ? nullptr : &options;
    if (!backward) return flash_attention_forward_workspace_size(at(kQ), at(kK), at(kV), at(kOut), at(kLse), with, bytes);
    return flash_attention_backward_workspace_size(at(kDout), at(kQ), at(kK), at(kV), at(kOut), at(kLse), at(kDq), at(kDk),
                                                   at(kDv), with, bytes);
}

flash_status_t AttentionCall::run(void* workspace, size_t bytes) const {
    const flash_attention_options_t* with = null_options ? nullptr : &options;
    if (!backward) return flash_attention_forward(at(kQ), at(kK), at(kV), at(kOut), at(kLse), with, workspace, bytes, nullptr);
    return flash_attention_backward(at(kDout), at(kQ), at(kK), at(kV), at(kOut), at(kLse), at(kDq), at(kDk), at(kDv), with,
                                    workspace, bytes, nullptr);
}

flash_status_t AttentionCall::explain(char* text, size_t capacity, size_t* needed) const {
    const auto ask = backward ? flash_attention_backward_explain : flash_attention_forward_explain;
    return ask(at(kQ), at(kK), at(kV), null_options ? nullptr : &options, text, capacity, needed);
}

}  // namespace fuzz
