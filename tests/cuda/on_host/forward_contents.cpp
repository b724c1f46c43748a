// As backward_contents.cpp, for forward. Arguments: 1 is 0, or the seed of a random order. Exit code 0 means nothing is wrong.
#include "emulation.h"

#include <cstdlib>
#include <cstring>
#include <random>
#include <type_traits>

#include "contents.h"
#include "cuda/attention/element.cuh"
#include "cuda/host/tile_schedule.h"
#include KERNEL_HEADER

using namespace libflash;
using namespace libflash::cuda;

struct EmulatedKernel {
    static constexpr KernelConfig config{"forward", Operation::forward, ARCHITECTURE, KernelType::DTYPE,
                                         HEAD_DIM,  HEAD_DIM,           FORWARD_TILE, ""};
};
constexpr bool kDouble = EmulatedKernel::config.dtype == KernelType::f64_,
               kFloat = EmulatedKernel::config.dtype == KernelType::f32_;
using T = std::conditional_t<kDouble, double, ElementOf<EmulatedKernel::config.dtype>>;
using Real = std::conditional_t<kDouble, double, float>;
constexpr double kLimit = kDouble                                            ? 1e-12
                          : kFloat                                           ? 0x1p-18
                          : EmulatedKernel::config.dtype == KernelType::f16_ ? 0x1p-10
                                                                             : 0x1p-7;
constexpr int kHeads = 2, kKeyHeads = 1, kDim = HEAD_DIM;
constexpr int64_t kThreadBlocks = 3;  // that run at the same time, with a dynamic schedule

std::mt19937 generator(7);

struct Tensors {
    std::vector<T> q, k, v, out;
    std::vector<Real> lse;
    int rows, keys;

    Tensors(int row_count, int key_count) : rows(row_count), keys(key_count) {
        q = random<T>(size_t(rows) * kHeads * kDim, 1, generator);
        for (auto* x : {&k, &v}) *x = random<T>(size_t(keys) * kKeyHeads * kDim, 1, generator);
        forget();
    }
    void forget() { out.assign(q.size(), T(NAN)), lse.assign(size_t(rows) * kHeads, Real(NAN)); }
    // One row after another, as out.
    std::vector<Real> lse_of_rows() const {
        std::vector<Real> x;
        for (int row = 0; row < rows; ++row)
            for (int head = 0; head < kHeads; ++head) x.push_back(lse[size_t(head) * rows + row]);
        return x;
    }
};

// Returns whether the memory after the workspace is unchanged.
bool run(Tensors& x, const Sides& sides) {
    ForwardParams params{};
    const auto rows_of = [](std::vector<T>& all, int heads, int first) {
        return RowsParams{all.data() + int64_t{first} * heads * kDim, 0, int64_t{heads} * kDim, kDim};
    };
    params.q = rows_of(x.q, kHeads, sides.first_row), params.out = rows_of(x.out, kHeads, sides.first_row);
    params.k = rows_of(x.k, kKeyHeads, sides.first_key), params.v = rows_of(x.v, kKeyHeads, sides.first_key);
    params.lse = {reinterpret_cast<float*>(x.lse.data() + sides.first_row), 0, 1, x.rows};
    params.q_lengths = lengths_of(sides.queries), params.k_lengths = lengths_of(sides.keys);
    params.batch = sides.batch, params.heads_q = kHeads, params.group_size = kHeads / kKeyHeads;
    params.shard.heads_total = kHeads;
    params.head_dim = params.head_dim_v = kDim;
    const double scale = 1 / std::sqrt(double{kDim});
    params.softmax_scale = static_cast<float>(scale), params.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
    params.in_double = {scale, 0, 1};
    params.mask = {kUnboundedWindow, kUnboundedWindow, false};
    params.rare.dropout.keep_factor = 1;
    params.vector_loads = params.vector_out = true;
    ForwardPlan plan;
#ifdef OF_SM90
    const ForwardInstance kind = forward_instance(EmulatedKernel::config, false, true, false);
    plan.instance.number = static_cast<int>(kind);
    const int tile = forward_tile_q(EmulatedKernel::config, kind);
#else
    plan.instance = kDouble ? kGeneralInstance : kPlainInstance;
    const int tile = EmulatedKernel::config.tile_q;
#endif
    params.schedule = schedule_params(sides.queries, sides.batch, kHeads, tile, 1e3, true);
    const int64_t units = blocks_of(params.schedule);
    plan.attention = launch_shape(units, resources_of_forward<EmulatedKernel>(int(ForwardStep::attention), plan.instance.number));
#ifdef OF_SM90
    GuardedMemory<int32_t> order(sequence_order_bytes(units) / sizeof(int32_t), 0x7ead7ead);
    params.sequence_order = order.x.data();
    plan.attention.blocks = std::min(units, kThreadBlocks);
    plan.order = launch_shape(1, resources_of_forward<EmulatedKernel>(int(ForwardStep::order), plan.instance.number));
#else
    GuardedMemory<int32_t> order(0, 0);
#endif
    if (units > 0) launch_forward<EmulatedKernel>(plan, params, nullptr);
    return order.is_kept();
}

bool check(const Contents& contents) {
    const Entries &queries = contents.queries, &keys = contents.keys;
    Tensors x(queries.rows, keys.rows);
    Tensors alone = x;
    const bool kept =
        run_alone_and_together(contents, true, [&](const Sides& sides) { return run(x, sides); }, [&] { alone = x, x.forget(); });
    return kept & same_rows("out", contents, queries, x.out, alone.out, kLimit, true) &
           same_rows("lse", contents, queries, x.lse_of_rows(), alone.lse_of_rows(), kLimit, true);
}

int main(int, char** argv) {
    late_copies = true;
    emulation::set_random_order(std::atoi(argv[1]));
    bool good = true;
    for (const Contents& contents : all_contents()) good &= check(contents);
    return good ? 0 : 1;
}
