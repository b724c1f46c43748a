/* Attention forward and backward from C99: causal, four query heads that share two key heads, checked against plain loops.
 *
 *     cc -std=c99 attention.c $(pkg-config --cflags --libs libflash) -lm
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */
#include <libflash.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { B = 2, SQ = 37, SK = 53, HQ = 4, HK = 2, D = 24, DV = 16 };
enum { NQ = B * SQ * HQ * D, NK = B * SK * HK * D, NV = B * SK * HK * DV, NO = B * SQ * HQ * DV, NL = B * HQ * SQ };

static float q[NQ], k[NK], v[NV], out[NO], lse[NL];
static float dout[NO], dq[NQ], dk[NK], dv[NV];
static double true_out[NO], true_lse[NL], true_dq[NQ], true_dk[NK], true_dv[NV];

static void fill(float *x, int n, uint32_t seed) {
    for (int i = 0; i < n; ++i) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / (float)(1 << 23) - 1.0f;
    }
}

/* A contiguous float32 tensor on the CPU. */
static flash_tensor_t tensor(float *data, int ndim, int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
    const int64_t shape[4] = {n0, n1, n2, n3};
    flash_tensor_t t;
    memset(&t, 0, sizeof t);
    t.data = data;
    t.dtype = FLASH_DTYPE_FLOAT32;
    t.ndim = ndim;
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; --i) {
        t.shape[i] = shape[i];
        t.stride[i] = stride;
        stride *= shape[i];
    }
    return t;
}

static void must(flash_status_t status, const char *what) {
    if (status == FLASH_STATUS_OK) return;
    fprintf(stderr, "%s: %s: %s\n", what, flash_status_name(status), flash_last_error());
    exit(1);
}

static void *workspace(size_t bytes) {
    void *block = NULL;
    if (bytes && posix_memalign(&block, 256, bytes) != 0) exit(1);
    return block;
}

/* The definition, one row of queries at a time. */
static void reference(void) {
    const double scale = 1.0 / sqrt(D);
    for (int b = 0; b < B; ++b)
        for (int h = 0; h < HQ; ++h)
            for (int i = 0; i < SQ; ++i) {
                const int g = h / (HQ / HK), last = i + SK - SQ; /* causal, aligned bottom-right */
                const float *qi = q + ((b * SQ + i) * HQ + h) * D;
                const float *doi = dout + ((b * SQ + i) * HQ + h) * DV;
                double *oi = true_out + ((b * SQ + i) * HQ + h) * DV;
                double p[SK], sum = 0, delta = 0;
                for (int j = 0; j <= last; ++j) {
                    double s = 0;
                    for (int c = 0; c < D; ++c) s += (double)qi[c] * k[((b * SK + j) * HK + g) * D + c];
                    sum += p[j] = exp(scale * s);
                }
                true_lse[(b * HQ + h) * SQ + i] = log(sum);
                for (int j = 0; j <= last; ++j) {
                    p[j] /= sum;
                    for (int c = 0; c < DV; ++c) oi[c] += p[j] * v[((b * SK + j) * HK + g) * DV + c];
                }
                for (int c = 0; c < DV; ++c) delta += oi[c] * doi[c];
                for (int j = 0; j <= last; ++j) {
                    double dp = 0;
                    for (int c = 0; c < DV; ++c) {
                        true_dv[((b * SK + j) * HK + g) * DV + c] += p[j] * doi[c];
                        dp += (double)doi[c] * v[((b * SK + j) * HK + g) * DV + c];
                    }
                    for (int c = 0; c < D; ++c) {
                        const double ds = scale * p[j] * (dp - delta);
                        true_dq[((b * SQ + i) * HQ + h) * D + c] += ds * k[((b * SK + j) * HK + g) * D + c];
                        true_dk[((b * SK + j) * HK + g) * D + c] += ds * qi[c];
                    }
                }
            }
}

static int check(const char *name, const float *x, const double *expected, int n) {
    double worst = 0;
    for (int i = 0; i < n; ++i) {
        const double error = fabs(x[i] - expected[i]);
        if (!(error <= worst)) worst = error; /* true for NaN */
    }
    const int good = worst <= 2e-5;
    printf("%-4s largest error %.1e %s\n", name, worst, good ? "" : "WRONG");
    return good;
}

int main(void) {
    fill(q, NQ, 1);
    fill(k, NK, 2);
    fill(v, NV, 3);
    fill(dout, NO, 4);
    const flash_tensor_t tq = tensor(q, 4, B, SQ, HQ, D), tk = tensor(k, 4, B, SK, HK, D), tv = tensor(v, 4, B, SK, HK, DV);
    const flash_tensor_t tout = tensor(out, 4, B, SQ, HQ, DV), tlse = tensor(lse, 3, B, HQ, SQ, 0);
    const flash_tensor_t tdout = tensor(dout, 4, B, SQ, HQ, DV), tdq = tensor(dq, 4, B, SQ, HQ, D);
    const flash_tensor_t tdk = tensor(dk, 4, B, SK, HK, D), tdv = tensor(dv, 4, B, SK, HK, DV);

    flash_attention_options_t options = FLASH_ATTENTION_OPTIONS_INIT;
    options.flags = FLASH_FLAG_CAUSAL;
    size_t bytes;
    must(flash_attention_forward_workspace_size(&tq, &tk, &tv, &tout, &tlse, &options, &bytes), "forward workspace");
    void *block = workspace(bytes);
    must(flash_attention_forward(&tq, &tk, &tv, &tout, &tlse, &options, block, bytes, NULL), "forward");
    free(block);

    must(flash_attention_backward_workspace_size(&tdout, &tq, &tk, &tv, &tout, &tlse, &tdq, &tdk, &tdv, &options, &bytes),
         "backward workspace");
    block = workspace(bytes);
    must(flash_attention_backward(&tdout, &tq, &tk, &tv, &tout, &tlse, &tdq, &tdk, &tdv, &options, block, bytes, NULL),
         "backward");
    free(block);

    reference();
    int good = check("out", out, true_out, NO) & check("lse", lse, true_lse, NL);
    good &= check("dq", dq, true_dq, NQ) & check("dk", dk, true_dk, NK) & check("dv", dv, true_dv, NV);

    /* An invalid call is refused with an error text and writes nothing. */
    flash_tensor_t wrong = tk;
    wrong.shape[2] = 3;
    const flash_status_t status = flash_attention_forward(&tq, &wrong, &tv, &tout, NULL, NULL, NULL, 0, NULL);
    printf("refused: %s: %s\n", flash_status_name(status), flash_last_error());
    good &= status == FLASH_STATUS_INVALID && strlen(flash_last_error()) > 0;
    printf("libflash %s, %s: %s\n", flash_version_string(), flash_cpu_isa(), good ? "good" : "WRONG");
    return good ? 0 : 1;
}
