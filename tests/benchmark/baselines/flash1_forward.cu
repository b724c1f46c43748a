// FlashAttention-1 forward, Algorithm 1 of the paper (arXiv 2205.14135), with the split-K warps of its published kernels. Where
// its time goes, besides the two products of 16-bit numbers that FlashAttention-2 has as well:
//   - the running output, row maximum and row sum are in global memory: those of every query tile are read, rescaled and written
//     once for each key tile;
//   - the warps share the keys of a tile, so each has a partial sum of the tile's output, and a maximum and a sum of its own.
//     These are combined in shared memory (partial_sums.cuh), with two barriers per tile, and every warp reads all of Q;
//   - a whole head is computed by one thread block: with fewer heads than thread blocks fit on the GPU, a part of the GPU is
//     idle. `splits` > 1 shares the query tiles of a head among thread blocks, as later releases of FlashAttention-1 did.
// Within that order of loops the kernel is optimized: the next query tile is loaded (cp.async) while this one is computed, K and
// V stay in shared memory for a whole pass, the old output is loaded before the product that it is added to, tiles above the
// diagonal are skipped, and a warp's scores stay in registers as the operand of the next product.
#include "flash1.cuh"

namespace baselines::BASELINE_TYPE {

template <int kHeadDim, int kBlockM, int kBlockN, int kWarps>
struct Flash1Forward {
    static constexpr int kThreads = kWarps * 32, kSlabs = kBlockM / 16, kChunks = kHeadDim / kChannels;
    static constexpr int kKeys = kBlockN / kWarps;  // of a warp
    using QTile = SharedTile<kBlockM, kHeadDim>;
    using KvTile = SharedTile<kBlockN, kHeadDim>;
    using Sums = PartialSums<kBlockM, kWarps>;
    static constexpr int kQueriesAt = 2 * KvTile::kBytes, kSumsAt = kQueriesAt + 2 * QTile::kBytes,
                         kStatisticsAt = kSumsAt + kChunks * Sums::kBytes;
    static constexpr int kSharedBytes = kStatisticsAt + 2 * kWarps * kBlockM * 4;

    const Problem& p;
    char* shared;
    Tiles<kBlockM, kBlockN> tiles;
    const T *q, *k, *v;
    T* out;
    float *sums, *row_max, *row_sum;
    int thread, warp, lane;

    __device__ __forceinline__ Flash1Forward(const Problem& problem, char* shared_memory) : p(problem), shared(shared_memory) {
        const int head = blockIdx.y;
        thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
        tiles = {p.seqlen, p.causal};
        q = head_rows(static_cast<const T*>(p.q), head, p.heads, p.seqlen, kHeadDim);
        k = head_rows(static_cast<const T*>(p.k), head, p.heads, p.seqlen, kHeadDim);
        v = head_rows(static_cast<const T*>(p.v), head, p.heads, p.seqlen, kHeadDim);
        out = head_rows(static_cast<T*>(p.out), head, p.heads, p.seqlen, kHeadDim);
        sums = p.out_sums + int64_t{head} * p.seqlen * kHeadDim;
        row_max = p.row_max + int64_t{head} * p.statistics_pitch;
        row_sum = p.row_sum + int64_t{head} * p.statistics_pitch;
    }

    __device__ __forceinline__ uint32_t smem() const { return shared_address(shared); }
    __device__ __forceinline__ int64_t stride() const { return int64_t{p.heads} * kHeadDim; }
    __device__ __forceinline__ float* partial(int chunk) const {
        return reinterpret_cast<float*>(shared + kSumsAt + chunk * Sums::kBytes);
    }
    // For each warp: maximum and sum of each row.
    __device__ __forceinline__ float* warp_max() const { return reinterpret_cast<float*>(shared + kStatisticsAt); }
    __device__ __forceinline__ float* warp_sum() const { return warp_max() + kWarps * kBlockM; }

    __device__ __forceinline__ void load_keys(int key) const {
        KvTile::template load_async<kThreads>(smem(), k, stride(), key * kBlockN, p.seqlen, kHeadDim, thread);
        KvTile::template load_async<kThreads>(smem() + KvTile::kBytes, v, stride(), key * kBlockN, p.seqlen, kHeadDim, thread);
    }
    __device__ __forceinline__ void load_queries(int stage, int query) const {
        if (query < tiles.queries())
            QTile::template load_async<kThreads>(smem() + kQueriesAt + stage * QTile::kBytes, q, stride(), query * kBlockM,
                                                 p.seqlen, kHeadDim, thread);
        cp_async_commit();
    }

    using Scores = float[kSlabs][kKeys / 8][4];
    using Fragments = uint32_t[kKeys / 16][kSlabs][4];

