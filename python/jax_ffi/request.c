#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "request.h"

#include <fenv.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIELD(type, field) {offsetof(type, field), sizeof(((type *)0)->field)}
#define NO_FIELD {0, 0}
#define ATTENTION(field) FIELD(flash_attention_options_t, field)
#define DECODE_FIELD(field) FIELD(flash_decode_options_t, field)
#define OF_REQUEST(field, kind) {#field, kind, FIELD(attributes_t, field), NO_FIELD, NO_FIELD}
#define OF_ATTENTION(field, kind) {#field, kind, FIELD(attributes_t, field), ATTENTION(field), NO_FIELD}
#define OF_DECODE(field, kind) {#field, kind, FIELD(attributes_t, field), NO_FIELD, DECODE_FIELD(field)}
#define OF_BOTH(field, kind) {#field, kind, FIELD(attributes_t, field), ATTENTION(field), DECODE_FIELD(field)}

const attribute_t attribute_table[] = {
    OF_REQUEST(operands, INTEGER),
    OF_REQUEST(layout, INTEGER),
    OF_BOTH(flags, INTEGER),
    OF_BOTH(window_left, INTEGER),
    OF_BOTH(window_right, INTEGER),
    OF_ATTENTION(max_seqlen_q, INTEGER),
    OF_ATTENTION(max_seqlen_k, INTEGER),
    OF_BOTH(num_splits, INTEGER),
    OF_DECODE(split_size, INTEGER),
    OF_BOTH(num_threads, INTEGER),
    OF_ATTENTION(seed, INTEGER),
    OF_ATTENTION(offset, INTEGER),
    OF_BOTH(softmax_scale, REAL),
    OF_BOTH(softcap, REAL),
    OF_ATTENTION(dropout_p, REAL),
    OF_BOTH(backend, TEXT),
    OF_BOTH(kernel, TEXT),
    {NULL, INTEGER, NO_FIELD, NO_FIELD, NO_FIELD},
};

const attribute_t *find_attribute(const char *name, size_t length) {
    for (const attribute_t *attribute = attribute_table; attribute->name; attribute++)
        if (strlen(attribute->name) == length && memcmp(attribute->name, name, length) == 0) return attribute;
    return NULL;
}

/* Copies the attributes to the fields of an option struct. */
static void fill_options(const request_t *request, void *options) {
    for (const attribute_t *attribute = attribute_table; attribute->name; attribute++) {
        const field_t *field = request->operation == DECODE ? &attribute->decode : &attribute->attention;
        const char *value = (const char *)&request->attributes + attribute->own.offset;
        char *target = (char *)options + field->offset;
        int64_t integer;
        memcpy(&integer, value, sizeof integer);
        int32_t low = (int32_t)integer;
        const char *text = value[0] ? value : NULL;
        if (field->size == 0) continue;
        if (attribute->kind == TEXT)
            memcpy(target, &text, sizeof text);
        else if (attribute->kind == INTEGER && field->size == sizeof low)
            memcpy(target, &low, sizeof low);
        else
            memcpy(target, value, 8);
    }
}

flash_status_t refuse(request_t *request, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(request->text, sizeof request->text, format, values);
    va_end(values);
    return FLASH_STATUS_INVALID;
}

const char *request_error(const request_t *request) { return request->text[0] ? request->text : flash_last_error(); }

/* The arguments of the library's function: tensors with axes in the library's order, and options. */
typedef struct call_t {
    flash_tensor_t views[9]; /* the tensors whose axes were reordered */
    int view_count;
    flash_tensor_t rng_state;
    const flash_tensor_t *in[6], *out[5];
    flash_attention_options_t attention;
    flash_decode_options_t decode;
} call_t;

