// Standard attention, Algorithm 0 of the FlashAttention paper (Dao et al., arXiv 2205.14135) and Algorithm 3, its gradient: S =
// Q K^T, P = softmax(S) and O = P V are separate kernels with S and P in global memory, and so are dP and dS. The cost is the
// traffic of the seqlen * seqlen matrices: each is written once and read once or twice, 16 bits per number, for every head.
// Scale and mask are part of the softmax kernel, which saves two passes that a framework may need.
#include "products.cuh"
#include "rows.cuh"

namespace baselines::BASELINE_TYPE {

// S = Q K^T, dP = dO V^T
template <int kHeadDim>
int scores(const Problem& p, const void* a, const void* b, void* result, void* stream) {
    const unsigned tiles = tiles_of(p.seqlen, kTile);
    const int operands = 2 * SharedTile<kTile, kHeadDim>::kBytes, shared_bytes = max(operands, SharedTile<kTile, kTile>::kBytes);
    return enqueue(standard_scores_kernel<kHeadDim>, dim3(tiles, tiles, p.heads_in_all()), kProductThreads, shared_bytes, stream,
                   static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(result), p);
}

template <int kHeadDim, bool kTransposed>
int along_sequence(const Problem& p, const void* a, const void* b, void* result, float factor, void* stream) {
    return enqueue(standard_product_kernel<kHeadDim, kTransposed>, dim3(tiles_of(p.seqlen, kTile), p.heads_in_all()),
                   kProductThreads, AlongSequence<kHeadDim, kTransposed>::kSharedBytes, stream, static_cast<const T*>(a),
                   static_cast<const T*>(b), static_cast<T*>(result), factor, p);
}

// Calls launch(std::integral_constant<int, vectors>, threads) with numbers of vectors and threads that suffice for a row.
template <int kVectors = 1, class Launch>
int for_row(const Problem& p, const Launch& launch) {
    if (p.pitch > kVectors * 8 * kRowThreads) {
        if constexpr (kVectors * 8 * kRowThreads < kLongestRow) return for_row<2 * kVectors>(p, launch);
        return kUnknown;
    }
    return launch(std::integral_constant<int, kVectors>(), min(kRowThreads, static_cast<int>(tiles_of(p.pitch, 8 * 32)) * 32));
}

int softmax(const Problem& p, void* stream) {
    return for_row(p, [&](auto vectors, int threads) {
        return enqueue(standard_softmax_kernel<vectors.value>, dim3(p.seqlen, p.heads_in_all()), threads, 0, stream,
                       static_cast<const T*>(p.scores), static_cast<T*>(p.weights), p.softmax_scale * libflash::cuda::kLog2e, p);
    });
}

int softmax_gradient(const Problem& p, void* stream) {
    return for_row(p, [&](auto vectors, int threads) {
        return enqueue(standard_softmax_gradient_kernel<vectors.value>, dim3(p.seqlen, p.heads_in_all()), threads, 0, stream,
                       static_cast<const T*>(p.weights), static_cast<const T*>(p.dweights), static_cast<T*>(p.dscores), p);
    });
}

template <int kHeadDim>
int forward(const Problem& p, void* stream) {
    int error = scores<kHeadDim>(p, p.q, p.k, p.scores, stream);
    if (!error) error = softmax(p, stream);
    if (!error) error = along_sequence<kHeadDim, false>(p, p.weights, p.v, p.out, 1.0f, stream);
    return error;
}

// Uses the weights of the forward pass.
template <int kHeadDim>
int backward(const Problem& p, void* stream) {
    int error = along_sequence<kHeadDim, true>(p, p.weights, p.dout, p.dv, 1.0f, stream);
    if (!error) error = scores<kHeadDim>(p, p.dout, p.v, p.dweights, stream);
    if (!error) error = softmax_gradient(p, stream);
    if (!error) error = along_sequence<kHeadDim, false>(p, p.dscores, p.k, p.dq, p.softmax_scale, stream);
    if (!error) error = along_sequence<kHeadDim, true>(p, p.dscores, p.q, p.dk, p.softmax_scale, stream);
    return error;
}

}  // namespace baselines::BASELINE_TYPE

BASELINE_EXPORT(standard_forward)(const baselines::Problem* p, void* stream) {
    using namespace baselines::BASELINE_TYPE;
    if (p->head_dim == 64) return forward<64>(*p, stream);
    return p->head_dim == 128 ? forward<128>(*p, stream) : kUnknown;
}

BASELINE_EXPORT(standard_backward)(const baselines::Problem* p, void* stream) {
    using namespace baselines::BASELINE_TYPE;
    if (p->head_dim == 64) return backward<64>(*p, stream);
    return p->head_dim == 128 ? backward<128>(*p, stream) : kUnknown;
}
