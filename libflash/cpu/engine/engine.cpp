// The CPU engine for one instruction set. CMake compiles this file once for each, with LIBFLASH_ISA defined as its name.
#include "cpu/engine/backward_tangent.h"
#include "cpu/engine/decode.h"
#include "cpu/engine/forward_tangent.h"
#include "cpu/isa.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

static Plan plan_forward(const AttentionProblem& problem) {
    switch (problem.dtype) {
        case DType::f16: return plan_forward_as<half>(problem);
        case DType::bf16: return plan_forward_as<bfloat16>(problem);
        case DType::f32: return plan_forward_as<float>(problem);
        default: return plan_forward_as<double>(problem);
    }
}

static void forward(const AttentionProblem& problem, const Plan& plan, void* workspace) {
    switch (problem.dtype) {
        case DType::f16: return forward_as<half>(problem, plan, workspace);
        case DType::bf16: return forward_as<bfloat16>(problem, plan, workspace);
        case DType::f32: return forward_as<float>(problem, plan, workspace);
        default: return forward_as<double>(problem, plan, workspace);
    }
}

static Plan plan_backward(const AttentionProblem& problem) {
    switch (problem.dtype) {
        case DType::f16: return plan_backward_as<half>(problem);
        case DType::bf16: return plan_backward_as<bfloat16>(problem);
        case DType::f32: return plan_backward_as<float>(problem);
        default: return plan_backward_as<double>(problem);
    }
}

static void backward(const AttentionProblem& problem, const Plan& plan, void* workspace) {
    switch (problem.dtype) {
        case DType::f16: return backward_as<half>(problem, plan, workspace);
        case DType::bf16: return backward_as<bfloat16>(problem, plan, workspace);
        case DType::f32: return backward_as<float>(problem, plan, workspace);
        default: return backward_as<double>(problem, plan, workspace);
    }
}

static Plan plan_decode(const DecodeProblem& problem) {
    switch (problem.dtype) {
        case DType::f16: return plan_decode_as<half>(problem);
        case DType::bf16: return plan_decode_as<bfloat16>(problem);
        case DType::f32: return plan_decode_as<float>(problem);
        default: return plan_decode_as<double>(problem);
    }
}

static void decode(const DecodeProblem& problem, const Plan& plan, void* workspace) {
    switch (problem.dtype) {
        case DType::f16: return decode_as<half>(problem, plan, workspace);
        case DType::bf16: return decode_as<bfloat16>(problem, plan, workspace);
        case DType::f32: return decode_as<float>(problem, plan, workspace);
        default: return decode_as<double>(problem, plan, workspace);
    }
}

static Plan plan_forward_tangent(const TangentProblem& problem) {
    switch (problem.dtype) {
        case DType::f16: return plan_forward_tangent_as<half>(problem);
        case DType::bf16: return plan_forward_tangent_as<bfloat16>(problem);
        case DType::f32: return plan_forward_tangent_as<float>(problem);
        default: return plan_forward_tangent_as<double>(problem);
    }
}

static void forward_tangent(const TangentProblem& problem, const Plan& plan, void* workspace) {
    switch (problem.dtype) {
        case DType::f16: return forward_tangent_as<half>(problem, plan, workspace);
        case DType::bf16: return forward_tangent_as<bfloat16>(problem, plan, workspace);
        case DType::f32: return forward_tangent_as<float>(problem, plan, workspace);
        default: return forward_tangent_as<double>(problem, plan, workspace);
    }
}

static Plan plan_backward_tangent(const TangentProblem& problem) {
    switch (problem.dtype) {
        case DType::f16: return plan_backward_tangent_as<half>(problem);
        case DType::bf16: return plan_backward_tangent_as<bfloat16>(problem);
        case DType::f32: return plan_backward_tangent_as<float>(problem);
        default: return plan_backward_tangent_as<double>(problem);
    }
}

static void backward_tangent(const TangentProblem& problem, const Plan& plan, void* workspace) {
    switch (problem.dtype) {
        case DType::f16: return backward_tangent_as<half>(problem, plan, workspace);
        case DType::bf16: return backward_tangent_as<bfloat16>(problem, plan, workspace);
        case DType::f32: return backward_tangent_as<float>(problem, plan, workspace);
        default: return backward_tangent_as<double>(problem, plan, workspace);
    }
}

}  // namespace LIBFLASH_ISA

#define FLASH_PASTE_(a, b) a##b
#define FLASH_PASTE(a, b) FLASH_PASTE_(a, b)
#define FLASH_TEXT_(a) #a
#define FLASH_TEXT(a) FLASH_TEXT_(a)
#define FLASH_KERNELS FLASH_PASTE(kernels_, LIBFLASH_ISA)
#define FLASH_USABLE FLASH_PASTE(usable_, LIBFLASH_ISA)
#define usable_generic usable_always

extern const Kernels FLASH_KERNELS;
const Kernels FLASH_KERNELS = {
    FLASH_TEXT(LIBFLASH_ISA),
    FLASH_USABLE,
    LIBFLASH_ISA::plan_forward,
    LIBFLASH_ISA::forward,
    LIBFLASH_ISA::plan_backward,
    LIBFLASH_ISA::backward,
    LIBFLASH_ISA::plan_decode,
    LIBFLASH_ISA::decode,
    LIBFLASH_ISA::plan_forward_tangent,
    LIBFLASH_ISA::forward_tangent,
    LIBFLASH_ISA::plan_backward_tangent,
    LIBFLASH_ISA::backward_tangent,
};

}  // namespace libflash::cpu