/* The fields of the option structs for the optional operands, in the order of the bits. */
static const size_t attention_fields[ATTENTION_OPERANDS] = {
    offsetof(flash_attention_options_t, cu_seqlens_q), offsetof(flash_attention_options_t, cu_seqlens_k),
    offsetof(flash_attention_options_t, seqused_q),    offsetof(flash_attention_options_t, seqused_k),
    offsetof(flash_attention_options_t, alibi_slopes), offsetof(flash_attention_options_t, bias),
    offsetof(flash_attention_options_t, mask),         offsetof(flash_attention_options_t, learnable_sink),
    offsetof(flash_attention_options_t, block_mask),   offsetof(flash_attention_options_t, dlse),
};
static const size_t decode_fields[DECODE_OPERANDS] = {
    offsetof(flash_decode_options_t, cache_seqlens),   offsetof(flash_decode_options_t, block_table),
    offsetof(flash_decode_options_t, cache_batch_idx), offsetof(flash_decode_options_t, cache_leftpad),
    offsetof(flash_decode_options_t, k_new),           offsetof(flash_decode_options_t, v_new),
    offsetof(flash_decode_options_t, rotary_cos),      offsetof(flash_decode_options_t, rotary_sin),
    offsetof(flash_decode_options_t, alibi_slopes),    offsetof(flash_decode_options_t, learnable_sink),
    offsetof(flash_decode_options_t, cu_seqlens_q),    offsetof(flash_decode_options_t, cu_seqlens_new),
    offsetof(flash_decode_options_t, q_positions),     offsetof(flash_decode_options_t, tree_mask),
    offsetof(flash_decode_options_t, cu_seqlens_tree),
};

bool request_has(const request_t *request, int bit) { return (request->attributes.operands >> bit) & 1; }

/* The tensor; if it has four dimensions, with its axes in the order (batch, seqlen, heads, head_dim). */
static const flash_tensor_t *to_bshd(call_t *call, int64_t layout, const flash_tensor_t *given) {
    static const int order[][4] = {{0, 1, 2, 3}, {0, 2, 1, 3}, {1, 0, 2, 3}};
    if (layout == LAYOUT_BSHD || given->ndim != 4) return given;
    flash_tensor_t *view = &call->views[call->view_count++];
    *view = *given;
    for (int axis = 0; axis < 4; axis++) {
        view->shape[axis] = given->shape[order[layout][axis]];
        view->stride[axis] = given->stride[order[layout][axis]];
    }
    return view;
}

/* Sets the options that are optional operands, which follow the `fixed` ones. Returns the number of operands. */
static int bind_operands(request_t *request, int fixed, void *options, const size_t *fields, int count) {
    int next = fixed;
    for (int bit = 0; bit < count; bit++) {
        if (!request_has(request, bit)) continue;
        const flash_tensor_t *operand = &request->operands.items[next++];
        memcpy((char *)options + fields[bit], &operand, sizeof operand);
    }
    return next;
}

/* U32[4], low words first, has the bytes of the two INT64 that the library reads when the kernels run. */
static const flash_tensor_t *bind_rng(const request_t *request, call_t *call) {
    flash_tensor_t *state = &call->rng_state;
    memset(state, 0, sizeof *state);
    state->data = request->rng;
    state->dtype = FLASH_DTYPE_INT64;
    state->ndim = 1;
    state->shape[0] = 2;
    state->stride[0] = 1;
    state->device_type = request->operands.items[0].device_type;
    state->device_id = request->operands.items[0].device_id;
    return state;
}

static flash_status_t bind_attention(request_t *request, call_t *call) {
    flash_attention_options_t *options = &call->attention;
    memset(options, 0, sizeof *options);
    options->struct_size = sizeof *options;
    fill_options(request, options);
    if (request_has(request, WITH_RNG)) options->rng_state = bind_rng(request, call);

    bool backward = request->operation == BACKWARD;
    int fixed = backward ? 6 : 3, results = backward ? 3 : 2;
    int operands = bind_operands(request, fixed, options, attention_fields, ATTENTION_OPERANDS);
    if (backward && request_has(request, WITH_DBIAS)) options->dbias = &request->results.items[results++];
    if (operands != request->operands.count || results != request->results.count)
        return refuse(request, "this operation takes %d operands and %d results, not %d and %d", operands, results,
                      request->operands.count, request->results.count);
    for (int i = 0; i < fixed; i++) /* lse, operand 5 of the backward pass, has the same axes in every layout */
        call->in[i] =
            i == 5 ? &request->operands.items[i] : to_bshd(call, request->attributes.layout, &request->operands.items[i]);
    for (int i = 0; i < (backward ? 3 : 1); i++)
        call->out[i] = to_bshd(call, request->attributes.layout, &request->results.items[i]);
    if (!backward) call->out[1] = &request->results.items[1];
    return FLASH_STATUS_OK;
}