    // All of the query tile, this warp's keys.
    __device__ __forceinline__ void multiply_qk(Scores& s, int stage) const {
        const auto q_address = QTile::a_address(smem() + kQueriesAt + stage * QTile::kBytes, 0, hide_from_compiler(lane));
        const auto k_address = KvTile::b_address(smem() + warp * kKeys * KvTile::kRowBytes, hide_from_compiler(lane));
        auto product = make_product<T, kHeadDim / 16, 1, kSlabs, kKeys / 8>(
            [=](int step, uint32_t (&f)[kSlabs][4]) {
#pragma unroll
                for (int a = 0; a < kSlabs; ++a) ldmatrix_x4(f[a], q_address.at(a * 16, step));
            },
            [=](int step, int pair, uint32_t (&f)[4]) { ldmatrix_x4(f, k_address.at(pair * 16, step)); });
        clear(s);
        product.start();
        product.add_to(s, [](int) {});
    }

    __device__ __forceinline__ void mask(Scores& s, int query, int key) const {
        const int first_row = query * kBlockM + lane / 4, first_col = key * kBlockN + warp * kKeys + lane % 4 * 2;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int row = first_row + a * 16 + e / 2 * 8, col = first_col + n * 8 + e % 2;
                    if (col >= p.seqlen || (p.causal && col > row)) s[a][n][e] = -INFINITY;
                }
    }

    // The softmax over this warp's keys alone: writes the probabilities to fragments, maximum (base-2 units) and sum of each row
    // to shared memory.
    __device__ __forceinline__ void softmax(Fragments& f, Scores& s, float scale_log2) const {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float largest = -INFINITY, sum = 0.0f;
#pragma unroll
                for (int n = 0; n < kKeys / 8; ++n) largest = fmaxf(largest, fmaxf(s[a][n][2 * r], s[a][n][2 * r + 1]));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2)) * scale_log2;
                const float base = largest == -INFINITY ? 0.0f : largest;  // nothing visible: probabilities 0
#pragma unroll
                for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; ++e) {
                        s[a][n][e] = exp2_approx(fmaf(s[a][n][e], scale_log2, -base));
                        sum += s[a][n][e];
                    }
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                const int place = warp * kBlockM + a * 16 + r * 8 + lane / 4;
                if (lane % 4 == 0) warp_max()[place] = largest;
                if (lane % 4 == 1) warp_sum()[place] = sum;
            }
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step)
#pragma unroll
            for (int a = 0; a < kSlabs; ++a) to_fragment<T>(f[step][a], s[a][2 * step], s[a][2 * step + 1]);
    }

    // This warp's partial sum of 64 channels of the output.
    __device__ __forceinline__ void multiply_pv(float (&o)[kSlabs][kChannels / 8][4], const Fragments& probabilities,
                                                int chunk) const {
        const auto v_address =
            KvTile::b_trans_address(smem() + KvTile::kBytes + warp * kKeys * KvTile::kRowBytes, hide_from_compiler(lane));
        auto product = make_product<T, kKeys / 16, 1, kSlabs, kChannels / 8>(
            [&](int step, uint32_t (&f)[kSlabs][4]) {
#pragma unroll
                for (int i = 0; i < kSlabs * 4; ++i) f[i / 4][i % 4] = probabilities[step][i / 4][i % 4];
            },
            [=](int step, int pair, uint32_t (&f)[4]) {
                ldmatrix_x4_trans(f, v_address.at(step * 16, chunk * (kChannels / 16) + pair));
            });
        clear(o);
        product.start();
        product.add_to(o, [](int) {});
    }

    // How a row of this thread is updated: factors of the old output and of each warp's part, the new maximum and sum.
    struct Update {
        float max, sum, old_factor, factor[kWarps];
    };

    __device__ __forceinline__ void update_row(Update& u, int row) const {
        const float old_max = u.max, old_sum = u.sum;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) u.max = fmaxf(u.max, warp_max()[w * kBlockM + row]);
        u.sum = u.old_factor = old_sum * exp2_approx(old_max - u.max);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            u.factor[w] = exp2_approx(warp_max()[w * kBlockM + row] - u.max);
            u.sum += u.factor[w] * warp_sum()[w * kBlockM + row];
        }
        const float inverse = 1.0f / u.sum;
        u.old_factor *= inverse;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) u.factor[w] *= inverse;
    }

    // One tile of queries against one of keys. The earlier output of a row was written by the same thread; its statistics were
    // written before the last barrier.
    __device__ __forceinline__ void step(int stage, int query, int key) const {
        Scores s;
        Fragments probabilities;
        multiply_qk(s, stage);
        if (tiles.is_edge(query, key)) mask(s, query, key);
        softmax(probabilities, s, p.softmax_scale * kLog2e);
        Update update[Sums::kPasses];
        const bool first = key == 0, last = key == tiles.last_key(query);
#pragma unroll
        for (int pass = 0; pass < Sums::kPasses; ++pass) {
            const int row = query * kBlockM + Sums::row_of(pass, thread);
            const bool known = !first && row < p.seqlen;
            update[pass].max = known ? row_max[row] : -INFINITY;
            update[pass].sum = known ? row_sum[row] : 0.0f;
        }
        float4 running[kChunks][Sums::kPasses][2];
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            load_sums(running[chunk], query, chunk, first);
            float o[kSlabs][kChannels / 8][4];
            multiply_pv(o, probabilities, chunk);
            Sums::store(partial(chunk), warp, lane, o);
        }
        __syncthreads();  // the parts of all warps are written
