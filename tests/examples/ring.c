/* Ring attention, forward and backward, with the C interface alone: each process has some tokens of a sequence, and keys and
 * values are sent from process to process. The processes are on this machine and send through pipes. On several GPUs only
 * exchange() is another one: ncclGroupStart, ncclSend to the next rank, ncclRecv from the one before, ncclGroupEnd.
 *
 *     cc -std=c99 ring.c $(pkg-config --cflags --libs libflash) -lm
 */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include <libflash.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = 3, TOKENS = 40, ALL = RANKS * TOKENS, HQ = 4, HK = 2, D = 32 }; /* TOKENS: of a rank */
enum { ROWS = TOKENS * HQ * D, KEYS = TOKENS * HK * D, LSE = TOKENS * HQ };    /* numbers of a rank */

/* Of the whole sequence; memory that all processes share. A rank reads and writes its own tokens only. */
typedef struct whole_t {
    float q[RANKS * ROWS], dout[RANKS * ROWS], out[RANKS * ROWS], dq[RANKS * ROWS];
    float k[RANKS * KEYS], v[RANKS * KEYS], dk[RANKS * KEYS], dv[RANKS * KEYS];
    float lse[RANKS][LSE]; /* (heads, tokens) of each rank */
} whole_t;

typedef struct pair_t {
    float k[KEYS], v[KEYS]; /* keys and values, or their gradients */
} pair_t;

static void must(int good, const char *what) {
    if (good) return;
    fprintf(stderr, "%s: %s\n", what, flash_last_error());
    exit(1);
}

static flash_tensor_t tensor(float *data, int64_t tokens, int64_t heads) {
    flash_tensor_t t = {
        data, FLASH_DTYPE_FLOAT32, FLASH_DEVICE_CPU, 0, 4, {1, tokens, heads, D}, {tokens * heads * D, heads * D, D, 1}};
    return t;
}

static flash_tensor_t row_statistics(float *data, int64_t tokens) {
    flash_tensor_t t = {data, FLASH_DTYPE_FLOAT32, FLASH_DEVICE_CPU, 0, 3, {1, HQ, tokens}, {HQ * tokens, tokens, 1}};
    return t;
}

static void *workspace(size_t bytes) {
    void *block = NULL;
    must(bytes == 0 || posix_memalign(&block, 256, bytes) == 0, "workspace");
    return block;
}

/* Causal attention of `rows` query tokens that begin at row_begin over keys that begin at column_begin of the sequence. */
static void forward(float *q, float *k, float *v, float *out, float *lse, int64_t rows, int64_t keys, int64_t row_begin,
                    int64_t column_begin, uint32_t flags) {
    const flash_tensor_t tq = tensor(q, rows, HQ), tk = tensor(k, keys, HK), tv = tensor(v, keys, HK), to = tensor(out, rows, HQ);
    const flash_tensor_t tlse = row_statistics(lse, rows);
    flash_attention_options_t options = FLASH_ATTENTION_OPTIONS_INIT;
    size_t bytes;
    options.flags = FLASH_FLAG_CAUSAL | FLASH_FLAG_POSITIONS | flags;
    options.row_begin = row_begin;
    options.column_begin = column_begin;
    options.num_threads = 1;
    must(!flash_attention_forward_workspace_size(&tq, &tk, &tv, &to, &tlse, &options, &bytes), "forward");
    void *block = workspace(bytes);
    must(!flash_attention_forward(&tq, &tk, &tv, &to, &tlse, &options, block, bytes, NULL), "forward");
    free(block);
}

/* The gradients of these keys, and the share of these keys in dq, are added; out and lse are those of the whole rows. */
static void backward(float *dout, float *q, float *k, float *v, float *out, float *lse, float *dq, float *dk, float *dv,
                     int64_t rows, int64_t keys, int64_t row_begin, int64_t column_begin) {
    const flash_tensor_t tdo = tensor(dout, rows, HQ), tq = tensor(q, rows, HQ), tk = tensor(k, keys, HK),
                         tv = tensor(v, keys, HK);
    const flash_tensor_t to = tensor(out, rows, HQ), tdq = tensor(dq, rows, HQ), tdk = tensor(dk, keys, HK),
                         tdv = tensor(dv, keys, HK);
    const flash_tensor_t tlse = row_statistics(lse, rows);
    flash_attention_options_t options = FLASH_ATTENTION_OPTIONS_INIT;
    size_t bytes;
    options.flags = FLASH_FLAG_CAUSAL | FLASH_FLAG_POSITIONS | FLASH_FLAG_ADD;
    options.row_begin = row_begin;
    options.column_begin = column_begin;
    options.num_threads = 1;
    must(!flash_attention_backward_workspace_size(&tdo, &tq, &tk, &tv, &to, &tlse, &tdq, &tdk, &tdv, &options, &bytes),
         "backward");
    void *block = workspace(bytes);
    must(!flash_attention_backward(&tdo, &tq, &tk, &tv, &to, &tlse, &tdq, &tdk, &tdv, &options, block, bytes, NULL), "backward");
    free(block);
}

