// FlashAttention-1 backward, Algorithm 4 of the paper (arXiv 2205.14135), with the split-K warps of its published kernels: the
// outer loop is over key tiles, the inner one over query tiles. dK and dV of a key tile are in registers; each warp has keys of
// its own. Where its time goes, besides the five products that FlashAttention-2 has as well:
//   - dQ is in global memory: dQ of every query tile is read, added to and written once for each key tile;
//   - the warps share the keys of a tile, so each has a partial sum of the tile's dQ. These are added up in shared memory
//     (partial_sums.cuh), and every warp reads all of Q and dO for its few keys;
//   - row maximum and row sum are read instead of one logsumexp, and the probabilities are divided by the sum;
//   - a whole head is computed by one thread block. `splits` > 1 shares the key tiles of a head among thread blocks, which then
//     add to dQ atomically.
// delta = rowsum(dO * O) is computed once in advance, as in the later published kernels; the paper's algorithm computes it again
// for each key tile.
#include "flash1.cuh"

namespace baselines::BASELINE_TYPE {

constexpr int kRowsOfWarps = 8, kDeltaThreads = kRowsOfWarps * 32;

template <int kHeadDim>
__global__ void __launch_bounds__(kDeltaThreads) flash1_delta_kernel(Problem p) {
    const int row = blockIdx.x * kRowsOfWarps + threadIdx.x / 32, head = blockIdx.y, lane = threadIdx.x % 32;
    if (row >= p.seqlen) return;
    const int64_t place = int64_t{row} * p.heads * kHeadDim;
    const T* out = head_rows(static_cast<const T*>(p.out), head, p.heads, p.seqlen, kHeadDim) + place;
    const T* dout = head_rows(static_cast<const T*>(p.dout), head, p.heads, p.seqlen, kHeadDim) + place;
    float sum = 0.0f, x[8], y[8];
    if (lane < kHeadDim / 8) {
        widen(x, reinterpret_cast<const uint4*>(out)[lane]);
        widen(y, reinterpret_cast<const uint4*>(dout)[lane]);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum += x[e] * y[e];
    }
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0) p.delta[int64_t{head} * p.statistics_pitch + row] = sum;
}

template <int kHeadDim, int kBlockM, int kBlockN, int kWarps>
struct Flash1Backward {
    static constexpr int kThreads = kWarps * 32, kSlabs = kBlockM / 16;
    static constexpr int kKeys = kBlockN / kWarps, kKeySlabs = kKeys / 16;  // of a warp
    using QTile = SharedTile<kBlockM, kHeadDim>;
    using KvTile = SharedTile<kBlockN, kHeadDim>;
    using ScoreTile = SharedTile<kBlockN, kBlockM>;  // transposed
    using Sums = PartialSums<kBlockM, kWarps>;
    static constexpr int kStatisticBytes = kBlockM * 4, kStageBytes = 2 * QTile::kBytes + 3 * kStatisticBytes;
    static constexpr int kStagesAt = 2 * KvTile::kBytes, kScoresAt = kStagesAt + 2 * kStageBytes,
                         kSumsAt = kScoresAt + ScoreTile::kBytes;
    // dQ so far, in two stages: for each thread the quads (4 channels) that it adds to.
    static constexpr int kChunks = kHeadDim / kChannels, kQuads = kChunks * Sums::kPasses * 2;
    static constexpr int kRunningBytes = kQuads * kThreads * 16, kRunningAt = kSumsAt + Sums::kBytes;
    static constexpr int kSharedBytes = kRunningAt + 2 * kRunningBytes;

    const Problem& p;
    char* shared;
    Tiles<kBlockM, kBlockN> tiles;
    int64_t first;  // offset of the head's first element in q, k, v, dout ...
    int head, thread, warp, lane;

    using Gradient = float[kKeySlabs][kHeadDim / 8][4];
    using Scores = float[kKeySlabs][kBlockM / 8][4];
    using Fragments = uint32_t[kBlockM / 16][kKeySlabs][4];

    __device__ __forceinline__ Flash1Backward(const Problem& problem, char* shared_memory) : p(problem), shared(shared_memory) {
        head = blockIdx.y;
        thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
        tiles = {p.seqlen, p.causal};
        first = head_offset(head, p.heads, p.seqlen, kHeadDim);
    }

