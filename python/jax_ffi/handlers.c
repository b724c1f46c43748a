/* Handlers: each converts XLA's call frame to a request and runs it. A handler keeps no state and takes no lock: XLA may run it
 * on several threads at once. */
#include "handlers.h"

#include <stdio.h>
#include <string.h>

#include "dtype.h"
#include "request.h"

/* The library's error text with the argument names of libflash.jax. A text begins with the name of an argument; libflash.jax
 * calls the new rows k, v and k_rope. Errors that are found while tracing get these names in Python (libflash/_errors.py). */
static const char *named_as_in_python(const char *text, char *buffer, size_t size) {
    static const char *const names[] = {"k_new:", "v_new:", "k_rope_new:"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t length = strlen(names[i]);
        if (strncmp(text, names[i], length) != 0) continue;
        snprintf(buffer, size, "%.*s%s", (int)(length - strlen("_new:")), text, text + length - 1);
        return buffer;
    }
    return text;
}

static xla_error *failure(const xla_frame *frame, flash_status_t status, const char *text) {
    char buffer[2048]; /* enough for the longest text of the library */
    xla_error_create_args args = {sizeof args, NULL, named_as_in_python(text, buffer, sizeof buffer), XLA_INTERNAL};
    switch (status) {
        case FLASH_STATUS_INVALID: args.errc = XLA_INVALID_ARGUMENT; break;
        case FLASH_STATUS_UNSUPPORTED: args.errc = XLA_UNIMPLEMENTED; break;
        case FLASH_STATUS_NO_DEVICE: args.errc = XLA_FAILED_PRECONDITION; break;
        case FLASH_STATUS_OUT_OF_MEMORY: args.errc = XLA_RESOURCE_EXHAUSTED; break;
        default: break;
    }
    return frame->api->error_create(&args);
}

/* Answers XLA's query for the traits of a handler, which comes before the first call. A handler launches the same kernels for the
 * same attributes and shapes, so XLA may record its work in a CUDA graph. */
static void describe(xla_extension *extension) {
    xla_metadata *metadata = ((xla_metadata_extension *)extension)->metadata;
    metadata->api_version.major_version = XLA_API_MAJOR;
    metadata->api_version.minor_version = XLA_API_MINOR;
    metadata->traits = XLA_TRAIT_COMMAND_BUFFER;
}

static flash_status_t take_attribute(request_t *request, const xla_text *name, int32_t type, const void *value) {
    const attribute_t *attribute = find_attribute(name->ptr, name->len);
    if (!attribute) return refuse(request, "unknown attribute %.*s", (int)name->len, name->ptr);
    char *field = (char *)&request->attributes + attribute->own.offset;
    if (attribute->kind == TEXT) {
        const xla_text *text = value;
        if (type != XLA_ATTRIBUTE_STRING || text->len >= attribute->own.size)
            return refuse(request, "attribute %s must be a text of fewer than %zu bytes", attribute->name, attribute->own.size);
        memcpy(field, text->ptr, text->len);
        field[text->len] = 0;
        return FLASH_STATUS_OK;
    }
    const xla_scalar *scalar = value;
    int32_t dtype = attribute->kind == INTEGER ? XLA_S64 : XLA_F64;
    if (type != XLA_ATTRIBUTE_SCALAR || scalar->dtype != dtype)
        return refuse(request, "attribute %s must be a 64-bit %s", attribute->name,
                      attribute->kind == INTEGER ? "integer" : "float");
    memcpy(field, scalar->value, 8);
    return FLASH_STATUS_OK;
}

static flash_status_t take_attributes(request_t *request, const xla_attributes *given) {
    for (int64_t i = 0; i < given->size; i++) {
        flash_status_t status = take_attribute(request, given->names[i], given->types[i], given->values[i]);
        if (status != FLASH_STATUS_OK) return status;
    }
    return FLASH_STATUS_OK;
}

static flash_status_t take_buffers(request_t *request, const xla_buffers *given, int64_t count, int32_t device_type,
                                   int32_t device_id, tensors_t *taken) {
    if (count < 0 || count > MAX_TENSORS) return refuse(request, "%lld tensors; at most %d", (long long)count, MAX_TENSORS);
    taken->count = (int)count;
    for (int64_t i = 0; i < count; i++) {
        const xla_buffer *buffer = given->items[i];
        if (given->types[i] != XLA_BUFFER) return refuse(request, "operand or result %lld is not an array", (long long)i);
        if (!describe_tensor(&taken->items[i], buffer->data, buffer->dtype, buffer->rank, buffer->dims))
            return refuse(request,
                          "operand or result %lld has %lld dimensions and XLA type %d; at most 4 of a type that libflash has",
                          (long long)i, (long long)buffer->rank, buffer->dtype);
        taken->items[i].device_type = device_type;
        taken->items[i].device_id = device_id;
    }
    return FLASH_STATUS_OK;
}

