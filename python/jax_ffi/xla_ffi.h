/* The part of XLA's foreign function interface that a handler needs: its call frame, as plain C.
 *
 * XLA calls a handler with one frame: operands, results, attributes and a table of callback functions. A handler does not link to
 * XLA and needs none of its headers. Layouts are those of API version 0.3 and later, in which structs only grew at their ends;
 * tests/test_foreign_structs.py compares them with jaxlib's own header where that is installed.
 *
 * Every struct begins with its size: a field may be read only if the size covers it. */
#ifndef LIBFLASH_JAX_FFI_XLA_FFI_H
#define LIBFLASH_JAX_FFI_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

#define XLA_API_MAJOR 0
#define XLA_API_MINOR 1 /* the version that handlers report: the oldest one that has everything they need */

/* The enumerations of XLA, each one int wide. */
enum { XLA_EXTENSION_METADATA = 1 };
enum { XLA_STAGE_EXECUTE = 3 };
enum { XLA_BUFFER = 1 };
enum { XLA_ATTRIBUTE_SCALAR = 3, XLA_ATTRIBUTE_STRING = 4 };
enum { XLA_TRAIT_COMMAND_BUFFER = 1 };
enum { XLA_PRED = 1, XLA_S8 = 2, XLA_S32 = 4, XLA_S64 = 5, XLA_U8 = 6, XLA_U32 = 8, XLA_F16 = 10, XLA_F32 = 11, XLA_F64 = 12 };
enum { XLA_BF16 = 16, XLA_F8E5M2 = 19, XLA_F8E4M3FN = 20 };
enum {
    XLA_INVALID_ARGUMENT = 3,
    XLA_RESOURCE_EXHAUSTED = 8,
    XLA_FAILED_PRECONDITION = 9,
    XLA_UNIMPLEMENTED = 12,
    XLA_INTERNAL = 13
};

typedef struct xla_error xla_error;     /* opaque */
typedef struct xla_context xla_context; /* opaque */

typedef struct xla_extension {
    size_t struct_size;
    int32_t type;
    struct xla_extension* next;
} xla_extension;

typedef struct xla_version {
    size_t struct_size;
    xla_extension* extension_start;
    int major_version;
    int minor_version;
} xla_version;

typedef struct xla_text { /* not terminated by 0 */
    const char* ptr;
    size_t len;
} xla_text;

typedef struct xla_scalar {
    int32_t dtype;
    void* value;
} xla_scalar;

typedef struct xla_buffer {
    size_t struct_size;
    xla_extension* extension_start;
    int32_t dtype;
    void* data;
    int64_t rank;
    int64_t* dims;
} xla_buffer;

typedef struct xla_buffers { /* operands, and results */
    size_t struct_size;
    xla_extension* extension_start;
    int64_t size;
    int32_t* types; /* XLA_BUFFER each */
    void** items;   /* xla_buffer each */
} xla_buffers;

typedef struct xla_attributes { /* sorted by name */
    size_t struct_size;
    xla_extension* extension_start;
    int64_t size;
    int32_t* types;
    xla_text** names;
    void** values; /* xla_scalar or xla_text each */
} xla_attributes;

typedef struct xla_error_create_args {
    size_t struct_size;
    xla_extension* extension_start;
    const char* message;
    int32_t errc;
} xla_error_create_args;

typedef struct xla_error_destroy_args {
    size_t struct_size;
    xla_extension* extension_start;
    xla_error* error;
} xla_error_destroy_args;

typedef struct xla_stream_get_args {
    size_t struct_size;
    xla_extension* extension_start;
    xla_context* context;
    void* stream; /* out */
} xla_stream_get_args;

typedef struct xla_device_ordinal_get_args {
    size_t struct_size;
    xla_extension* extension_start;
    xla_context* context;
    int32_t device_ordinal; /* out */
} xla_device_ordinal_get_args;

typedef void (*xla_unused)(void);

typedef struct xla_api {
    size_t struct_size;
    xla_extension* extension_start;
    xla_version api_version;
    const void* internal_api;
    xla_error* (*error_create)(xla_error_create_args* args);
    xla_unused error_get_message;
    void (*error_destroy)(xla_error_destroy_args* args);
    xla_unused handler_register;
    xla_error* (*stream_get)(xla_stream_get_args* args);
    xla_unused between[12]; /* types, context, state, device memory, thread pool, futures, run id */
    xla_error* (*device_ordinal_get)(xla_device_ordinal_get_args* args);
} xla_api;

typedef struct xla_frame {
    size_t struct_size;
    xla_extension* extension_start;
    const xla_api* api;
    xla_context* context;
    int32_t stage;
    xla_buffers args;
    xla_buffers rets;
    xla_attributes attrs;
} xla_frame;

typedef struct xla_metadata {
    size_t struct_size;
    xla_version api_version;
    uint32_t traits;
} xla_metadata;

typedef struct xla_metadata_extension {
    xla_extension base;
    xla_metadata* metadata;
} xla_metadata_extension;

/* True if a struct that reports `struct_size` has the field. */
#define XLA_HAS(struct_pointer, field) \
    ((struct_pointer)->struct_size >=  \
     (size_t)((const char*)&(struct_pointer)->field - (const char*)(struct_pointer)) + sizeof((struct_pointer)->field))

#endif /* LIBFLASH_JAX_FFI_XLA_FFI_H */
