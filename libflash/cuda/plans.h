// The plan of each operation: how its kernels are launched, decided from problem and device before anything runs. explain
// prints it, the workspace query reads it, and the launcher executes it. The plan of merge is in merge_plan.h. No CUDA header.
#pragma once

#include <cstdint>

#include "cuda/attention/decode_params.h"
#include "cuda/attention/prefill_params.h"
#include "cuda/config.h"
#include "problem/workspace.h"

namespace libflash::cuda {

// The launch of one kernel. With 0 thread blocks it is not launched.
struct LaunchShape {
    int64_t blocks = 0;
    int threads = 0;
    int shared_bytes = 0;  // dynamic shared memory per thread block
};

inline LaunchShape launch_shape(int64_t blocks, const KernelResources& resources) {
    return {blocks, resources.threads, resources.shared_bytes};
}

// An instance of a kernel: the number by which the kernel's launcher selects it, and the name that explain prints.
struct Instance {
    int number = 0;
    const char* name = "";
};

// The instances of the sm80 kernels.
constexpr Instance kPlainInstance{0, "plain"}, kGeneralInstance{1, "general"};

enum class ForwardStep { attention, order, head_maxima };

struct ForwardPlan {
    Instance instance;
    int tile_q = 0, tile_k = 0;
    ScheduleParams schedule{};
    bool dynamic = false;       // dynamic tile scheduler, else static
    bool vector_loads = false;  // rows of q, k and v can be read 16 bytes at a time
    bool vector_out = false;    // rows of out can be written 16 bytes at a time
    bool long_sums = false;     // sums of more than kKeysPerSum keys are kept in the workspace (attention/long_sums.h)
    LaunchShape attention;
    int64_t blocks_at_once = 0;  // not 0: attention is launched several times, with at most this many thread blocks each
    LaunchShape order;           // dynamic: the kernel that sorts the sequences
    LaunchShape head_maxima;     // sets the largest scores of the heads to -infinity
    Workspace workspace;         // "sequence_order", "long_sums"
};

// The plan of the prefill kernel (sm90/prefill.cuh), which computes the long chunks of a decode call: the sequences with
// `fewest_rows` query rows or more. The decode kernels compute the other sequences.
struct PrefillPlan {
    int tile_q = 0, tile_k = 0;
    ScheduleParams schedule{};
    int64_t fewest_rows = 0;
    Instance instance;
    bool invariant = false;        // the instance for invariant rows
    bool in_pairs = false;         // thread blocks work in pairs (sm90/block_pair.cuh)
    bool long_sums = false;        // as in ForwardPlan
    int multiprocessors = 0;       // of the device
    size_t schedule_bytes = 0;     // of a schedule of the caller, which has the order of the work tiles
    bool order_is_given = false;   // the call has a schedule: `order` copies it
    LaunchShape order, attention;  // steps of ForwardStep
    Workspace workspace;           // "sequence_order", "long_sums"
};

// The name of the prefill kernel, its launcher and its plan. Without a name there is none: the decode kernels compute all rows.
struct DecodePrefill {
    const char* name = nullptr;
    int (*launch)(const PrefillPlan&, const PrefillParams&, void* stream) = nullptr;
    PrefillPlan plan;
};

// The kernel reads saved out and LSE. A call without them runs forward first, unless the instance is kFusedTangentInstance.
struct ForwardTangentPlan {
    Instance instance;
    int tile_q = 0, tile_k = 0;
    ScheduleParams schedule{};
    bool vector_loads = false;  // rows of q, k, v and their tangents can be read 16 bytes at a time
    bool vector_rows = false;   // the same for out, dout and tdout
    bool vector_out = false;    // rows of tout can be written 16 bytes at a time
    LaunchShape attention;
};

// gradients: the kernel of tdq, tdk, tdv and tdbias (sm80), or the kernel of tdq (sm90). gradients_of_keys: the kernels of tdk
// and tdv (sm90).
enum class BackwardTangentStep { statistics, gradients, dsink, gradients_of_keys };

// A call that also requests the gradients themselves runs backward first.
struct BackwardTangentPlan {
    Instance instance = kGeneralInstance;
    int tile_q = 0, tile_k = 0;  // rows of a thread block (queries or keys), and rows of the other side that it reads at a time
    int64_t units = 0;           // workspace units of a head, kUnitRows query rows each
    ScheduleParams unit_schedule{}, query_schedule{}, key_schedule{};
    bool vector_loads = false, vector_rows = false, vector_out = false;  // as in BackwardTangentParams
    bool dynamic = false;  // dynamic tile scheduler: counters in the workspace give the next work tiles
    // In launch order. sm80: tdk and tdv; sm90: tdk_tdv, for one kernel or for two.
    LaunchShape statistics, tdq, tdk, tdv, tdk_tdv, dsink, dbias;
    Workspace workspace;  // "statistics", "first_units", "next_tiles"
};

enum class BackwardStep { statistics, dk_dv, dq_conversion, dq, dsink, dbias, dq_counters };

// The launches of the dK/dV kernel, if a key tile needs several (attention/long_sums.h). The first three fields say how much one
// launch processes; 0: everything.
struct BackwardParts {
    int64_t key_tiles = 0;  // key tiles, counted over all key heads
    int64_t heads = 0;      // query heads of each key head
    int64_t rows = 0;       // query rows of each sequence
    int64_t of_rows = 1;    // the number of ranges of query rows
    int64_t launches = 1;   // the number of launches for each key tile
};

// Key tiles of the dK/dV kernel whose query tiles several thread blocks divide, so that no multiprocessor is idle.
struct BackwardSplits {
    int64_t first = 0;     // the split key tiles are the last ones of the schedule, from this one on
    int64_t splits = 1;    // of a split key tile; 1: no key tile is split
    int64_t counters = 0;  // of all split key tiles (attention/long_sums.h)
};

struct Kernel;  // kernels.h

struct BackwardPlan {
    Instance instance;
    int tile_q = 0, tile_k = 0;        // of the dK/dV kernel
    int dq_tile_q = 0, dq_tile_k = 0;  // of the dQ kernel
    int64_t units = 0;                 // workspace units of a head, kUnitRows query rows each
    bool divides_units = false;        // several thread blocks share a unit in the first and in the last step
    ScheduleParams key_schedule{};
    ScheduleParams query_schedule{};       // by workspace unit
    ScheduleParams query_tile_schedule{};  // of the dQ kernel: by query tile
    bool vector_loads = false, vector_out = false;
    bool dq_kernel = false;    // a separate kernel computes dq, and there is no dQ accumulator
    bool dynamic = false;      // dynamic tile scheduler: a counter in the workspace gives the next work tile
    bool fixed_order = false;  // the dK/dV kernel adds to the dQ accumulator in a fixed order
    // In launch order.
    LaunchShape statistics, dq_counters, dk_dv, dq_conversion, dq, dsink, dbias;
    // If not nullptr, this kernel of another architecture launches `dbias` after all other steps.
    const Kernel* dbias_kernel = nullptr;
    int64_t key_tiles = 0;  // of all key heads
    BackwardParts parts;    // of dk_dv
    BackwardSplits split_tiles;
    // "statistics", "first_units", "dq_accumulator", "dq_counters", "next_work_tile", "gradient_sums", "split_counters",
    // "split_sums"
    Workspace workspace;

