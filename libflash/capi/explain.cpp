#include "plan/explain.h"

#include <cstring>

#include "capi/guard.h"
#include "problem/outputs.h"

using namespace libflash;

namespace {

void check_destination(const char* text, size_t capacity) {
    if (!text && capacity > 0) invalid("text", "may be NULL only if capacity is 0", "capacity ", capacity);
}

void copy_text(const std::string& whole, char* text, size_t capacity, size_t* needed) {
    if (needed) *needed = whole.size() + 1;
    if (capacity == 0) return;
    const size_t kept = whole.size() < capacity ? whole.size() : capacity - 1;
    std::memcpy(text, whole.data(), kept);
    text[kept] = '\0';
}

}  // namespace

extern "C" flash_status_t flash_attention_forward_explain(const flash_tensor_t* q, const flash_tensor_t* k,
                                                          const flash_tensor_t* v, const flash_attention_options_t* options,
                                                          char* text, size_t capacity, size_t* needed) {
    return guard([&] {
        check_destination(text, capacity);
        const OutputShapes outputs(q, k, v);
        const bool continues = options && (options->flags & FLASH_FLAG_CONTINUE);
        copy_text(
            explain(make_forward_problem(q, k, v, &outputs.out, continues ? &outputs.lse : nullptr, options, Reading::shapes)),
            text, capacity, needed);
    });
}

extern "C" flash_status_t flash_attention_backward_explain(const flash_tensor_t* q, const flash_tensor_t* k,
                                                           const flash_tensor_t* v, const flash_attention_options_t* options,
                                                           char* text, size_t capacity, size_t* needed) {
    return guard([&] {
        check_destination(text, capacity);
        OutputShapes outputs(q, k, v);
        if (options && (options->flags & FLASH_FLAG_ADD)) outputs.widen_gradients();
        copy_text(explain(make_backward_problem(&outputs.out, q, k, v, &outputs.out, &outputs.lse, &outputs.dq, &outputs.dk,
                                                &outputs.dv, options, Reading::shapes)),
                  text, capacity, needed);
    });
}

namespace {

// A copy of the caller's tangents; by default a call with tangents of q, k and v.
flash_tangents_t tangents_to_explain(const flash_tangents_t* given, const flash_tensor_t* q, const flash_tensor_t* k,
                                     const flash_tensor_t* v) {
    if (given) return read_tangents(given);
    flash_tangents_t tangents = {};
    tangents.struct_size = sizeof tangents;
    tangents.q = q, tangents.k = k, tangents.v = v;
    return tangents;
}

}  // namespace

extern "C" flash_status_t flash_attention_forward_tangent_explain(const flash_tensor_t* q, const flash_tensor_t* k,
                                                                  const flash_tensor_t* v, const flash_tangents_t* tangents,
                                                                  const flash_attention_options_t* options, char* text,
                                                                  size_t capacity, size_t* needed) {
    return guard([&] {
        check_destination(text, capacity);
        const OutputShapes outputs(q, k, v);
        flash_tangents_t t = tangents_to_explain(tangents, q, k, v);
        if (!t.out && !t.lse && !t.delta) t.out = &outputs.out;
        copy_text(explain(make_forward_tangent_problem(q, k, v, &outputs.out, &outputs.lse, &t, options, Reading::shapes)), text,
                  capacity, needed);
    });
}

extern "C" flash_status_t flash_attention_backward_tangent_explain(const flash_tensor_t* q, const flash_tensor_t* k,
                                                                   const flash_tensor_t* v, const flash_tangents_t* tangents,
                                                                   const flash_attention_options_t* options, char* text,
                                                                   size_t capacity, size_t* needed) {
    return guard([&] {
        check_destination(text, capacity);
        const OutputShapes outputs(q, k, v);
        flash_tangents_t t = tangents_to_explain(tangents, q, k, v);
        if (!t.out && !t.delta) t.out = &outputs.out;
        if (!t.lse) t.lse = &outputs.lse;
        if (!t.dq) t.dq = &outputs.dq;
        if (!t.dk) t.dk = &outputs.dk;
        if (!t.dv) t.dv = &outputs.dv;
        copy_text(explain(make_backward_tangent_problem(&outputs.out, q, k, v, &outputs.out, &outputs.lse, nullptr, nullptr,
                                                        nullptr, &t, options, Reading::shapes)),
                  text, capacity, needed);
    });
}

extern "C" flash_status_t flash_attention_decode_explain(const flash_tensor_t* q, const flash_tensor_t* k_cache,
                                                         const flash_tensor_t* v_cache, const flash_decode_options_t* options,
                                                         char* text, size_t capacity, size_t* needed) {
    return guard([&] {
        check_destination(text, capacity);
        const OutputShapes outputs(q, k_cache, v_cache, "k_cache", "v_cache");
        copy_text(explain(make_decode_problem(q, k_cache, v_cache, &outputs.out, nullptr, options, Reading::shapes)), text,
                  capacity, needed);
    });
}
