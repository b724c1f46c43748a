// Runs the backward kernel of sm90, or those of wide heads, on the host and compares it with double precision: masks, lengths
// that end within tiles, shared key heads, rare options, block masks, and NaN between rows and outside the sequences.
// Arguments: 1 is 0, or the seed of a random order (warps are delayed, copies and additions complete late and in any order,
// products are computed when they are waited for); 2 is 0, or the number of thread blocks that run at the same time, start in any
// order and add to dq in a fixed order. Prints the errors and, with a fixed order, a hash of the results; exit code 0 means no
// error is too large.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <random>

#include "backward_problem.h"

// dbias, by the kernel of sm80, after the kernels of sm90.
void launch_bias_gradient(const Problem& p) {
    using Bias = DbiasOf<EmulatedKernel>;
    const int64_t blocks = p.c.heads_q * ceil_div(p.c.queries, Bias::kBlockM) * ceil_div(p.c.keys, Bias::kBlockN);
    enqueue(dbias_kernel<EmulatedKernel>, {blocks, Bias::kThreads, Bias::kSharedBytes}, p.params, nullptr);
}

// Whether a result of 0 in place of this exact value is an error: a number of the computation was too small for its type. The
// rounding of the terms, whose absolute values add up to `size`, does not explain it. (Not with fp16, where probabilities below
// 2^-25 are 0.)
bool is_lost(double exact, double size) {
    return kWide && std::fabs(exact) > 0x1p-124 && std::fabs(exact) > 2 * kRounding * size;
}

// Checks the root mean square error relative to the exact values, that no value that bf16 can represent became 0, that rows
// beyond a used length became 0, and that nothing between and after the sequences was overwritten.
bool near(const char* name, const Case& c, const Rows& got) {
    RelativeError error;
    int lost = 0;
    const auto compare = [&](size_t at, bool used) {
        const double x = float(got.x[at]), exact = got.exact[at];
        error.add(x, exact);
        lost += used ? x == 0 && is_lost(exact, got.sizes[at]) : x != 0;
    };
    for (int b = 0; b < c.batch; ++b)
        for (int i = 0; i < got.side->owned[b] && !is_poisoned(c, b); ++i)
            for (int j = 0; j < got.heads * got.dim; ++j) compare(got.at(b, i, 0) + j, i < got.side->length[b]);
    const size_t end = size_t(got.side->cu.back()) * got.stride;
    for (size_t i = 0; i < got.x.size(); ++i)
        if (i >= end || int(i % got.stride) >= got.heads * got.dim) lost += float(got.x[i]) == float(got.x[i]);
    const double relative = error.value();
    const bool good = relative <= 2 * kRounding && lost == 0;
    if (!good) std::printf("WRONG %s: relative error %.2e, %d lost\n", name, relative, lost);
    return good;
}

bool near_dbias(const Problem& p) {
    RelativeError error;
    for (size_t i = 0; i < p.dbias.size() && p.c.wants_dbias(); ++i) error.add(p.dbias[i], p.dbias_exact[i]);
    const bool good = error.error == 0 || error.value() <= 2 * kRounding;
    if (!good) std::printf("WRONG dbias: relative error %.2e\n", error.value());
    return good;
}

// Whether every key tile has added to every query tile that sees it.
bool counted_down(const Problem& p) {
    const int32_t end = knows_block_mask(static_cast<BackwardInstance>(p.plan().instance.number)) ? -1 : 0;
    const auto left = std::find_if(p.counters.begin(), p.counters.end(), [&](int32_t count) { return count > end; });
    if (!p.params.dq_counters || left == p.counters.end()) return true;
    std::printf("WRONG: query tile %d waits for turn %d\n", static_cast<int>(left - p.counters.begin()), *left);
    return false;
}

// FNV-1a of the bits.
template <class Value>
void add_to_hash(uint64_t& hash, const std::vector<Value>& values) {
    for (size_t i = 0; i < values.size() * sizeof(Value); ++i)
        hash = (hash ^ reinterpret_cast<const uint8_t*>(values.data())[i]) * 0x100000001b3;
}

bool check(const Case& c, bool fixed_order, int splits) {
    Problem p(c, fixed_order, splits);
    launch_kernels(p.plan(), p.params, nullptr);
    if (c.wants_dbias()) launch_bias_gradient(p);
    const auto kept_guard = [](const std::vector<float>& sums) { return sums.empty() || sums.back() == 7; };
    const bool good = kept_guard(p.gradient_sums) & kept_guard(p.split_sums) & near("dq", c, p.dq) & near("dk", c, p.dk) &
                      near("dv", c, p.dv) & near_dbias(p) & counted_down(p);
    uint64_t hash = 0xcbf29ce484222325;
    for (const Rows* gradient : {&p.dq, &p.dk, &p.dv}) add_to_hash(hash, gradient->x);
    add_to_hash(hash, p.dbias);
    if (fixed_order) std::printf("bits %016llx ", static_cast<unsigned long long>(hash));
    std::printf("%s %d x %d heads %d/%d keys %d dims %d %d window %d %d size %g lengths %d rare %d blocks %d\n",
                good ? "ok" : "WRONG", c.batch, c.queries, c.heads_q, c.heads_k, c.keys, c.head_dim, c.head_dim_v, c.left,
                c.right, c.size, static_cast<int>(c.lengths), c.rare, static_cast<int>(c.blocks));
    return good;
}

