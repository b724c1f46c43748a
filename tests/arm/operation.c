/* Runs one operation with one kernel on one thread, for instruction_counts.py.
 *
 *     operation forward|backward|decode KERNEL f32|f16|bf16 CALLS
 *
 * forward, backward: 2 heads, 128 rows, head_dim 64. decode: 2 rows of one key head, 512 keys, head_dim 64. The values
 * of the tensors are small multiples of 1/8, which all types represent. */
#include <libflash.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kHeads = 2, kRows = 128, kKeys = 512, kDim = 64, kElements = kHeads * kKeys * kDim };

static flash_dtype_t dtype;

/* The bits of a small number; the three types have the sign, the exponent and the fraction in the same order. */
static void put(void *data, int64_t i, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t top = (uint16_t)(bits >> 16);
    const uint16_t exponent = (uint16_t)(((bits >> 23 & 0xff) - 112) << 10);
    const uint16_t half = value == 0 ? 0 : (uint16_t)((bits >> 16 & 0x8000) | exponent | (bits >> 13 & 0x3ff));
    if (dtype == FLASH_DTYPE_FLOAT32)
        ((float *)data)[i] = value;
    else
        ((uint16_t *)data)[i] = dtype == FLASH_DTYPE_FLOAT16 ? half : top;
}

/* (1, rows, heads, kDim) with values. */
static flash_tensor_t tensor(int64_t rows, int64_t heads, uint32_t seed) {
    flash_tensor_t t = {calloc(kElements, sizeof(float)), dtype, FLASH_DEVICE_CPU, 0, 4, {1, rows, heads, kDim}, {0}};
    t.stride[0] = rows * heads * kDim, t.stride[1] = heads * kDim, t.stride[2] = kDim, t.stride[3] = 1;
    for (int64_t i = 0; i < rows * heads * kDim; ++i) {
        seed = seed * 1664525u + 1013904223u;
        put(t.data, i, (float)(seed >> 28) / 8 - 1);
    }
    return t;
}

static flash_tensor_t statistics(int64_t heads, int64_t rows) {
    const flash_tensor_t t = {calloc(kElements, sizeof(float)), FLASH_DTYPE_FLOAT32, FLASH_DEVICE_CPU, 0, 3, {1, heads, rows},
                              {heads * rows, rows, 1}};
    return t;
}

static void must(flash_status_t status) {
    if (status == FLASH_STATUS_OK) return;
    fprintf(stderr, "%s: %s\n", flash_status_name(status), flash_last_error());
    exit(1);
}

static void *workspace(size_t bytes) {
    char *block = malloc(bytes + 255);
    return block + (256 - (uintptr_t)block % 256) % 256;
}

static void attention(int backward, const char *kernel, int calls) {
    const flash_tensor_t q = tensor(kRows, kHeads, 1), k = tensor(kRows, kHeads, 2), v = tensor(kRows, kHeads, 3);
    const flash_tensor_t dout = tensor(kRows, kHeads, 4), out = tensor(kRows, kHeads, 5), lse = statistics(kHeads, kRows);
    const flash_tensor_t dq = tensor(kRows, kHeads, 6), dk = tensor(kRows, kHeads, 7), dv = tensor(kRows, kHeads, 8);
    flash_attention_options_t options = FLASH_ATTENTION_OPTIONS_INIT;
    size_t bytes = 0;
    options.num_threads = 1;
    if (!backward) options.kernel = kernel;
    must(flash_attention_forward_workspace_size(&q, &k, &v, &out, &lse, &options, &bytes));
    void *space = workspace(bytes);
    for (int i = 0; i < (backward ? 1 : calls); ++i)
        must(flash_attention_forward(&q, &k, &v, &out, &lse, &options, space, bytes, NULL));
    if (!backward) return;
    options.kernel = kernel;
    must(flash_attention_backward_workspace_size(&dout, &q, &k, &v, &out, &lse, &dq, &dk, &dv, &options, &bytes));
    space = workspace(bytes);
    for (int i = 0; i < calls; ++i)
        must(flash_attention_backward(&dout, &q, &k, &v, &out, &lse, &dq, &dk, &dv, &options, space, bytes, NULL));
}

static void decode(const char *kernel, int calls) {
    const flash_tensor_t q = tensor(1, kHeads, 1), k = tensor(kKeys, 1, 2), v = tensor(kKeys, 1, 3), out = tensor(1, kHeads, 4);
    flash_decode_options_t options = FLASH_DECODE_OPTIONS_INIT;
    size_t bytes = 0;
    options.num_threads = 1, options.kernel = kernel;
    must(flash_attention_decode_workspace_size(&q, &k, &v, &out, NULL, &options, &bytes));
    void *space = workspace(bytes);
    for (int i = 0; i < calls; ++i) must(flash_attention_decode(&q, &k, &v, &out, NULL, &options, space, bytes, NULL));
}

int main(int argc, char **argv) {
    if (argc != 5) return puts("operation forward|backward|decode KERNEL f32|f16|bf16 CALLS"), 2;
    dtype = !strcmp(argv[3], "f32") ? FLASH_DTYPE_FLOAT32 : !strcmp(argv[3], "f16") ? FLASH_DTYPE_FLOAT16 : FLASH_DTYPE_BFLOAT16;
    if (strcmp(argv[1], "decode") == 0)
        decode(argv[2], atoi(argv[4]));
    else
        attention(strcmp(argv[1], "backward") == 0, argv[2], atoi(argv[4]));
    return 0;
}
