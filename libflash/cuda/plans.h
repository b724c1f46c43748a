// How a kernel will be launched: one plan for each operation, made from the problem and the device before anything runs. explain
// prints it, the workspace query reads it, and the launcher does what it says. No CUDA header.
#pragma once

#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/config.h"
#include "problem/workspace.h"

namespace libflash::cuda {

// The grid of one kernel. Without thread blocks there is no launch.
struct LaunchShape {
    int64_t blocks = 0;
    int threads = 0;
    int shared_bytes = 0;  // dynamic shared memory of a thread block
};

inline LaunchShape launch_shape(int64_t blocks, const KernelResources& resources) {
    return {blocks, resources.threads, resources.shared_bytes};
}

// The template instance of a kernel: the architecture's own number for it, and its name.
struct Instance {
    int number = 0;
    const char* name = "";
};

// Instances of the sm80 kernels, and of every backward kernel.
constexpr Instance kPlainInstance{0, "plain"}, kGeneralInstance{1, "general"};

enum class ForwardStep { attention, order };

struct ForwardPlan {
    Instance instance;
    int tile_q = 0, tile_k = 0;
    ScheduleParams schedule{};
    bool dynamic = false;       // thread blocks take tiles as they become free; else the schedule is static
    bool vector_loads = false;  // rows of q, k and v may be read 16 bytes at a time
    bool vector_out = false;    // rows of out may be written so
    LaunchShape attention;
    LaunchShape order;    // dynamic: the kernel that puts the tiles in order
    Workspace workspace;  // "sequence_order"
};

enum class BackwardStep { statistics, key_gradients, dq_conversion, query_gradient, sink_gradient, bias_gradient };

struct BackwardPlan {
    Instance instance;
    int tile_q = 0, tile_k = 0;        // of the kernel that computes dk and dv
    int dq_tile_q = 0, dq_tile_k = 0;  // deterministic: of the kernel that computes dq
    int64_t units = 0;                 // kUnitRows query rows each, in the workspace of a head
    ScheduleParams key_schedule{};
    ScheduleParams query_schedule{};       // by unit of query rows
    ScheduleParams query_tile_schedule{};  // deterministic: by tile of query rows
    bool vector_loads = false, vector_out = false;
    bool deterministic = false;
    // In the order of their launch. dq is either converted from the dQ accumulator or, deterministic, computed by a kernel of its
    // own.
    LaunchShape statistics, key_gradients, dq_conversion, query_gradient, sink_gradient, bias_gradient;
    Workspace workspace;  // "statistics", "dq_accumulator"
};

enum class DecodeStep { append, attention, combine };

struct DecodePlan {
    Instance instance;
    int tile_q = 0, tile_k = 0;               // query rows of a thread block; keys of one head
    int64_t splits = 1;                       // ranges of keys
    int key_heads = 1;                        // that a thread block takes
    int64_t query_tiles = 1;                  // of the query rows that share a key head
    int stages = 0;                           // tiles of keys under way
    uint32_t late_begin = 0, late_count = 0;  // thread blocks that begin a little later: the first, and how many
    bool appends_inside = false;              // the attention kernel itself takes in the new row
    bool rotates_ahead = false;               // the append kernel writes rotated queries to the workspace
    bool dependent_launch = false;            // programmatic dependent launch
    uint32_t append_rows = 0;                 // new rows of all key heads, for the append kernel
    uint32_t append_slots = 0;                // threads a row takes there
    LaunchShape append, attention, combine;
    Workspace workspace;  // "rotated_q", "partial_out", "partial_lse"
};

struct MergePlan {
    int vector = 1;      // neighbouring channels that a thread moves at once
    bool mixed = false;  // parts of different types
    int group = 1;       // threads that share a row
    LaunchShape merge;
};

struct CompressPlan {
    LaunchShape compress;
};

}  // namespace libflash::cuda