// One, two or three; where splits can only be whole query heads, two.
int splits_of(const Case& c, BackwardInstance kind) {
    if (!has_splits(kind)) return 1;
    return knows_block_mask(kind) ? std::min(2, c.heads_q / c.heads_k) : 1 + (c.queries + c.keys) % 3;
}

int main(int, char** argv) {
    emulation::set_random_order(std::atoi(argv[1]));
    const int together = std::atoi(argv[2]);
    emulation::machine.most_resident = std::max(together, 1);
    constexpr int kAll = kUnboundedWindow, kDim = HEAD_DIM;
    const Case cases[] = {
        {1, 1, 1, 64, 128, kDim, kDim, kAll, kAll, 1, false, false},                 // one tile of each
        {1, 1, 1, 100, 90, kDim, kDim, kAll, kAll, 1, false, true},                  // partial tiles
        {1, 2, 1, 300, 333, kDim, kDim, kAll, 0, 1, false, false},                   // causal, shared key heads
        {2, 2, 2, 330, 70, kDim, kDim, kAll, 0, 1, false, false},                    // rows without keys
        {1, 1, 1, 100, 400, kDim, kDim, kAll, 0, 1, true, false},                    // keys that no row sees: zeros are written
        {1, 1, 1, 520, 520, kDim - 8, kDim, 100, 0, 1, false, false},                // a window
        {2, 4, 2, 150, 200, kDim, kDim - 16, 70, 30, 1, false, true},                // several batch entries and heads
        {1, 2, 1, 150, 200, kDim, kDim, 120, 0, kWide ? 4.0f : 2.0f, false, false},  // very small probabilities
        {1, 1, 1, 0, 130, kDim, kDim, kAll, kAll, 1, false, false},                  // no queries at all
        {1, 1, 1, 70, 0, kDim, kDim, kAll, kAll, 1, false, false},                   // no keys
        // No queries, with the other instances. A call without query heads runs in the same way (leave_out_queries()).
        {2, 2, 2, 0, 300, kDim, kDim, kAll, 0, 1, false, false, Lengths::used},
        {3, 2, 2, 0, 200, kDim, kDim, kAll, kAll, 1, false, false, Lengths::dense, true},
        {2, 2, 2, 0, 300, kDim, kDim, kAll, 0, 1, false, false, Lengths::dense, false, Blocks::mask},
        {3, 2, 1, 150, 300, kDim, kDim, kAll, kAll, 1, false, true, Lengths::used},
        {3, 2, 2, 200, 90, kDim, kDim - 16, kAll, 0, 1, false, false, Lengths::used},  // a key tile beyond the used length
        {3, 2, 1, 40, 200, kDim, kDim, 60, 0, 1, true, false, Lengths::used},          // no queries in one sequence
        {4, 2, 1, 300, 280, kDim, kDim, kAll, kAll, 1, false, true, Lengths::packed},
        {4, 2, 2, 250, 433, kDim - 8, kDim, kAll, 0, 1, false, false, Lengths::packed},
        {3, 1, 1, 111, 130, kDim, kDim, 50, 20, 1, true, false, Lengths::packed},  // a sequence of no queries
        {1, 2, 1, 150, 208, kDim, kDim, kAll, 0, 1, false, true, Lengths::dense, true},
        {2, 2, 2, 100, 90, kDim - 8, kDim - 16, 60, 20, 1, true, false, Lengths::used, true},
        {3, 2, 1, 150, 170, kDim, kDim, kAll, 0, 3, false, true, Lengths::packed, true},
        {2, 3, 1, 150, 200, kDim, kDim, kAll, 0, 1, false, false, Lengths::packed, true},  // splits of one head and of two
        {1, 4, 2, 500, 600, kDim, kDim, kAll, 0, 1, false, false, Lengths::dense, false, Blocks::mask},
        {2, 2, 1, 600, 500, kDim, kDim, kAll, kAll, 1, false, true, Lengths::used, false, Blocks::lists},
        {3, 2, 1, 450, 500, kDim, kDim, 300, 0, 1, false, false, Lengths::packed, true, Blocks::lists},
        {1, 2, 1, 300, 300, kDim, kDim, kAll, 0, 1, false, false, Lengths::dense, false, Blocks::none},
        {1, 2, 1, 150, 200, kDim, kDim, kAll, 0, 5, false, true, Lengths::dense, false, Blocks::all, true},
        {3, 2, 1, 150, 200, 72, kDim, kAll, 0, 1, true, false, Lengths::packed, false, Blocks::all, true},
        {1, 3, 1, 150, 200, kDim, 264, 90, 0, 1, false, false, Lengths::dense, false, Blocks::all, true},
    };
    bool good = true;
    for (Case c : cases) {
        const bool in_order = together > 0;
        if (in_order && c.blocks == Blocks::lists) c.blocks = Blocks::mask;  // lists have no fixed order
        const BackwardInstance kind = c.kind();
        if (kWideHeads ? c.rare || c.blocks != Blocks::all : c.softcap) continue;
        if (in_order && !has_fixed_order(EmulatedKernel::config, kind)) continue;
        good &= check(c, in_order, splits_of(c, kind));
    }
    return good ? 0 : 1;
}
