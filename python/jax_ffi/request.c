#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "request.h"

#include <fenv.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Copies the attributes to the fields of an option struct. */
static void fill_options(const request_t *request, void *options) {
    for (const attribute_t *attribute = attribute_table; attribute->name; attribute++) {
        const field_t *field = request->operation == DECODE        ? &attribute->decode
                               : request->operation == CACHE_WRITE ? &attribute->write
                                                                   : &attribute->attention;
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
    flash_tensor_t views[16]; /* descriptions with reordered axes, and of values that are channels of the keys */
    int view_count;
    flash_tensor_t rng_state;
    const flash_tensor_t *in[6], *out[5];
    flash_attention_options_t attention;
    flash_decode_options_t decode;
    /* BACKWARD_TANGENT has two halves: the first calls forward_tangent, the second backward_tangent. */
    flash_tangents_t tangents, tangents_of_forward; /* tangents_of_forward: for the first half */
    flash_tensor_t tlse, tdelta, delta;             /* in the workspace: written by the first half, read by the second */
    flash_tensor_t out_anew;                        /* with WITH_OUT_ANEW: written by the first half, not read */
    const flash_tensor_t *first_out, *first_lse;    /* out and lse of the first half */
    flash_attention_options_t attention_of_forward; /* the options of the first half */
    flash_cache_write_options_t write;
} call_t;

/* The fields of the option structs for the optional operands, in the order of the bits. */
static const size_t attention_fields[OPTION_OPERANDS] = {
    offsetof(flash_attention_options_t, cu_seqlens_q),  offsetof(flash_attention_options_t, cu_seqlens_k),
    offsetof(flash_attention_options_t, seqused_q),     offsetof(flash_attention_options_t, seqused_k),
    offsetof(flash_attention_options_t, alibi_slopes),  offsetof(flash_attention_options_t, bias),
    offsetof(flash_attention_options_t, mask),          offsetof(flash_attention_options_t, learnable_sink),
    offsetof(flash_attention_options_t, block_mask),    offsetof(flash_attention_options_t, dlse),
    offsetof(flash_attention_options_t, row_positions), offsetof(flash_attention_options_t, column_positions),
};
static const size_t tangent_fields[ATTENTION_OPERANDS - OPTION_OPERANDS] = {
    offsetof(flash_tangents_t, q),    offsetof(flash_tangents_t, k),    offsetof(flash_tangents_t, v),
    offsetof(flash_tangents_t, bias), offsetof(flash_tangents_t, dout), offsetof(flash_tangents_t, dlse),
};
static const size_t decode_fields[DECODE_OPERANDS] = {
    offsetof(flash_decode_options_t, cache_seqlens),   offsetof(flash_decode_options_t, block_table),
    offsetof(flash_decode_options_t, cache_batch_idx), offsetof(flash_decode_options_t, cache_leftpad),
    offsetof(flash_decode_options_t, k_new),           offsetof(flash_decode_options_t, v_new),
    offsetof(flash_decode_options_t, rotary_cos),      offsetof(flash_decode_options_t, rotary_sin),
    offsetof(flash_decode_options_t, alibi_slopes),    offsetof(flash_decode_options_t, learnable_sink),
    offsetof(flash_decode_options_t, cu_seqlens_q),    offsetof(flash_decode_options_t, cu_seqlens_new),
    offsetof(flash_decode_options_t, q_positions),     offsetof(flash_decode_options_t, tree_mask),
    offsetof(flash_decode_options_t, cu_seqlens_tree), offsetof(flash_decode_options_t, shared_groups),
    offsetof(flash_decode_options_t, shared_lens),     offsetof(flash_decode_options_t, k_scale),
    offsetof(flash_decode_options_t, v_scale),         offsetof(flash_decode_options_t, k_rope_cache),
    offsetof(flash_decode_options_t, k_rope_new),
};

bool request_has(const request_t *request, int bit) { return (request->attributes.operands >> bit) & 1; }

/* The tensor `given`. If it has four dimensions, its axes get the order (batch, seqlen, heads, head_dim). */
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

/* Sets the fields `fields` of the struct `options` to the optional operands of the `count` bits from `first` on. The first of
 * these operands has the number `next`. Returns the number of the operand after the last one. */
static int bind_operands(request_t *request, int next, void *options, const size_t *fields, int first, int count) {
    for (int i = 0; i < count; i++) {
        if (!request_has(request, first + i)) continue;
        const flash_tensor_t *operand = &request->operands.items[next++];
        memcpy((char *)options + fields[i], &operand, sizeof operand);
    }
    return next;
}

/* The random state as the library reads it: two INT64, which are the bytes of U32[4] with the low words first. */
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

/* Makes `tensor` a description like `like`, without data. */
static void dense_like(flash_tensor_t *tensor, const flash_tensor_t *like) {
    *tensor = *like;
    tensor->data = NULL;
}

/* Gives the tangents that are operands the library's order of axes, and sets the tangents that are results. `of_forward`: the
 * tangents of out and lse, if they are results of BACKWARD_TANGENT; else NULL. */
static void bind_tangents(request_t *request, call_t *call, const flash_tensor_t *of_forward) {
    flash_tangents_t *t = &call->tangents;
    int64_t layout = request->attributes.layout;
    if (t->q) t->q = to_bshd(call, layout, t->q);
    if (t->k) t->k = to_bshd(call, layout, t->k);
    if (t->v) t->v = to_bshd(call, layout, t->v);
    if (t->dout) t->dout = to_bshd(call, layout, t->dout);
    if (request->operation == FORWARD_TANGENT) {
        t->flags = FLASH_FLAG_FROM_LSE;
        t->out = call->out[0];
        t->lse = call->out[1];
        return;
    }
    t->dq = call->out[0];
    t->dk = call->out[1];
    t->dv = call->out[2];
    dense_like(&call->tlse, call->in[5]);
    dense_like(&call->tdelta, call->in[5]);
    dense_like(&call->delta, call->in[5]);
    t->lse = of_forward ? &of_forward[1] : &call->tlse;
    t->delta = &call->tdelta;

    flash_tangents_t *f = &call->tangents_of_forward;
    *f = *t;
    f->cotangent = call->in[0];
    call->first_out = call->in[4];
    call->first_lse = call->in[5];
    if (request_has(request, WITH_OUT_ANEW)) {
        dense_like(&call->out_anew, call->in[4]);
        call->first_out = &call->out_anew;
        call->first_lse = NULL;
    } else {
        f->flags = FLASH_FLAG_FROM_LSE;
    }
    f->out = of_forward ? to_bshd(call, layout, &of_forward[0]) : NULL;
    f->dq = f->dk = f->dv = f->dbias = NULL;
    call->attention.delta = &call->delta;
    call->attention_of_forward = call->attention;
    t->dlse = call->attention.dlse = NULL; /* tdelta and delta contain them */
}

static flash_status_t check_counts(request_t *request, int operands, int results) {
    if (operands == request->operands.count && results == request->results.count) return FLASH_STATUS_OK;
    return refuse(request, "this operation takes %d operands and %d results, not %d and %d", operands, results,
                  request->operands.count, request->results.count);
}

/* Sets call->in to the fixed operands. lse has the same axes in every layout. */
static void bind_fixed(const request_t *request, call_t *call, int count) {
    for (int i = 0; i < count; i++) {
        const flash_tensor_t *operand = &request->operands.items[i];
        bool is_lse = i == (request->operation == FORWARD_TANGENT ? 4 : 5);
        call->in[i] = is_lse ? operand : to_bshd(call, request->attributes.layout, operand);
    }
}

static flash_status_t bind_attention(request_t *request, call_t *call) {
    static const int fixed_operands[OPERATIONS] = {3, 6, 3, 5, 6}, fixed_results[OPERATIONS] = {2, 3, 2, 2, 3};
    flash_attention_options_t *options = &call->attention;
    memset(options, 0, sizeof *options);
    options->struct_size = sizeof *options;
    fill_options(request, options);
    if (request_has(request, WITH_RNG)) options->rng_state = bind_rng(request, call);
    memset(&call->tangents, 0, sizeof call->tangents);
    call->tangents.struct_size = sizeof call->tangents;

    operation_t operation = request->operation;
    bool has_tangents = operation == FORWARD_TANGENT || operation == BACKWARD_TANGENT;
    int fixed = fixed_operands[operation], results = fixed_results[operation];
    int operands = bind_operands(request, fixed, options, attention_fields, 0, OPTION_OPERANDS);
    operands = bind_operands(request, operands, &call->tangents, tangent_fields, OPTION_OPERANDS,
                             has_tangents ? ATTENTION_OPERANDS - OPTION_OPERANDS : 0);
    bool dbias = operation != FORWARD && operation != FORWARD_TANGENT && request_has(request, WITH_DBIAS);
    const flash_tensor_t *result = request->results.items;
    if (dbias && operation == BACKWARD) options->dbias = &result[results];
    if (dbias && operation == BACKWARD_TANGENT) call->tangents.dbias = &result[results];
    results += dbias ? 1 : 0;
    int of_forward = results;
    results += operation == BACKWARD_TANGENT && request_has(request, WITH_TANGENTS) ? 2 : 0;
    if (operation == FORWARD && request_has(request, WITH_MAX_LOGIT)) options->max_logit = &result[results++];
    if (operation == FORWARD && request_has(request, WITH_ENTROPY)) options->entropy = &result[results++];
    flash_status_t status = check_counts(request, operands, results);
    if (status != FLASH_STATUS_OK) return status;

    int64_t layout = request->attributes.layout;
    bind_fixed(request, call, fixed);
    for (int i = 0; i < fixed_results[operation]; i++) /* lse is result 1 of the operations with two */
        call->out[i] = fixed_results[operation] == 2 && i == 1 ? &result[i] : to_bshd(call, layout, &result[i]);
    if (has_tangents) bind_tangents(request, call, of_forward < results ? &result[of_forward] : NULL);
    return FLASH_STATUS_OK;
}

/* The scale if each cached row has its own, which are then computed and written; else NULL. */
static const flash_tensor_t *of_rows(const flash_tensor_t *scale) { return scale && scale->ndim > 2 ? scale : NULL; }

/* Checks that the results from number *results on alias the operands `written`, which the call writes in place. Adds their number
 * to *results. An entry of `written` may be NULL. */
static flash_status_t check_written(request_t *request, const flash_tensor_t *const *written, int count, int *results) {
    for (int i = 0; i < count; i++) {
        if (!written[i]) continue;
        if (*results >= request->results.count) return refuse(request, "a result for what is written is missing");
        if (request->results.items[(*results)++].data != written[i]->data)
            return refuse(request, "XLA did not alias what is written with its operand");
    }
    return FLASH_STATUS_OK;
}

static flash_status_t bind_decode(request_t *request, call_t *call) {
    flash_decode_options_t *options = &call->decode;
    memset(options, 0, sizeof *options);
    options->struct_size = sizeof *options;
    fill_options(request, options);

    int fixed = request->attributes.head_dim_v ? 2 : 3, results = 2;
    int operands = bind_operands(request, fixed, options, decode_fields, 0, DECODE_OPERANDS);
    if (operands != request->operands.count)
        return refuse(request, "decode takes %d operands, not %d", operands, request->operands.count);
    for (int i = 0; i < fixed; i++) call->in[i] = &request->operands.items[i];
    if (request_has(request, WITH_K_NEW)) {
        const flash_tensor_t *written[] = {call->in[1], fixed == 3 ? call->in[2] : NULL, of_rows(options->k_scale),
                                           of_rows(options->v_scale), options->k_rope_cache};
        flash_status_t status = check_written(request, written, 5, &results);
        if (status != FLASH_STATUS_OK) return status;
    }
    if (results != request->results.count)
        return refuse(request, "decode gives %d results, not %d", results, request->results.count);
    for (int i = 0; i < 2; i++) call->out[i] = &request->results.items[i];
    if (fixed == 2) { /* the values are the first channels of the keys */
        flash_tensor_t *values = &call->views[call->view_count++];
        *values = *call->in[1];
        if (values->ndim > 0) values->shape[values->ndim - 1] = request->attributes.head_dim_v;
        call->in[2] = values;
    }
    return FLASH_STATUS_OK;
}

static const size_t write_fields[CACHE_WRITE_OPERANDS] = {
    0, /* v and v_cache are arguments, not options */
    0,
    offsetof(flash_cache_write_options_t, k_scale),
    offsetof(flash_cache_write_options_t, v_scale),
    offsetof(flash_cache_write_options_t, k_rope_cache),
    offsetof(flash_cache_write_options_t, k_rope_new),
    offsetof(flash_cache_write_options_t, rotary_cos),
    offsetof(flash_cache_write_options_t, rotary_sin),
    offsetof(flash_cache_write_options_t, positions),
};

static flash_status_t bind_cache_write(request_t *request, call_t *call) {
    flash_cache_write_options_t *options = &call->write;
    memset(options, 0, sizeof *options);
    int next = 3, results = 0;
    call->in[3] = call->in[4] = NULL;
    for (int bit = 0; bit < CACHE_WRITE_OPERANDS; bit++) {
        if (!request_has(request, bit)) continue;
        const flash_tensor_t *operand = &request->operands.items[next++];
        if (bit <= WITH_WRITTEN_V_CACHE)
            call->in[3 + bit] = operand;
        else
            memcpy((char *)options + write_fields[bit], &operand, sizeof operand);
    }
    options->struct_size = sizeof *options;
    fill_options(request, options);
    for (int i = 0; i < 3; i++) call->in[i] = &request->operands.items[i];
    const flash_tensor_t *written[] = {call->in[1], call->in[4], of_rows(options->k_scale), of_rows(options->v_scale),
                                       options->k_rope_cache};
    flash_status_t status = check_written(request, written, 5, &results);
    if (status == FLASH_STATUS_OK && (next != request->operands.count || results != request->results.count))
        return refuse(request, "cache_write takes %d operands and %d results, not %d and %d", next, results,
                      request->operands.count, request->results.count);
    return status;
}

static flash_status_t bind(request_t *request, call_t *call) {
    call->view_count = 0;
    if (request->attributes.layout < LAYOUT_BSHD || request->attributes.layout > LAYOUT_SBHD)
        return refuse(request, "layout is %lld; it must be 0 (bshd), 1 (bhsd) or 2 (sbhd)",
                      (long long)request->attributes.layout);
    if (request->operation == CACHE_WRITE) return bind_cache_write(request, call);
    return request->operation == DECODE ? bind_decode(request, call) : bind_attention(request, call);
}

static size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

/* Bytes of a dense tensor with `element` bytes per element, rounded up to the alignment. */
static size_t size_of(const flash_tensor_t *tensor, size_t element) {
    for (int axis = 0; axis < tensor->ndim; axis++) element *= (size_t)tensor->shape[axis];
    return aligned(element);
}

static size_t size_of_rows(const flash_tensor_t *lse) { return size_of(lse, lse->dtype == FLASH_DTYPE_FLOAT64 ? 8 : 4); }

/* BACKWARD_TANGENT: the workspace begins with tlse, tdelta, delta and, if out is computed again, out in 16 bits. Their bytes. */
static size_t size_of_between(const call_t *c) {
    return 3 * size_of_rows(&c->tlse) + (c->first_lse ? 0 : size_of(&c->out_anew, 2));
}

/* The rest of the workspace is used by both halves, one after the other. */
static flash_status_t backward_tangent_workspace_size(const call_t *c, size_t *bytes) {
    const flash_tensor_t *const *in = c->in;
    size_t first = 0, second = 0;
    flash_status_t status = flash_attention_forward_tangent_workspace_size(
        in[1], in[2], in[3], c->first_out, c->first_lse, &c->tangents_of_forward, &c->attention_of_forward, &first);
    if (status == FLASH_STATUS_OK)
        status = flash_attention_backward_tangent_workspace_size(in[0], in[1], in[2], in[3], in[4], in[5], NULL, NULL, NULL,
                                                                 &c->tangents, &c->attention, &second);
    *bytes = size_of_between(c) + (first > second ? first : second);
    return status;
}

static flash_status_t run_backward_tangent(request_t *request, call_t *c, char *workspace, size_t bytes, void *stream) {
    const flash_tensor_t *const *in = c->in;
    size_t rows = size_of_rows(&c->tlse), between = size_of_between(c), needed = 0;
    flash_status_t status;
    if (bytes < between) { /* for example because the library does not support the call; then return its reason */
        status = backward_tangent_workspace_size(c, &needed);
        if (status != FLASH_STATUS_OK) return status;
        return refuse(request, "the workspace has %zu bytes; it needs at least %zu", bytes, needed);
    }
    c->tlse.data = workspace;
    c->tdelta.data = workspace + rows;
    c->delta.data = workspace + 2 * rows;
    c->out_anew.data = workspace + 3 * rows;
    workspace += between;
    bytes -= between;
    status = flash_attention_forward_tangent(in[1], in[2], in[3], c->first_out, c->first_lse, &c->tangents_of_forward,
                                             &c->attention_of_forward, workspace, bytes, stream);
    if (status != FLASH_STATUS_OK) return status;
    return flash_attention_backward_tangent(in[0], in[1], in[2], in[3], in[4], in[5], NULL, NULL, NULL, &c->tangents,
                                            &c->attention, workspace, bytes, stream);
}

static flash_status_t workspace_size(const request_t *request, const call_t *c, size_t *bytes) {
    switch (request->operation) {
        case FORWARD:
            return flash_attention_forward_workspace_size(c->in[0], c->in[1], c->in[2], c->out[0], c->out[1], &c->attention,
                                                          bytes);
        case BACKWARD:
            return flash_attention_backward_workspace_size(c->in[0], c->in[1], c->in[2], c->in[3], c->in[4], c->in[5], c->out[0],
                                                           c->out[1], c->out[2], &c->attention, bytes);
        case FORWARD_TANGENT:
            return flash_attention_forward_tangent_workspace_size(c->in[0], c->in[1], c->in[2], c->in[3], c->in[4], &c->tangents,
                                                                  &c->attention, bytes);
        case BACKWARD_TANGENT: return backward_tangent_workspace_size(c, bytes);
        case CACHE_WRITE:
            return flash_cache_write_workspace_size(c->in[0], c->in[3], c->in[1], c->in[4], c->in[2], &c->write, bytes);
        default:
            return flash_attention_decode_workspace_size(c->in[0], c->in[1], c->in[2], c->out[0], c->out[1], &c->decode, bytes);
    }
}

static flash_status_t execute(request_t *request, call_t *c, void *workspace, size_t bytes, void *stream) {
    switch (request->operation) {
        case FORWARD:
            return flash_attention_forward(c->in[0], c->in[1], c->in[2], c->out[0], c->out[1], &c->attention, workspace, bytes,
                                           stream);
        case BACKWARD:
            return flash_attention_backward(c->in[0], c->in[1], c->in[2], c->in[3], c->in[4], c->in[5], c->out[0], c->out[1],
                                            c->out[2], &c->attention, workspace, bytes, stream);
        case FORWARD_TANGENT:
            return flash_attention_forward_tangent(c->in[0], c->in[1], c->in[2], c->in[3], c->in[4], &c->tangents, &c->attention,
                                                   workspace, bytes, stream);
        case BACKWARD_TANGENT: return run_backward_tangent(request, c, workspace, bytes, stream);
        case CACHE_WRITE: return flash_cache_write(c->in[0], c->in[3], c->in[1], c->in[4], c->in[2], &c->write, stream);
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
    fenv_t xla_environment; /* XLA flushes subnormal numbers to zero; libflash computes with them */
    fegetenv(&xla_environment);
    fesetenv(FE_DFL_ENV);
    status = execute(request, &call, workspace, bytes, stream);
    fesetenv(&xla_environment);
    free(workspace);
    return status;
}
