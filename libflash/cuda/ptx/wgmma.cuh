// Matrix products of a warpgroup on sm_90a (wgmma): d (64 x kN, in registers) += a b, 16 columns of `a` at a time. `b` is in
// shared memory, `a` in shared memory or registers. Descriptors (tile/swizzled_tile.cuh) describe operands in shared memory. All
// four warps of a warpgroup execute a product together.
//
// Registers, for warp w of the warpgroup and lane = 4 * g + t:
//   d[i]:  row 16 w + g + 8 * (i / 2 % 2), column 8 * (i / 4) + 2 t + i % 2
//   a[..]: as in mma_sync.cuh, for rows 16 w to 16 w + 15, so sixteen neighbouring columns of d, converted pairwise, form a
//   fragment of `a`.
//
// The products are asynchronous. wgmma_fence() is needed before the first product that uses registers which other instructions
// have written. wgmma_commit() closes a group. `d` and `a` may be accessed again after wgmma_wait(); wgmma_fence_operand() keeps
// the compiler from moving reads of `d` before the wait.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace libflash::cuda {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most the `kPending` youngest groups are incomplete.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Called after the wait, so that the compiler does not move a read of `d` before the wait.
template <int kCount>
__device__ __forceinline__ void wgmma_fence_operand(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// multiply_shared: `a` is in shared memory, stored row by row, or column by column with kTransposedA. multiply: `a` is in
// registers. Both: `b` is b[n][k] with contiguous k, or with kTransposedB b[k][n] with contiguous n. Without `accumulate`: d = a
// b.
template <class T, int kN>
struct Wgmma;

// Operand lists, eight operands at a time.
#define LIBFLASH_P0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LIBFLASH_P8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define LIBFLASH_P16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define LIBFLASH_P24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define LIBFLASH_P32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define LIBFLASH_P40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define LIBFLASH_P48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define LIBFLASH_P56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define LIBFLASH_P64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define LIBFLASH_P72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define LIBFLASH_P80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define LIBFLASH_P88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define LIBFLASH_P96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define LIBFLASH_P104 "%104, %105, %106, %107, %108, %109, %110, %111"
#define LIBFLASH_P112 "%112, %113, %114, %115, %116, %117, %118, %119"
#define LIBFLASH_P120 "%120, %121, %122, %123, %124, %125, %126, %127"
#define LIBFLASH_D8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define LIBFLASH_OPERANDS_16 LIBFLASH_P0 ", " LIBFLASH_P8
#define LIBFLASH_VALUES_16(d) LIBFLASH_D8(d, 0), LIBFLASH_D8(d, 8)
#define LIBFLASH_OPERANDS_24 LIBFLASH_OPERANDS_16 ", " LIBFLASH_P16
#define LIBFLASH_VALUES_24(d) LIBFLASH_VALUES_16(d), LIBFLASH_D8(d, 16)
#define LIBFLASH_OPERANDS_32 LIBFLASH_OPERANDS_24 ", " LIBFLASH_P24
#define LIBFLASH_VALUES_32(d) LIBFLASH_VALUES_24(d), LIBFLASH_D8(d, 24)
#define LIBFLASH_OPERANDS_40 LIBFLASH_OPERANDS_32 ", " LIBFLASH_P32
#define LIBFLASH_VALUES_40(d) LIBFLASH_VALUES_32(d), LIBFLASH_D8(d, 32)
#define LIBFLASH_OPERANDS_48 LIBFLASH_OPERANDS_40 ", " LIBFLASH_P40
#define LIBFLASH_VALUES_48(d) LIBFLASH_VALUES_40(d), LIBFLASH_D8(d, 40)
#define LIBFLASH_OPERANDS_56 LIBFLASH_OPERANDS_48 ", " LIBFLASH_P48
#define LIBFLASH_VALUES_56(d) LIBFLASH_VALUES_48(d), LIBFLASH_D8(d, 48)
#define LIBFLASH_OPERANDS_64 LIBFLASH_OPERANDS_56 ", " LIBFLASH_P56
#define LIBFLASH_VALUES_64(d) LIBFLASH_VALUES_56(d), LIBFLASH_D8(d, 56)
#define LIBFLASH_OPERANDS_88 LIBFLASH_OPERANDS_64 ", " LIBFLASH_P64 ", " LIBFLASH_P72 ", " LIBFLASH_P80
#define LIBFLASH_VALUES_88(d) LIBFLASH_VALUES_64(d), LIBFLASH_D8(d, 64), LIBFLASH_D8(d, 72), LIBFLASH_D8(d, 80)
#define LIBFLASH_OPERANDS_96 LIBFLASH_OPERANDS_88 ", " LIBFLASH_P88
#define LIBFLASH_VALUES_96(d) LIBFLASH_VALUES_88(d), LIBFLASH_D8(d, 88)
#define LIBFLASH_OPERANDS_128 LIBFLASH_OPERANDS_96 ", " LIBFLASH_P96 ", " LIBFLASH_P104 ", " LIBFLASH_P112 ", " LIBFLASH_P120
#define LIBFLASH_VALUES_128(d) \
    LIBFLASH_VALUES_96(d), LIBFLASH_D8(d, 96), LIBFLASH_D8(d, 104), LIBFLASH_D8(d, 112), LIBFLASH_D8(d, 120)

// P0 to P6 are the numbers of the operands after the COUNT registers of d.
#define LIBFLASH_WGMMA(TYPE, NAME, N, COUNT, P0, P1, P2, P3, P4, P5, P6)                                                     \
    template <>                                                                                                              \
    struct Wgmma<TYPE, N> {                                                                                                  \
        template <bool kTransposedB, bool kTransposedA = false>                                                              \
        __device__ static __forceinline__ void multiply_shared(float (&d)[COUNT], uint64_t a, uint64_t b, bool accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2                                                            \
                         ", 0;\n"                                                                                            \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" LIBFLASH_OPERANDS_##COUNT      \
                         "}, %" #P0 ", %" #P1 ", p, 1, 1, %" #P4 ", %" #P3 ";\n}"                                            \
                         : LIBFLASH_VALUES_##COUNT(d)                                                                        \
                         : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposedB ? 1 : 0),                     \
                           "n"(kTransposedA ? 1 : 0));                                                                       \
        }                                                                                                                    \
        template <bool kTransposedB>                                                                                         \
        __device__ static __forceinline__ void multiply(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b,               \
                                                        bool accumulate) {                                                   \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5                                                            \
                         ", 0;\n"                                                                                            \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" LIBFLASH_OPERANDS_##COUNT      \
                         "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, %" #P6 ";\n}"                      \
                         : LIBFLASH_VALUES_##COUNT(d)                                                                        \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),            \
                           "n"(kTransposedB ? 1 : 0));                                                                       \
        }                                                                                                                    \
    };