#pragma unroll
        for (int pass = 0; pass < Sums::kPasses; ++pass) {
            update_row(update[pass], Sums::row_of(pass, thread));
#pragma unroll
            for (int i = 0; i < kChunks * 2; ++i) {
                float4 sum = scaled(running[i / 2][pass][i % 2], update[pass].old_factor);
                Sums::add(sum, partial(i / 2), pass, i % 2, thread, [&](int w) { return update[pass].factor[w]; });
                store_sum(sum, query, i / 2, pass, i % 2, last);
            }
        }
        store_statistics(update, query);
    }

    __device__ __forceinline__ void load_sums(float4 (&running)[Sums::kPasses][2], int query, int chunk, bool first) const {
#pragma unroll
        for (int i = 0; i < Sums::kPasses * 2; ++i) {
            const int row = query * kBlockM + Sums::row_of(i / 2, thread);
            running[i / 2][i % 2] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (first || row >= p.seqlen) continue;
            const int channel = chunk * kChannels + Sums::channel_of(i % 2, thread);
            running[i / 2][i % 2] = *reinterpret_cast<const float4*>(sums + int64_t{row} * kHeadDim + channel);
        }
    }

    __device__ __forceinline__ void store_sum(const float4& sum, int query, int chunk, int pass, int quad, bool last) const {
        const int row = query * kBlockM + Sums::row_of(pass, thread);
        const int channel = chunk * kChannels + Sums::channel_of(quad, thread);
        if (row >= p.seqlen) return;
        if (last) {
            store_quad(out + row * stride() + channel, sum);
        } else {
            *reinterpret_cast<float4*>(sums + int64_t{row} * kHeadDim + channel) = sum;
        }
    }

    __device__ __forceinline__ void store_statistics(const Update (&update)[Sums::kPasses], int query) const {
#pragma unroll
        for (int pass = 0; pass < Sums::kPasses; ++pass) {
            const int row = query * kBlockM + Sums::row_of(pass, thread);
            if (row >= p.seqlen || thread % 8 != 0) continue;
            row_max[row] = update[pass].max;
            row_sum[row] = update[pass].sum;
        }
    }

    // Query tiles of this thread block: every splits-th.
    __device__ __forceinline__ void run() const {
        const int splits = p.splits, mine = blockIdx.x;
#pragma unroll 1
        for (int key = 0; key < tiles.keys(); ++key) {
            const int from = tiles.first_query(key);
            int query = from + (mine - from % splits + splits) % splits, stage = 0;
            __syncthreads();  // the tiles of the previous pass are no longer read
            load_keys(key);
            load_queries(stage, query);
#pragma unroll 1
            for (; query < tiles.queries(); query += splits) {
                cp_async_wait<0>();
                __syncthreads();  // the query tile has arrived; the previous one and its parts are no longer read
                load_queries(stage ^ 1, query + splits);
                step(stage, query, key);
                stage ^= 1;
            }
            cp_async_wait<0>();
        }
    }
};

template <int kHeadDim, int kBlockM, int kBlockN, int kWarps, int kBlocks>
__global__ void __launch_bounds__(kWarps * 32, kBlocks) flash1_forward_kernel(const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) char shared[];
    const Flash1Forward<kHeadDim, kBlockM, kBlockN, kWarps> body(p, shared);
    body.run();
}

// kBlocks: thread blocks per multiprocessor, at least.
template <int kHeadDim, int kBlockM, int kBlockN, int kWarps, int kBlocks>
int flash1_forward(const Problem& p, void* stream) {
    using Body = Flash1Forward<kHeadDim, kBlockM, kBlockN, kWarps>;
    return enqueue(flash1_forward_kernel<kHeadDim, kBlockM, kBlockN, kWarps, kBlocks>, dim3(p.splits, p.heads_in_all()),
                   Body::kThreads, Body::kSharedBytes, stream, p);
}

}  // namespace baselines::BASELINE_TYPE

// The fastest tiles (queries x keys) of those tried.
BASELINE_EXPORT(flash1_forward)(const baselines::Problem* p, void* stream) {
    using namespace baselines::BASELINE_TYPE;
    if (p->head_dim == 64) return flash1_forward<64, 32, 256, 4, 2>(*p, stream);
    return p->head_dim == 128 ? flash1_forward<128, 32, 256, 4, 1>(*p, stream) : kUnknown;
}