    template <class Element, class Tensor>
    __device__ __forceinline__ Element* rows_of(Tensor* tensor) const {
        return static_cast<Element*>(tensor) + first;
    }
    __device__ __forceinline__ uint32_t smem() const { return shared_address(shared); }
    __device__ __forceinline__ uint32_t q_smem(int stage) const { return smem() + kStagesAt + stage * kStageBytes; }
    __device__ __forceinline__ uint32_t dout_smem(int stage) const { return q_smem(stage) + QTile::kBytes; }
    __device__ __forceinline__ uint32_t scores_smem() const { return smem() + kScoresAt; }
    __device__ __forceinline__ float* partial() const { return reinterpret_cast<float*>(shared + kSumsAt); }
    __device__ __forceinline__ int64_t stride() const { return int64_t{p.heads} * kHeadDim; }

    __device__ __forceinline__ void load_keys(int key) const {
        KvTile::template load_async<kThreads>(smem(), rows_of<const T>(p.k), stride(), key * kBlockN, p.seqlen, kHeadDim, thread);
        KvTile::template load_async<kThreads>(smem() + KvTile::kBytes, rows_of<const T>(p.v), stride(), key * kBlockN, p.seqlen,
                                              kHeadDim, thread);
    }
    __device__ __forceinline__ void load_queries(int stage, int query, int key) const {
        if (query < tiles.queries()) {
            QTile::template load_async<kThreads>(q_smem(stage), rows_of<const T>(p.q), stride(), query * kBlockM, p.seqlen,
                                                 kHeadDim, hide_from_compiler(thread));
            QTile::template load_async<kThreads>(dout_smem(stage), rows_of<const T>(p.dout), stride(), query * kBlockM, p.seqlen,
                                                 kHeadDim, hide_from_compiler(thread));
            load_statistics(stage, query);
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                const bool known = key > 0 && p.splits == 1 && exists(query, i / 2 % Sums::kPasses);
                cp_async_16(shared_address(running(stage, i)), place(query, i), known);
            }
        }
        cp_async_commit();
    }

    // One of the statistics of this lane's columns: two queries in each 8-column block.
    enum Statistic { kMax, kSum, kDelta };
    using Statistics = float[kBlockM / 8][2];
    __device__ __forceinline__ void read_statistics(Statistics& x, int stage, Statistic statistic) const {
        const int at = kStagesAt + stage * kStageBytes + 2 * QTile::kBytes + statistic * kStatisticBytes;
#pragma unroll
        for (int n = 0; n < kBlockM / 8; ++n) {
            const float2 pair = reinterpret_cast<const float2*>(shared + at)[n * 4 + lane % 4];
            x[n][0] = pair.x, x[n][1] = pair.y;
        }
    }
    // statistics_pitch is a multiple of the tile's rows: reading past the last row is allowed.
    __device__ __forceinline__ void load_statistics(int stage, int query) const {
        constexpr int kCopies = kStatisticBytes / 16;
        if (thread >= 3 * kCopies) return;
        const float* statistics = thread < kCopies ? p.row_max : (thread < 2 * kCopies ? p.row_sum : p.delta);
        cp_async_16(q_smem(stage) + 2 * QTile::kBytes + thread * 16,
                    statistics + int64_t{head} * p.statistics_pitch + query * kBlockM + thread % kCopies * 4, true);
    }

    // (this warp's rows of a K-like tile) (all rows of a Q-like tile)^T
    __device__ __forceinline__ void multiply_scores(Scores& s, uint32_t keys, uint32_t queries) const {
        const auto a_address = KvTile::a_address(keys, warp * kKeys, hide_from_compiler(lane));
        const auto b_address = QTile::b_address(queries, hide_from_compiler(lane));
        auto product = make_product<T, kHeadDim / 16, 1, kKeySlabs, kBlockM / 8>(
            [=](int step, uint32_t (&f)[kKeySlabs][4]) {
#pragma unroll
                for (int a = 0; a < kKeySlabs; ++a) ldmatrix_x4(f[a], a_address.at(a * 16, step));
            },
            [=](int step, int pair, uint32_t (&f)[4]) { ldmatrix_x4(f, b_address.at(pair * 16, step)); });
        clear(s);
        product.start();
        product.add_to(s, [](int) {});
    }

    // gradient += (this warp's scores) (rows of a Q-like tile)
    __device__ __forceinline__ void add_product(Gradient& gradient, const Fragments& scores, uint32_t rows) const {
        const auto b_address = QTile::b_trans_address(rows, hide_from_compiler(lane));
        auto product = make_product<T, kBlockM / 16, 1, kKeySlabs, kHeadDim / 8>(
            [&](int step, uint32_t (&f)[kKeySlabs][4]) {
#pragma unroll
                for (int i = 0; i < kKeySlabs * 4; ++i) f[i / 4][i % 4] = scores[step][i / 4][i % 4];
            },
            [=](int step, int pair, uint32_t (&f)[4]) { ldmatrix_x4_trans(f, b_address.at(step * 16, pair)); });
        product.start();
        product.add_to(gradient, [](int) {});
    }

    __device__ __forceinline__ static void round(Fragments& f, const Scores& s) {
#pragma unroll
        for (int step = 0; step < kBlockM / 16; ++step)
#pragma unroll
            for (int a = 0; a < kKeySlabs; ++a) to_fragment<T>(f[step][a], s[a][2 * step], s[a][2 * step + 1]);
    }

    // P^T from scores.
    __device__ __forceinline__ void exponentiate(Scores& s, int stage) const {
        const float scale_log2 = p.softmax_scale * kLog2e;
        Statistics base, sum;
        read_statistics(base, stage, kMax);
        read_statistics(sum, stage, kSum);
#pragma unroll
        for (int n = 0; n < kBlockM / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float factor = __fdividef(1.0f, sum[n][e]);
#pragma unroll
                for (int a = 0; a < kKeySlabs; ++a)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float& x = s[a][n][2 * r + e];
                        x = exp2_approx(fmaf(x, scale_log2, -base[n][e])) * factor;
                    }
            }
    }

    __device__ __forceinline__ void mask(Scores& s, int query, int key) const {
        const int first_col = key * kBlockN + warp * kKeys + lane / 4, first_row = query * kBlockM + lane % 4 * 2;
#pragma unroll
        for (int a = 0; a < kKeySlabs; ++a)
#pragma unroll
            for (int n = 0; n < kBlockM / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int col = first_col + a * 16 + e / 2 * 8, row = first_row + n * 8 + e % 2;
                    if (col >= p.seqlen || row >= p.seqlen || (p.causal && col > row)) s[a][n][e] = 0.0f;
                }
    }

    // Writes dS^T to this warp's rows of the score tile, from where it is read transposed.
    __device__ __forceinline__ void share(const Fragments& f) const {
        __syncwarp();
#pragma unroll
        for (int step = 0; step < kBlockM / 16; ++step)
#pragma unroll
            for (int a = 0; a < kKeySlabs; ++a)
                ScoreTile::store_fragment(scores_smem(), warp * kKeys + a * 16, step * 2, lane, f[step][a]);
        __syncwarp();
    }

    // This warp's part of dS K, for 32 channels: more at a time would not fit in the registers beside dK and dV.
    static constexpr int kPart = 32;
    __device__ __forceinline__ void multiply_dq(float (&c)[kSlabs][kPart / 8][4], int part) const {
        const auto a_address =
            ScoreTile::a_trans_address(scores_smem() + warp * kKeys * ScoreTile::kRowBytes, hide_from_compiler(lane));
        const auto b_address = KvTile::b_trans_address(smem() + warp * kKeys * KvTile::kRowBytes, hide_from_compiler(lane));
        auto product = make_product<T, kKeys / 16, 1, kSlabs, kPart / 8>(
            [=](int step, uint32_t (&f)[kSlabs][4]) {
#pragma unroll
                for (int a = 0; a < kSlabs; ++a) ldmatrix_x4_trans(f[a], a_address.at(step * 16, a));
            },
            [=](int step, int pair, uint32_t (&f)[4]) {
                ldmatrix_x4_trans(f, b_address.at(step * 16, part * (kPart / 16) + pair));
            });
        clear(c);
        product.start();
        product.add_to(c, [](int) {});
    }

    __device__ __forceinline__ void step(int stage, int query, int key, Gradient& dk, Gradient& dv) const {
        Scores s;
        Fragments f;
        multiply_scores(s, smem(), q_smem(stage));
        exponentiate(s, stage);
        if (tiles.is_edge(query, key)) mask(s, query, key);
        round(f, s);
        add_product(dv, f, dout_smem(stage));
        multiply_scores(s, smem() + KvTile::kBytes, dout_smem(stage));
        Statistics delta;
        read_statistics(delta, stage, kDelta);
#pragma unroll
        for (int a = 0; a < kKeySlabs; ++a)
#pragma unroll
            for (int n = 0; n < kBlockM / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[a][n][e] = product_or_hidden(rounded(f, a, n, e), s[a][n][e] - delta[n][e % 2]);
        round(f, s);
        share(f);
        add_product(dk, f, q_smem(stage));
#pragma unroll 1
        for (int chunk = 0; chunk < kChunks; ++chunk) add_to_dq(stage, query, key, chunk);
    }

    // An element of the rounded probabilities, which take half the registers while dP is computed.
    __device__ __forceinline__ static float rounded(const Fragments& f, int a, int n, int e) {
        return to_float(reinterpret_cast<const T*>(&f[n / 2][a][n % 2 * 2 + e / 2])[e % 2]);
    }
    // Hidden pairs are 0, whatever their delta is.
    __device__ __forceinline__ static float product_or_hidden(float probability, float x) {
        return probability == 0.0f ? 0.0f : probability * x;
    }

    __device__ __forceinline__ void add_to_dq(int stage, int query, int key, int chunk) const {
        if (chunk > 0) __syncthreads();  // the parts of the previous chunk have been read
#pragma unroll
        for (int part = 0; part < kChannels / kPart; ++part) {
            float c[kSlabs][kPart / 8][4];
            multiply_dq(c, chunk * (kChannels / kPart) + part);
            Sums::store(partial() + part * kPart, warp, hide_from_compiler(lane), c);
        }
        __syncthreads();  // the parts of all warps are written
        const bool last = key == tiles.last_key(query);
#pragma unroll
        for (int i = chunk * Sums::kPasses * 2; i < (chunk + 1) * Sums::kPasses * 2; ++i) {
            const int pass = i / 2 % Sums::kPasses, quad = i % 2;
            float4 sum = *running(stage, i);
            Sums::add(sum, partial(), pass, quad, hide_from_compiler(thread), [](int) { return 1.0f; });
            if (exists(query, pass)) store_sum(sum, query, i, last);
        }
    }
    __device__ __forceinline__ void store_sum(const float4& sum, int query, int i, bool last) const {
        if (p.splits > 1) {
            float* x = reinterpret_cast<float*>(place(query, i));
            atomicAdd(x, sum.x), atomicAdd(x + 1, sum.y), atomicAdd(x + 2, sum.z), atomicAdd(x + 3, sum.w);
        } else if (last) {
            store_quad(rows_of<T>(p.dq) + row_of(query, i) * stride() + channel_of(i), scaled(sum, p.softmax_scale));
        } else {
            *place(query, i) = sum;
        }
    }

    // Quad i of this thread in a query tile: its row and channel, and its place in shared memory and in p.dq_sums.
    __device__ __forceinline__ int64_t row_of(int query, int i) const {
        return query * kBlockM + Sums::row_of(i / 2 % Sums::kPasses, hide_from_compiler(thread));
    }
    __device__ __forceinline__ int channel_of(int i) const {
        return i / (Sums::kPasses * 2) * kChannels + Sums::channel_of(i % 2, hide_from_compiler(thread));
    }
    __device__ __forceinline__ bool exists(int query, int pass) const {
        return query * kBlockM + Sums::row_of(pass, thread) < p.seqlen;
    }
    __device__ __forceinline__ float4* running(int stage, int i) const {
        return reinterpret_cast<float4*>(shared + kRunningAt + stage * kRunningBytes) + i * kThreads + thread;
    }
    __device__ __forceinline__ float4* place(int query, int i) const {
        return reinterpret_cast<float4*>(p.dq_sums + (int64_t{head} * p.seqlen + row_of(query, i)) * kHeadDim + channel_of(i));
    }

    // Stores through this warp's own rows of K or V in shared memory, which no other warp reads.
    __device__ __forceinline__ void store(void* tensor, const Gradient& gradient, int offset, int key, float factor) const {
#pragma unroll
        for (int a = 0; a < kKeySlabs; ++a)
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    store_shared(smem() + offset + KvTile::offset(warp * kKeys + a * 16 + r * 8 + lane / 4, n) + lane % 4 * 4,
                                 pack_pair(gradient[a][n][2 * r] * factor, gradient[a][n][2 * r + 1] * factor, T()));
        __syncthreads();
        KvTile::template store<kThreads>(shared + offset, rows_of<T>(tensor), stride(), key * kBlockN, p.seqlen, kHeadDim, true,
                                         thread);
    }

    // Key tiles of this thread block: every splits-th.
    __device__ __forceinline__ void run() const {
#pragma unroll 1
        for (int key = blockIdx.x; key < tiles.keys(); key += p.splits) {
            Gradient dk, dv;
            clear(dk);
            clear(dv);
            int stage = 0, query = tiles.first_query(key);
            __syncthreads();  // the tiles of the previous pass are no longer read
            load_keys(key);
            load_queries(stage, query, key);
#pragma unroll 1
            for (; query < tiles.queries(); ++query) {
                cp_async_wait<0>();
                __syncthreads();  // the query tile has arrived; the previous one and its parts are no longer read
                load_queries(stage ^ 1, query + 1, key);
                step(stage, query, key, dk, dv);
                stage ^= 1;
            }
            cp_async_wait<0>();
            __syncwarp();
            store(p.dv, dv, KvTile::kBytes, key, 1.0f);
            store(p.dk, dk, 0, key, p.softmax_scale);
        }
    }
};