#define LIBFLASH_WGMMA_TYPES(...)                      \
    LIBFLASH_WGMMA(__nv_bfloat16, "bf16", __VA_ARGS__) \
    LIBFLASH_WGMMA(__half, "f16", __VA_ARGS__)
LIBFLASH_WGMMA_TYPES(32, 16, 16, 17, 18, 19, 20, 21, 22)
LIBFLASH_WGMMA_TYPES(48, 24, 24, 25, 26, 27, 28, 29, 30)
LIBFLASH_WGMMA_TYPES(64, 32, 32, 33, 34, 35, 36, 37, 38)
LIBFLASH_WGMMA_TYPES(80, 40, 40, 41, 42, 43, 44, 45, 46)
LIBFLASH_WGMMA_TYPES(96, 48, 48, 49, 50, 51, 52, 53, 54)
LIBFLASH_WGMMA_TYPES(112, 56, 56, 57, 58, 59, 60, 61, 62)
LIBFLASH_WGMMA_TYPES(128, 64, 64, 65, 66, 67, 68, 69, 70)
LIBFLASH_WGMMA_TYPES(176, 88, 88, 89, 90, 91, 92, 93, 94)
LIBFLASH_WGMMA_TYPES(192, 96, 96, 97, 98, 99, 100, 101, 102)
LIBFLASH_WGMMA_TYPES(256, 128, 128, 129, 130, 131, 132, 133, 134)
#undef LIBFLASH_WGMMA_TYPES
#undef LIBFLASH_WGMMA

}  // namespace libflash::cuda
