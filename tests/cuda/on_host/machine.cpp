// What the headers of the emulation declare and need not inline. It is compiled once for all programs: small programs would spend
// much of their time on it.
#include <deque>

#include "machine.h"

#include "cuda/ptx/copy_barrier.cuh"

namespace emulation {

alignas(1024) char shared_memory[kMostResident][235 << 10];
char* dynamic_shared = shared_memory[0];
Machine machine;

void report_deadlock() {
    std::printf("WRONG: thread %u of block %u waits for ever\n", machine.thread, machine.block_index);
    std::fflush(stdout);
    std::_Exit(3);
}

void run_fiber() {
    while (true) {
        machine.kernel();
        if (machine.at_end) machine.at_end();
        machine.block->fibers[machine.thread].done = true;
        --machine.block->running;
        yield();  // until another thread begins on this stack
    }
}

void begin(Position& present, Stack& stack) {
    stack.begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack.bytes;
    context.uc_stack.ss_size = kStackBytes;
    makecontext(&context, run_fiber, 0);
    start(present, context);
}

void start_block(Block& block, unsigned index) {
    block.index = index;
    block.running = machine.threads;
    block.all = block.cluster = {};
    for (Barrier& barrier : block.warps) barrier = {};
    for (Barrier& barrier : block.named) barrier = {};
    for (Idle& idle : block.idle) idle = {};
    for (Fiber& fiber : block.fibers) fiber.done = false, fiber.watched = nullptr;
    block.slowness.assign((machine.threads + 31) / 32, 1);
}

void set_random_order(int number) {
    machine.random_order = number != 0;
    machine.dice.seed(number);
}
unsigned roll(unsigned sides) { return machine.dice() % sides; }

void delay_at_random() {
    if (!machine.random_order || roll(32) != 0) return;
    for (unsigned rounds = roll(100); rounds > 0; --rounds) yield();
}

void do_later(std::function<void()> what) {
    if (!machine.random_order) return what();
    machine.later.push_back([what = std::move(what), block = machine.block] {
        go_to(block);
        what();
    });
}

// What the threads of the running block from `begin` to `end`, of which none can run, wait for.
Idle idle_threads(unsigned begin, unsigned end) {
    static const uint32_t never = 0;
    Idle idle;
    for (unsigned thread = begin; thread < end; ++thread) {
        const Fiber& fiber = machine.block->fibers[thread];
        if (fiber.done) continue;
        if (idle.watched && (fiber.watched != idle.watched || fiber.seen != idle.seen)) return {};
        idle.watched = fiber.watched, idle.seen = fiber.seen, idle.polls += fiber.counted;
    }
    if (!idle.watched) idle.watched = &never;  // all have ended
    return idle;
}

void run_warp(unsigned warp) {
    Idle& idle = machine.block->idle[warp];
    if (idle.watched && word_at(idle.watched) == idle.seen) return count_polls(idle.polls);
    machine.end_of_warp = min(warp * 32 + 32, machine.threads);
    idle = {};
    if (!go_on_from(warp * 32, machine.scheduler)) idle = idle_threads(warp * 32, machine.end_of_warp);
}

void run_round(Block& block, unsigned round) {
    go_to(&block);
    for (unsigned warp = 0; warp < block.slowness.size(); ++warp) {
        if (machine.random_order && round % 256 == 0) block.slowness[warp] = 1 + roll(3) * roll(40);
        if (block.slowness[warp] == 1 || roll(block.slowness[warp]) == 0) run_warp(warp);
    }
}

void complete_some() {
    for (size_t i = machine.later.size(); i-- > 0;) {
        if (roll(20) != 0) continue;
        const std::function<void()> what = std::move(machine.later[i]);
        machine.later.erase(machine.later.begin() + i);
        what();
    }
}

// The order in which clusters begin.
std::vector<unsigned> order_of_clusters() {
    std::vector<unsigned> order(machine.blocks / machine.cluster);
    const unsigned all = static_cast<unsigned>(order.size());
    for (unsigned c = 0; c < all; ++c) order[c] = c;
    for (unsigned c = all; c > 1 && machine.resident.size() > machine.cluster; --c) std::swap(order[c - 1], order[roll(c)]);
    return order;
}

// Begins the next cluster in the resident places from `place` on, if they are free. Returns whether any of them is in use then.
bool fill_places(size_t place, const std::vector<unsigned>& order, size_t& begun) {
    const auto first = machine.resident.begin() + place, last = first + machine.cluster;
    if (std::any_of(first, last, [](const Block& block) { return block.running > 0; })) return true;
    if (begun == order.size()) return false;
    for (unsigned rank = 0; rank < machine.cluster; ++rank) start_block(first[rank], order[begun] * machine.cluster + rank);
    ++begun;
    return true;
}

// The stack of a fiber. All launches use the same stacks: allocating them takes longer than many kernels run.
Stack* stack(size_t number) {
    static std::vector<std::unique_ptr<Stack>> stacks;
    while (stacks.size() <= number) stacks.emplace_back(new Stack);
    return stacks[number].get();
}

void launch(unsigned blocks, unsigned threads, std::function<void()> kernel, unsigned resident, unsigned cluster) {
    machine.kernel = std::move(kernel);
    machine.threads = threads;
    machine.blocks = blocks;
    machine.cluster = cluster;
    machine.resident.resize(max(min(max(blocks, 1u), resident) / cluster, 1u) * cluster);
    for (size_t i = 0; i < machine.resident.size(); ++i) {
        machine.resident[i].shared = shared_memory[i];
        machine.resident[i].fibers.assign(threads, {});
        for (unsigned thread = 0; thread < threads; ++thread)
            machine.resident[i].fibers[thread].stack = stack(i * threads + thread);
    }
    const std::vector<unsigned> order = order_of_clusters();
    size_t begun = 0;
    for (unsigned round = 0;; ++round) {
        bool any = false;
        for (size_t place = 0; place < machine.resident.size(); ++place) {
            if (place % cluster == 0) any |= fill_places(place, order, begun);
            if (machine.resident[place].running > 0) run_round(machine.resident[place], round);
        }
        if (!any) break;
        complete_some();
    }
    while (!machine.later.empty()) {  // a kernel ends when its asynchronous operations are complete
        const std::function<void()> what = std::move(machine.later.back());
        machine.later.pop_back();
        what();
    }
}

}  // namespace emulation

