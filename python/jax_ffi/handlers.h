/* The functions that XLA calls: one for each operation and platform. */
#ifndef LIBFLASH_JAX_FFI_HANDLERS_H
#define LIBFLASH_JAX_FFI_HANDLERS_H

#include "xla_ffi.h"

typedef xla_error* handler_t(xla_frame* frame);

handler_t forward_cpu, forward_cuda, backward_cpu, backward_cuda, decode_cpu, decode_cuda;
handler_t cache_write_cpu, cache_write_cuda;
handler_t forward_tangent_cpu, forward_tangent_cuda, backward_tangent_cpu, backward_tangent_cuda;

#endif /* LIBFLASH_JAX_FFI_HANDLERS_H */