template <int kHeadDim, int kBlockM, int kBlockN, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1) flash1_backward_kernel(const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) char shared[];
    const Flash1Backward<kHeadDim, kBlockM, kBlockN, kWarps> body(p, shared);
    body.run();
}

// The sums that several thread blocks added to, rounded.
template <int kHeadDim>
__global__ void __launch_bounds__(kDeltaThreads) flash1_convert_kernel(Problem p) {
    constexpr int kQuads = kHeadDim / 4, kRows = kDeltaThreads / kQuads;
    const int row = blockIdx.x * kRows + threadIdx.x / kQuads, quad = threadIdx.x % kQuads;
    if (row >= p.seqlen) return;
    const float* sums = p.dq_sums + (int64_t{blockIdx.y} * p.seqlen + row) * kHeadDim;
    T* dq = head_rows(static_cast<T*>(p.dq), blockIdx.y, p.heads, p.seqlen, kHeadDim) + int64_t{row} * p.heads * kHeadDim;
    store_quad(dq + quad * 4, scaled(reinterpret_cast<const float4*>(sums)[quad], p.softmax_scale));
}

template <int kHeadDim, int kBlockM, int kBlockN, int kWarps>
int flash1_backward(const Problem& p, void* stream) {
    using Body = Flash1Backward<kHeadDim, kBlockM, kBlockN, kWarps>;
    const dim3 rows(tiles_of(p.seqlen, kRowsOfWarps), p.heads_in_all());
    const size_t sum_bytes = sizeof(float) * p.heads_in_all() * p.seqlen * kHeadDim;
    int error = enqueue(flash1_delta_kernel<kHeadDim>, rows, kDeltaThreads, 0, stream, p);
    if (!error && p.splits > 1) error = cudaMemsetAsync(p.dq_sums, 0, sum_bytes, static_cast<cudaStream_t>(stream));
    if (!error)
        error = enqueue(flash1_backward_kernel<kHeadDim, kBlockM, kBlockN, kWarps>, dim3(p.splits, p.heads_in_all()),
                        Body::kThreads, Body::kSharedBytes, stream, p);
    if (!error && p.splits > 1)
        error = enqueue(flash1_convert_kernel<kHeadDim>,
                        dim3(tiles_of(p.seqlen, kDeltaThreads / (kHeadDim / 4)), p.heads_in_all()), kDeltaThreads, 0, stream, p);
    return error;
}

}  // namespace baselines::BASELINE_TYPE

// The fastest tiles (queries x keys) of those tried.
BASELINE_EXPORT(flash1_backward)(const baselines::Problem* p, void* stream) {
    using namespace baselines::BASELINE_TYPE;
    if (p->head_dim == 64) return flash1_backward<64, 32, 128, 4>(*p, stream);
    return p->head_dim == 128 ? flash1_backward<128, 32, 128, 8>(*p, stream) : kUnknown;
}