/* Takes the random state, which is the last operand, and the workspace, which is the last result. Sets `operands` and `results`
 * to the numbers of operands and results that are passed to the library as tensors. */
static flash_status_t take_extras(request_t *request, const xla_frame *frame, int64_t *operands, int64_t *results) {
    *operands = frame->args.size;
    *results = frame->rets.size;
    if (request_has(request, WITH_RNG)) {
        if (*operands < 1) return refuse(request, "the random state is missing");
        const xla_buffer *rng = frame->args.items[--*operands];
        if (rng->dtype != XLA_U32 || rng->rank != 1 || rng->dims[0] != 4) return refuse(request, "seed must become U32[4]");
        request->rng = rng->data;
    }
    if (request_has(request, WITH_WORKSPACE)) {
        if (*results < 1) return refuse(request, "the workspace is missing");
        const xla_buffer *block = frame->rets.items[--*results];
        if (block->dtype != XLA_U8 || block->rank != 1) return refuse(request, "the workspace must be U8[n]");
        request->workspace = block->data;
        request->workspace_bytes = (size_t)block->dims[0];
    }
    if (request_has(request, WITH_FILLED)) {
        int64_t filled = request->operation == DECODE ? 2 : *results;
        if (*operands < filled) return refuse(request, "the filled results are missing");
        *operands -= filled;
    }
    return FLASH_STATUS_OK;
}

static flash_status_t take_frame(request_t *request, const xla_frame *frame, bool host, int32_t device_id) {
    int64_t operands, results;
    int32_t device_type = host ? FLASH_DEVICE_CPU : FLASH_DEVICE_CUDA;
    flash_status_t status = take_attributes(request, &frame->attrs);
    if (status == FLASH_STATUS_OK) status = take_extras(request, frame, &operands, &results);
    if (status == FLASH_STATUS_OK)
        status = take_buffers(request, &frame->args, operands, device_type, device_id, &request->operands);
    if (status == FLASH_STATUS_OK)
        status = take_buffers(request, &frame->rets, results, device_type, device_id, &request->results);
    return status;
}

static xla_error *handle(xla_frame *frame, operation_t operation, bool host) {
    if (frame->extension_start && frame->extension_start->type == XLA_EXTENSION_METADATA) {
        describe(frame->extension_start);
        return NULL;
    }
    if (frame->stage != XLA_STAGE_EXECUTE) return NULL;

    void *stream = NULL;
    int32_t device_id = 0;
    if (!host) {
        xla_stream_get_args get_stream = {sizeof get_stream, NULL, frame->context, NULL};
        xla_error *error = frame->api->stream_get(&get_stream);
        if (error) return error;
        stream = get_stream.stream;
        if (!XLA_HAS(frame->api, device_ordinal_get))
            return failure(frame, FLASH_STATUS_UNSUPPORTED, "this jaxlib is too old: it cannot name the device of a call");
        xla_device_ordinal_get_args get_device = {sizeof get_device, NULL, frame->context, 0};
        error = frame->api->device_ordinal_get(&get_device);
        if (error) return error;
        device_id = get_device.device_ordinal;
    }
    request_t request;
    memset(&request, 0, sizeof request);
    request.operation = operation;
    flash_status_t status = take_frame(&request, frame, host, device_id);
    if (status == FLASH_STATUS_OK) status = request_run(&request, host, stream);
    return status == FLASH_STATUS_OK ? NULL : failure(frame, status, request_error(&request));
}

xla_error *forward_cpu(xla_frame *frame) { return handle(frame, FORWARD, true); }
xla_error *forward_cuda(xla_frame *frame) { return handle(frame, FORWARD, false); }
xla_error *backward_cpu(xla_frame *frame) { return handle(frame, BACKWARD, true); }
xla_error *backward_cuda(xla_frame *frame) { return handle(frame, BACKWARD, false); }
xla_error *decode_cpu(xla_frame *frame) { return handle(frame, DECODE, true); }
xla_error *decode_cuda(xla_frame *frame) { return handle(frame, DECODE, false); }
xla_error *forward_tangent_cpu(xla_frame *frame) { return handle(frame, FORWARD_TANGENT, true); }
xla_error *forward_tangent_cuda(xla_frame *frame) { return handle(frame, FORWARD_TANGENT, false); }
xla_error *backward_tangent_cpu(xla_frame *frame) { return handle(frame, BACKWARD_TANGENT, true); }
xla_error *backward_tangent_cuda(xla_frame *frame) { return handle(frame, BACKWARD_TANGENT, false); }
xla_error *cache_write_cpu(xla_frame *frame) { return handle(frame, CACHE_WRITE, true); }
xla_error *cache_write_cuda(xla_frame *frame) { return handle(frame, CACHE_WRITE, false); }
