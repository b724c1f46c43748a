// Attention forward and backward from C++17: sequences of different lengths packed one after the other, a sliding window,
// checked against plain loops.
#include <libflash.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int kHeads = 3, kHeadDim = 32, kWindow = 20;
const std::vector<int32_t> kStarts = {0, 5, 5, 70, 101};  // four sequences, the second one empty

// Values, and the tensor struct for the library.
template <class T>
struct Tensor {
    std::vector<T> data;
    flash_tensor_t view{};

    Tensor(std::initializer_list<int64_t> shape, flash_dtype_t dtype) {
        int64_t size = 1;
        for (const int64_t n : shape) size *= n;
        data.resize(static_cast<size_t>(size));
        view.data = data.data();
        view.dtype = dtype;
        for (const int64_t n : shape) {
            size = n ? size / n : 0;
            view.shape[view.ndim] = n;
            view.stride[view.ndim++] = size;
        }
    }
};

void must(flash_status_t status) {
    if (status != FLASH_STATUS_OK) throw std::runtime_error(std::string(flash_status_name(status)) + ": " + flash_last_error());
}

struct Release {
    void operator()(void* block) const { ::operator delete(block, std::align_val_t{256}); }
};
using Workspace = std::unique_ptr<void, Release>;
Workspace workspace(size_t bytes) { return Workspace(::operator new(bytes, std::align_val_t{256})); }

struct Truth {
    std::vector<double> out, dq, dk, dv;
};

// The definition, one row of queries at a time.
Truth reference(const Tensor<float>& q, const Tensor<float>& k, const Tensor<float>& v, const Tensor<float>& dout) {
    const size_t size = q.data.size();
    Truth t{std::vector<double>(size), std::vector<double>(size), std::vector<double>(size), std::vector<double>(size)};
    const double scale = 1 / std::sqrt(double{kHeadDim});
    const auto at = [](int row, int head) { return static_cast<size_t>((row * kHeads + head) * kHeadDim); };
    for (size_t b = 0; b + 1 < kStarts.size(); ++b)
        for (int h = 0; h < kHeads; ++h)
            for (int i = kStarts[b]; i < kStarts[b + 1]; ++i) {
                const int first = std::max(kStarts[b], i - kWindow);
                std::vector<double> p;
                double sum = 0, delta = 0;
                for (int j = first; j <= i; ++j) {
                    double s = 0;
                    for (int c = 0; c < kHeadDim; ++c) s += double{q.data[at(i, h) + c]} * k.data[at(j, h) + c];
                    p.push_back(std::exp(scale * s));
                    sum += p.back();
                }
                for (int j = first; j <= i; ++j) {
                    p[j - first] /= sum;
                    for (int c = 0; c < kHeadDim; ++c) t.out[at(i, h) + c] += p[j - first] * v.data[at(j, h) + c];
                }
                for (int c = 0; c < kHeadDim; ++c) delta += t.out[at(i, h) + c] * dout.data[at(i, h) + c];
                for (int j = first; j <= i; ++j) {
                    double dp = 0;
                    for (int c = 0; c < kHeadDim; ++c) dp += double{dout.data[at(i, h) + c]} * v.data[at(j, h) + c];
                    const double ds = scale * p[j - first] * (dp - delta);
                    for (int c = 0; c < kHeadDim; ++c) {
                        t.dv[at(j, h) + c] += p[j - first] * dout.data[at(i, h) + c];
                        t.dq[at(i, h) + c] += ds * k.data[at(j, h) + c];
                        t.dk[at(j, h) + c] += ds * q.data[at(i, h) + c];
                    }
                }
            }
    return t;
}

void compare(const char* name, const Tensor<float>& x, const std::vector<double>& expected) {
    double worst = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
        const double error = std::abs(x.data[i] - expected[i]);
        if (!(error <= worst)) worst = error;  // true for NaN
    }
    std::printf("%-4s largest error %.1e\n", name, worst);
    if (!(worst <= 2e-5)) throw std::runtime_error(std::string(name) + " is wrong");
}

void run() {
    const int64_t total = kStarts.back(), batch = static_cast<int64_t>(kStarts.size()) - 1;
    const auto rows = [&] { return Tensor<float>({total, kHeads, kHeadDim}, FLASH_DTYPE_FLOAT32); };
    Tensor<float> q = rows(), k = rows(), v = rows(), out = rows(), dout = rows(), dq = rows(), dk = rows(), dv = rows();
    Tensor<float> lse({kHeads, total}, FLASH_DTYPE_FLOAT32);
    Tensor<int32_t> starts({batch + 1}, FLASH_DTYPE_INT32);
    std::copy(kStarts.begin(), kStarts.end(), starts.data.begin());
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (Tensor<float>* x : {&q, &k, &v, &dout})
        for (float& value : x->data) value = normal(random);

    flash_attention_options_t options = FLASH_ATTENTION_OPTIONS_INIT;
    options.flags = FLASH_FLAG_CAUSAL | FLASH_FLAG_WINDOW;
    options.window_left = kWindow;
    options.cu_seqlens_q = options.cu_seqlens_k = &starts.view;

    char text[4096];
    must(flash_attention_forward_explain(&q.view, &k.view, &v.view, &options, text, sizeof text, nullptr));
    std::puts(text);

    size_t bytes = 0;
    must(flash_attention_forward_workspace_size(&q.view, &k.view, &v.view, &out.view, &lse.view, &options, &bytes));
    must(flash_attention_forward(&q.view, &k.view, &v.view, &out.view, &lse.view, &options, workspace(bytes).get(), bytes,
                                 nullptr));
    must(flash_attention_backward_workspace_size(&dout.view, &q.view, &k.view, &v.view, &out.view, &lse.view, &dq.view, &dk.view,
                                                 &dv.view, &options, &bytes));
    must(flash_attention_backward(&dout.view, &q.view, &k.view, &v.view, &out.view, &lse.view, &dq.view, &dk.view, &dv.view,
                                  &options, workspace(bytes).get(), bytes, nullptr));

    const Truth truth = reference(q, k, v, dout);
    compare("out", out, truth.out);
    compare("dq", dq, truth.dq);
    compare("dk", dk, truth.dk);
    compare("dv", dv, truth.dv);
}

}  // namespace

int main() try {
    run();
    std::printf("libflash %s, %s: good\n", flash_version_string(), flash_cpu_isa());
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