static int pipes[RANKS][2]; /* from each rank to the next */

static void send_all(int to, const char *data, size_t bytes) {
    for (ssize_t n; bytes > 0; data += n, bytes -= (size_t)n) must((n = write(to, data, bytes)) > 0, "write");
}

static void receive_all(int from, char *data, size_t bytes) {
    for (ssize_t n; bytes > 0; data += n, bytes -= (size_t)n) must((n = read(from, data, bytes)) > 0, "read");
}

/* Sends a pair to the next rank and replaces it by that of the rank before. The first rank receives first, so that no rank waits
 * for ever where a pipe has no room for a whole pair. */
static void exchange(int rank, pair_t *pair) {
    const int to = pipes[rank][1], from = pipes[(rank + RANKS - 1) % RANKS][0];
    pair_t received;
    if (rank == 0) receive_all(from, (char *)&received, sizeof received);
    send_all(to, (const char *)pair, sizeof *pair);
    if (rank != 0) receive_all(from, (char *)&received, sizeof received);
    *pair = received;
}

static void run_rank(int rank, whole_t *w) {
    float *q = w->q + rank * ROWS, *out = w->out + rank * ROWS, *dout = w->dout + rank * ROWS, *dq = w->dq + rank * ROWS;
    pair_t keys, gradients;
    memcpy(keys.k, w->k + rank * KEYS, sizeof keys.k);
    memcpy(keys.v, w->v + rank * KEYS, sizeof keys.v);
    for (int step = 0; step < RANKS; ++step) {
        const int source = (rank + RANKS - step) % RANKS; /* whose keys these are; a causal rank sees those of earlier ones */
        if (source <= rank)
            forward(q, keys.k, keys.v, out, w->lse[rank], TOKENS, TOKENS, rank * TOKENS, source * TOKENS,
                    step ? FLASH_FLAG_CONTINUE : 0);
        exchange(rank, &keys); /* after the last step each process has its own keys again */
    }
    memset(&gradients, 0, sizeof gradients);
    for (int step = 0; step < RANKS; ++step) {
        const int source = (rank + RANKS - step) % RANKS;
        if (source <= rank)
            backward(dout, q, keys.k, keys.v, out, w->lse[rank], dq, gradients.k, gradients.v, TOKENS, TOKENS, rank * TOKENS,
                     source * TOKENS);
        exchange(rank, &keys);
        exchange(rank, &gradients); /* they are sent on like their keys */
    }
    memcpy(w->dk + rank * KEYS, gradients.k, sizeof gradients.k);
    memcpy(w->dv + rank * KEYS, gradients.v, sizeof gradients.v);
}

static void fill(float *x, int n, uint32_t seed) {
    for (int i = 0; i < n; ++i) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / (float)(1 << 23) - 1.0f;
    }
}

static int check(const char *name, const float *x, const float *expected, int n) {
    double worst = 0;
    for (int i = 0; i < n; ++i) {
        const double error = fabs((double)x[i] - expected[i]);
        if (!(error <= worst)) worst = error; /* true for NaN */
    }
    const int good = worst <= 2e-6;
    printf("%-4s largest error %.1e %s\n", name, worst, good ? "" : "WRONG");
    return good;
}

/* The same as one call. */
static int compare(whole_t *w) {
    static float out[RANKS * ROWS], lse[RANKS * LSE], dq[RANKS * ROWS], dk[RANKS * KEYS], dv[RANKS * KEYS];
    forward(w->q, w->k, w->v, out, lse, ALL, ALL, 0, 0, 0);
    backward(w->dout, w->q, w->k, w->v, out, lse, dq, dk, dv, ALL, ALL, 0, 0);
    int good = check("out", w->out, out, RANKS * ROWS) & check("dq", w->dq, dq, RANKS * ROWS);
    good &= check("dk", w->dk, dk, RANKS * KEYS) & check("dv", w->dv, dv, RANKS * KEYS);
    return good;
}

int main(void) {
    whole_t *w = mmap(NULL, sizeof *w, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(w != MAP_FAILED, "mmap");
    fill(w->q, RANKS * ROWS, 1);
    fill(w->k, RANKS * KEYS, 2);
    fill(w->v, RANKS * KEYS, 3);
    fill(w->dout, RANKS * ROWS, 4);
    for (int rank = 0; rank < RANKS; ++rank) must(pipe(pipes[rank]) == 0, "pipe");
    for (int rank = 0; rank < RANKS; ++rank) {
        const pid_t child = fork();
        must(child >= 0, "fork");
        if (child == 0) {
            run_rank(rank, w);
            exit(0);
        }
    }
    int good = 1, status;
    while (wait(&status) > 0) good &= status == 0;
    if (!good) return puts("a rank failed: WRONG"), 1;
    good = compare(w);
    printf("%d ranks of %d tokens: %s\n", RANKS, TOKENS, good ? "good" : "WRONG");
    return good ? 0 : 1;
}