namespace libflash::cuda {

// Copies.

bool late_copies = false;

namespace {

// The groups of each thread; the last group is not committed yet.
std::deque<std::vector<AsyncCopy>> copies_under_way[emulation::kMaxWarps * 32];
std::deque<std::vector<AsyncCopy>>& own_copies() {
    auto& groups = copies_under_way[threadIdx.x];
    if (groups.empty()) groups.emplace_back();
    return groups;
}

const bool checks_end = [] {
    emulation::machine.at_end = [] {
        for (const auto& group : copies_under_way[threadIdx.x]) {
            if (group.empty()) continue;
            std::printf("WRONG: thread %u of block %u ends with %zu copies under way\n", threadIdx.x + 0, blockIdx.x + 0,
                        group.size());
            std::fflush(stdout);
            std::_Exit(3);
        }
        copies_under_way[threadIdx.x].clear();
    };
    return true;
}();

}  // namespace

void begin_late_copy(const AsyncCopy& copy) { own_copies().back().push_back(copy); }
void commit_late_copies() { own_copies().emplace_back(); }
void complete_late_copies(size_t pending) {
    for (auto& groups = own_copies(); groups.size() > pending + 1; groups.pop_front())
        for (const AsyncCopy& copy : groups.front()) copy.done();
}

void arrive_after_copies(const MBarrier& barrier) {
    std::vector<AsyncCopy> copies;
    for (const auto& group : own_copies()) copies.insert(copies.end(), group.begin(), group.end());
    own_copies().clear();
    emulation::do_later([copies, barrier] {
        for (const AsyncCopy& copy : copies) copy.done();
        barrier.count_arrival();
    });
}

namespace {

void copy_box(uint32_t address, const MapWords& words, const MBarrier& barrier, const int (&at)[4]) {
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

}  // namespace

void tma_load(uint32_t address, const CUtensorMap& map, const MBarrier& barrier, int c0, int c1, int c2, int c3) {
    MapWords words;
    std::memcpy(&words, &map, sizeof words);
    emulation::do_later([=] { copy_box(address, words, barrier, {c0, c1, c2, c3}); });
}

void tma_load_to(uint32_t ranks, uint32_t address, const CUtensorMap& map, const MBarrier& barrier, int c0, int c1, int c2,
                 int c3) {
    for (unsigned rank = 0; rank < emulation::machine.cluster; ++rank)
        if (ranks >> rank & 1) emulation::in_block_of_cluster(rank, [&] { tma_load(address, map, barrier, c0, c1, c2, c3); });
}

void tma_load_bytes(uint32_t address, const void* global, int bytes, const MBarrier& barrier) {
    emulation::do_later([=] {
        std::memcpy(shared_pointer(address), global, bytes);
        barrier.have_come(bytes);
    });
}

void tma_store(uint32_t address, const CUtensorMap& map, int c0, int c1, int c2, int c3) {
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

namespace {

// How many additions of a group have not read shared memory yet, and how many are not complete.
struct BulkGroup {
    int unread = 0, incomplete = 0;
};
struct BulkGroups {
    std::shared_ptr<BulkGroup> open = std::make_shared<BulkGroup>();
    std::deque<std::shared_ptr<BulkGroup>> committed;
};
BulkGroups& groups_of_thread() {
    static BulkGroups of_threads[emulation::kMostResident * emulation::kMaxWarps * 32];
    return of_threads[emulation::resident_thread()];
}

}  // namespace

void tma_add_floats(float* global, uint32_t address, int bytes) {
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
void tma_store_commit() {
    BulkGroups& groups = groups_of_thread();
    groups.committed.push_back(std::exchange(groups.open, std::make_shared<BulkGroup>()));
    while (groups.committed.front()->incomplete == 0 && groups.committed.size() > 1) groups.committed.pop_front();
}

namespace {

// Waits until `left` is 0 for all groups but the last `pending`.
void wait_for_groups(int BulkGroup::* left, int pending) {
    const auto& committed = groups_of_thread().committed;
    for (int i = 0; i < int(committed.size()) - pending; ++i)
        while ((*committed[i]).*left > 0) emulation::poll();
}

}  // namespace

void wait_for_reads(int pending) { wait_for_groups(&BulkGroup::unread, pending); }
void wait_for_additions(int pending) { wait_for_groups(&BulkGroup::incomplete, pending); }

// Products.

namespace {

// As many doubles as a register of this processor holds. The compiler's own vectors: it does not keep sums in registers when it
// makes vectors of loops.
#ifdef __AVX512F__
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
using Doubles = double __attribute__((vector_size(8 * kLanes)));
using FewFloats = float __attribute__((vector_size(4 * kLanes)));

Doubles load_doubles(const float* from) {
    FewFloats x;
    std::memcpy(&x, from, sizeof x);
    return __builtin_convertvector(x, Doubles);
}
// a * b + c of numbers with up to 24 bits: the product is exact, so it does not matter whether it is rounded.
Doubles multiply_add(double a, Doubles b, Doubles c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_pd(_mm512_set1_pd(a), b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_pd(_mm256_set1_pd(a), b, c);
#else
    return a * b + c;
#endif
}

// Four rows and kVectors times kLanes columns.
template <int kVectors>
void add_block(float* sums, int stride, const double (*a)[16], const float* b, int stride_b) {
    Doubles sum[4][kVectors];
    for (int row = 0; row < 4; ++row)
        for (int n = 0; n < kVectors; ++n) sum[row][n] = load_doubles(sums + row * stride + n * kLanes);
    for (int k = 0; k < 16; ++k)
        for (int n = 0; n < kVectors; ++n) {
            const Doubles of_k = load_doubles(b + k * stride_b + n * kLanes);
            for (int row = 0; row < 4; ++row) sum[row][n] = multiply_add(a[row][k], of_k, sum[row][n]);
        }
    for (int row = 0; row < 4; ++row)
        for (int n = 0; n < kVectors; ++n) {
            const FewFloats rounded = __builtin_convertvector(sum[row][n], FewFloats);
            std::memcpy(sums + row * stride + n * kLanes, &rounded, sizeof rounded);
        }
}

}  // namespace

void add_product(float* sums, int stride, const double (&a)[16][16], const float* b, int stride_b, int columns) {
    for (int row = 0; row < 16; row += 4) {
        int col = 0;
        for (; col + 2 * kLanes <= columns; col += 2 * kLanes)
            add_block<2>(sums + row * stride + col, stride, &a[row], b + col, stride_b);
        if (col < columns) add_block<1>(sums + row * stride + col, stride, &a[row], b + col, stride_b);
    }
}

namespace {

// For each thread the groups of products that were issued and not yet waited for; the last group is open.
using Products = std::vector<std::function<void()>>;
std::vector<Products>& issued_products() {
    static std::vector<Products> of_threads[emulation::kMostResident * emulation::kMaxWarps * 32];
    std::vector<Products>& groups = of_threads[emulation::resident_thread()];
    if (groups.empty()) groups.emplace_back();
    return groups;
}

}  // namespace

void issue(std::function<void()> product) {
    if (!emulation::machine.random_order) return product();
    issued_products().back().push_back(std::move(product));
}

void wgmma_commit() { issued_products().emplace_back(); }
void complete_products(size_t pending) {
    std::vector<Products>& groups = issued_products();
    while (groups.size() > pending + 1) {
        for (const auto& product : groups.front()) product();
        groups.erase(groups.begin());
    }
}

}  // namespace libflash::cuda