    // A work tile of dk_dv is a key tile, or a split of one.
    int64_t work_tiles() const { return key_tiles + (key_tiles - split_tiles.first) * (split_tiles.splits - 1); }
};

struct DecodePlan;

// The separate kernel for keys that sequences share, and its launcher. Without a name the decode kernel's own code computes these
// keys.
struct PrefixKernel {
    const char* name = nullptr;
    int (*launch)(const DecodePlan&, const DecodeParams&, void* stream) = nullptr;
};

enum class DecodeStep { append, attention, combine, append_codes, prefix };

struct DecodePlan {
    Instance instance;
    int tile_q = 0, tile_k = 0;  // query rows of a thread block; keys of a tile of one head
    int64_t splits = 1;          // number of splits
    int64_t split_size = 0;      // keys of each split; 0: equal parts of the visible keys
    bool invariant = false;      // splits are segments: of split_size keys, or those of attention/invariant_segments.h
    // If `invariant`: the keys of the first segments, the key from which segments are longer (0: all have one size), and the
    // version of the rule.
    int first_segment = 0, segment_growth_begin = 0, invariant_version = 0;
    int64_t segment_groups = 1;                     // if `invariant`: thread blocks that share the segments of a row
    int key_heads = 1;                              // key heads of a thread block: 1 or decode_key_heads()
    int64_t query_tiles = 1;                        // tiles of the query rows of a key head
    int64_t short_tiles = 0;                        // with long chunks: the most tiles of a sequence of the decode kernels
    int stages = 0;                                 // pipeline stages in use
    uint32_t delayed_begin = 0, delayed_count = 0;  // thread blocks that start later: the first, and how many
    bool ragged = false;                            // the instance supports sequences with different numbers of rows
    bool fused_append = false;                      // the attention kernel appends the new row
    bool stores_rotated_q = false;                  // the append kernel writes rotated queries to the workspace
    bool dependent_launch = false;                  // programmatic dependent launch
    bool in_pairs = false;                          // thread blocks work in pairs (sm90/decode_pair.cuh)
    uint32_t append_rows = 0;                       // new rows of all key heads, for the append kernel
    uint32_t append_threads_per_row = 0;            // threads per row in the append kernel
    uint32_t appended_codes = 0;                    // new rows of all key heads, for the kernel that appends codes or scales
    int64_t prefix_tiles = 0;                       // query tiles of sequences that share first keys; 0: the hint is not used
    PrefixKernel prefix_kernel;                     // the kernel of the launch `prefix`
    LaunchShape append_codes, append, prefix, attention, combine;
    DecodePrefill prefill;
    Workspace workspace;  // "rotated_q", "prefix_sums", "partial_out", "partial_lse", "prefill"
};

// Whether the attention kernel and the prefill kernel run at the same time. With the kernel for shared keys (not `ragged`) they
// do not: it must end before the attention kernel begins. The prefill kernel for invariant rows has no registers for it.
inline bool runs_beside_prefill(const DecodePlan& plan) {
    return plan.prefill.name && !plan.prefill.plan.invariant && plan.ragged && plan.attention.blocks > 0;
}

struct CompressPlan {
    LaunchShape compress;
};

struct CacheWritePlan {
    KernelType rows_type = KernelType::any_;  // of the new rows
    LaunchShape write;
};

}  // namespace libflash::cuda
