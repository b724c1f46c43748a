// out = sum_n exp(lses[n] - lse) outs[n], lse = log(sum_n exp(lses[n])), row by row. Tasks are blocks of rows of one head.
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/convert.h"
#include "cpu/kernels.h"
#include "cpu/parallel_for.h"
#include "cpu/thread_count.h"

namespace libflash::cpu {
namespace {

constexpr int64_t kChannels = 512;      // channels accumulated at a time
constexpr int64_t kRowsPerTask = 64;    // rows of one head
constexpr double kWorkPerThread = 1e5;  // elements; fewer do not justify another thread
constexpr int kMostInFloat = 64;        // above this number of inputs, the outputs are summed in double

// The weights of the inputs in one row, normalized to a sum of 1, and the merged LSE. All weights are 0 if no input has a key.
struct MergeWeights {
    std::vector<double> weight;
    double lse = 0;

    explicit MergeWeights(int count) : weight(static_cast<size_t>(count)) {}

    void set(const std::vector<double>& lses) {
        const size_t count = lses.size();
        double largest = -std::numeric_limits<double>::infinity();
        for (size_t n = 0; n < count; ++n)
            if (lses[n] > largest || std::isnan(lses[n])) largest = lses[n];
        lse = largest;
        double sum = 0;
        for (size_t n = 0; n < count; ++n) {
            weight[n] = std::isinf(largest) && largest < 0 ? 0.0 : std::exp(lses[n] - largest);
            sum += weight[n];
        }
        if (sum == 0) return;
        lse += std::log(sum);
        for (size_t n = 0; n < count; ++n) weight[n] /= sum;
    }
};

template <class T, class Sum>
void add(const T* from, Sum weight, Sum* sums, int64_t n) {
    for (int64_t c = 0; c < n; ++c) sums[c] += weight * static_cast<Sum>(widen(from[c]));
}

template <class Sum>
void merge_row(const MergeProblem& problem, const MergeWeights& weights, int64_t b, int64_t i, int64_t h) {
    const auto start = [&](const TensorView& tensor) {
        const RowStrides at = row_strides(tensor);
        return b * at.batch + i * at.row + h * at.head;
    };
    for (int64_t first = 0; first < problem.head_dim_v; first += kChannels) {
        const int64_t left = problem.head_dim_v - first, n = left < kChannels ? left : kChannels;
        Sum sums[kChannels] = {};
        for (size_t part = 0; part < problem.outs.size(); ++part) {
            if (weights.weight[part] == 0) continue;  // its out may hold NaN
            const TensorView& out = problem.outs[part];
            with_type(out.dtype, [&](auto* type) {
                const auto* data = static_cast<decltype(type)>(out.data) + start(out) + first;
                add(data, static_cast<Sum>(weights.weight[part]), sums, n);
            });
        }
        with_type(problem.out.dtype, [&](auto* type) {
            auto* data = static_cast<decltype(type)>(problem.out.data) + start(problem.out) + first;
            for (int64_t c = 0; c < n; ++c) store(data[c], sums[c]);
        });
    }
}

template <class Sum>
void merge_rows(const MergeProblem& problem, int64_t b, int64_t h, int64_t first, int64_t last) {
    const auto at = [&](const TensorView& lse, int64_t i) {
        const RowStrides strides = lse_strides(lse);
        return b * strides.batch + i * strides.row + h * strides.head;
    };
    std::vector<double> lses(problem.lses.size());
    MergeWeights weights(problem.count);
    for (int64_t i = first; i < last; ++i) {
        for (size_t n = 0; n < lses.size(); ++n)
            lses[n] = load_as(problem.lses[n].dtype, problem.lses[n].data, at(problem.lses[n], i));
        weights.set(lses);
        merge_row<Sum>(problem, weights, b, i, h);
        if (problem.lse.present) store_as(problem.lse.dtype, problem.lse.data, at(problem.lse, i), weights.lse);
    }
}

bool wants_double(const MergeProblem& problem) {
    bool found = problem.out.dtype == DType::f64 || problem.count > kMostInFloat;
    for (const TensorView& out : problem.outs) found = found || out.dtype == DType::f64;
    return found;
}

int count_threads(const MergeProblem& problem) {
    const int most = threads_or_default(problem.request.num_threads);
    const double work = static_cast<double>(problem.batch * problem.rows * problem.heads) *
                        static_cast<double>(problem.head_dim_v * problem.count);
    return work < most * kWorkPerThread ? 1 + static_cast<int>(work / kWorkPerThread) : most;
}

}  // namespace

void merge(const MergeProblem& problem) {
    const bool wide = wants_double(problem);
    const int64_t chunks = (problem.rows + kRowsPerTask - 1) / kRowsPerTask;
    parallel_for(problem.batch * problem.heads * chunks, count_threads(problem), [&](int64_t task, int) {
        const int64_t first = task % chunks * kRowsPerTask, h = task / chunks % problem.heads, b = task / chunks / problem.heads;
        const int64_t last = first + kRowsPerTask < problem.rows ? first + kRowsPerTask : problem.rows;
        wide ? merge_rows<double>(problem, b, h, first, last) : merge_rows<float>(problem, b, h, first, last);
    });
}

}  // namespace libflash::cpu
