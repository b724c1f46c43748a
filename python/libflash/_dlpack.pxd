# The ABI of DLPack 1.x (https://dmlc.github.io/dlpack), with which array libraries describe their memory to each other. Declared
# here so that no header has to be vendored; tests/test_dlpack.py compares sizes and offsets with the official header.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from *:
    """
    #include <stdint.h>
    typedef struct { uint32_t major, minor; } flash_dl_version_t;
    typedef struct { int32_t device_type, device_id; } flash_dl_device_t;
    typedef struct { uint8_t code, bits; uint16_t lanes; } flash_dl_dtype_t;
    typedef struct {
        void *data;
        flash_dl_device_t device;
        int32_t ndim;
        flash_dl_dtype_t dtype;
        int64_t *shape;
        int64_t *strides;     /* in elements; NULL: compact */
        uint64_t byte_offset;
    } flash_dl_tensor_t;
    typedef struct flash_dl_managed_t {
        flash_dl_tensor_t dl_tensor;
        void *manager_ctx;
        void (*deleter)(struct flash_dl_managed_t *);
    } flash_dl_managed_t;
    typedef struct flash_dl_managed_versioned_t {
        flash_dl_version_t version;
        void *manager_ctx;
        void (*deleter)(struct flash_dl_managed_versioned_t *);
        uint64_t flags;
        flash_dl_tensor_t dl_tensor;
    } flash_dl_managed_versioned_t;
    typedef struct flash_dl_exchange_header_t {
        flash_dl_version_t version;
        struct flash_dl_exchange_header_t *prev_api;
    } flash_dl_exchange_header_t;
    typedef struct {
        flash_dl_exchange_header_t header;
        int (*managed_tensor_allocator)(flash_dl_tensor_t *prototype, flash_dl_managed_versioned_t **out, void *error_ctx,
                                        void (*set_error)(void *error_ctx, const char *kind, const char *message));
        int (*managed_tensor_from_py_object_no_sync)(void *object, flash_dl_managed_versioned_t **out);
        int (*managed_tensor_to_py_object_no_sync)(flash_dl_managed_versioned_t *tensor, void **object);
        int (*dltensor_from_py_object_no_sync)(void *object, flash_dl_tensor_t *out);   /* may be NULL */
        int (*current_work_stream)(int32_t device_type, int32_t device_id, void **stream);
    } flash_dl_exchange_t;
    """
    enum:
        DL_MAJOR "1"            # the supported major version
        DL_READ_ONLY "1"        # bits of `flags`
        DL_COPIED "2"
        DL_CPU "1"
        DL_CUDA "2"
        DL_CUDA_HOST "3"        # pinned host memory
        DL_CUDA_MANAGED "13"
        DL_INT "0"
        DL_UINT "1"
        DL_FLOAT "2"
        DL_BFLOAT "4"
        DL_BOOL "6"
        DL_FLOAT8_E4M3FN "10"
        DL_FLOAT8_E5M2 "12"

    ctypedef struct DLVersion "flash_dl_version_t":
        uint32_t major
        uint32_t minor
    ctypedef struct DLDevice "flash_dl_device_t":
        int32_t device_type
        int32_t device_id
    ctypedef struct DLDataType "flash_dl_dtype_t":
        uint8_t code
        uint8_t bits
        uint16_t lanes
    ctypedef struct DLTensor "flash_dl_tensor_t":
        void *data
        DLDevice device
        int32_t ndim
        DLDataType dtype
        int64_t *shape
        int64_t *strides
        uint64_t byte_offset
    ctypedef struct DLManaged "flash_dl_managed_t":
        DLTensor dl_tensor
        void (*deleter)(DLManaged *) noexcept
    ctypedef struct DLManagedVersioned "flash_dl_managed_versioned_t":
        DLVersion version
        void (*deleter)(DLManagedVersioned *) noexcept
        uint64_t flags
        DLTensor dl_tensor
    ctypedef struct DLExchangeHeader "flash_dl_exchange_header_t":
        DLVersion version
        DLExchangeHeader *prev_api
    ctypedef struct DLExchange "flash_dl_exchange_t":
        DLExchangeHeader header
        int (*managed_tensor_allocator)(DLTensor *, DLManagedVersioned **, void *,
                                        void (*)(void *, const char *, const char *) noexcept) except -1
        int (*managed_tensor_from_py_object_no_sync)(void *, DLManagedVersioned **) noexcept  # not 0: a Python exception is set
        int (*managed_tensor_to_py_object_no_sync)(DLManagedVersioned *, void **) except -1
        int (*dltensor_from_py_object_no_sync)(void *, DLTensor *) noexcept  # not 0: a Python exception is set
        int (*current_work_stream)(int32_t, int32_t, void **) except -1