static flash_status_t bind_decode(request_t *request, call_t *call) {
    flash_decode_options_t *options = &call->decode;
    memset(options, 0, sizeof *options);
    options->struct_size = sizeof *options;
    fill_options(request, options);

    bool append = request_has(request, WITH_K_NEW);
    int results = append ? 4 : 2;
    int operands = bind_operands(request, 3, options, decode_fields, DECODE_OPERANDS);
    if (operands != request->operands.count || results != request->results.count)
        return refuse(request, "decode takes %d operands and %d results, not %d and %d", operands, results,
                      request->operands.count, request->results.count);
    for (int i = 0; i < 3; i++) call->in[i] = &request->operands.items[i];
    for (int i = 0; i < 2; i++) call->out[i] = &request->results.items[i];
    /* New rows are written in place: the results that are caches alias their operands. */
    for (int i = 1; append && i < 3; i++) {
        const flash_tensor_t *result = &request->results.items[i + 1];
        if (result->data != call->in[i]->data) return refuse(request, "XLA did not alias the new cache with its operand");
        call->in[i] = result;
    }
    return FLASH_STATUS_OK;
}

static flash_status_t bind(request_t *request, call_t *call) {
    call->view_count = 0;
    if (request->attributes.layout < LAYOUT_BSHD || request->attributes.layout > LAYOUT_SBHD)
        return refuse(request, "layout is %lld; it must be 0 (bshd), 1 (bhsd) or 2 (sbhd)",
                      (long long)request->attributes.layout);
    return request->operation == DECODE ? bind_decode(request, call) : bind_attention(request, call);
}

static flash_status_t workspace_size(const request_t *request, const call_t *c, size_t *bytes) {
    switch (request->operation) {
        case FORWARD:
            return flash_attention_forward_workspace_size(c->in[0], c->in[1], c->in[2], c->out[0], c->out[1], &c->attention,
                                                          bytes);
        case BACKWARD:
            return flash_attention_backward_workspace_size(c->in[0], c->in[1], c->in[2], c->in[3], c->in[4], c->in[5], c->out[0],
                                                           c->out[1], c->out[2], &c->attention, bytes);
        default:
            return flash_attention_decode_workspace_size(c->in[0], c->in[1], c->in[2], c->out[0], c->out[1], &c->decode, bytes);
    }
}

static flash_status_t execute(const request_t *request, const call_t *c, void *workspace, size_t bytes, void *stream) {
    switch (request->operation) {
        case FORWARD:
            return flash_attention_forward(c->in[0], c->in[1], c->in[2], c->out[0], c->out[1], &c->attention, workspace, bytes,
                                           stream);
        case BACKWARD:
            return flash_attention_backward(c->in[0], c->in[1], c->in[2], c->in[3], c->in[4], c->in[5], c->out[0], c->out[1],
                                            c->out[2], &c->attention, workspace, bytes, stream);
        default:
            return flash_attention_decode(c->in[0], c->in[1], c->in[2], c->out[0], c->out[1], &c->decode, workspace, bytes,
                                          stream);
    }
}

flash_status_t request_workspace_size(request_t *request, size_t *bytes) {
    call_t call;
    request->text[0] = 0;
    flash_status_t status = bind(request, &call);
    return status == FLASH_STATUS_OK ? workspace_size(request, &call, bytes) : status;
}

flash_status_t request_run(request_t *request, bool host, void *stream) {
    call_t call;
    request->text[0] = 0;
    flash_status_t status = bind(request, &call);
    if (status != FLASH_STATUS_OK) return status;
    if (!host) return execute(request, &call, request->workspace, request->workspace_bytes, stream);

    size_t bytes = 0;
    void *workspace = NULL;
    status = workspace_size(request, &call, &bytes);
    if (status != FLASH_STATUS_OK) return status;
    if (bytes > 0 && posix_memalign(&workspace, 256, bytes) != 0) {
        refuse(request, "no memory for a workspace of %zu bytes", bytes);
        return FLASH_STATUS_OUT_OF_MEMORY;
    }
    fenv_t xla_environment; /* it flushes subnormal numbers to zero; libflash computes with them */
    fegetenv(&xla_environment);
    fesetenv(FE_DFL_ENV);
    status = execute(request, &call, workspace, bytes, stream);
    fesetenv(&xla_environment);
    free(workspace);
    return status;
}
