// Merge: a valid call is compared with the formula in double; an invalid call must be refused and change nothing.
#include <algorithm>

#include "check.h"
#include "target.h"
#include "tensor_invalidate.h"

namespace fuzz {
namespace {

struct MergeCase {
    std::vector<Tensor> outs, lses;
    Tensor out, lse;
    bool packed = false;
    int64_t batch = 1, rows = 1, heads = 1, channels = 1;
    int32_t num_threads = 0;

    explicit MergeCase(Bytes& bytes) {
        packed = bytes.chance(80);
        batch = packed ? 1 : bytes.between(0, 3);
        rows = bytes.between(0, 80), heads = bytes.between(1, 3);
        channels = bytes.one_of<int64_t>({1, 2, 3, 16, 17, 64, 128, 512});
        num_threads = static_cast<int32_t>(bytes.between(0, 4));
        const auto count = static_cast<size_t>(bytes.chance(10) ? bytes.between(60, 140) : bytes.between(1, 6));
        Random random(bytes.word());
        outs.resize(count), lses.resize(count);
        for (size_t n = 0; n < count; ++n) {
            outs[n].allocate(rows_shape(bytes, any_type(bytes), true), bytes.below(3));
            lses[n].allocate(lse_shape(lse_type(outs[n])), bytes.below(3));
            outs[n].fill(random, 1);
            lses[n].fill(random, 20);
            if (bytes.chance(100)) hide(n, random);
        }
        out.allocate(rows_shape(bytes, any_type(bytes), false), bytes.below(3));
        if (bytes.chance(200)) lse.allocate(lse_shape(lse_type(out)));
    }

    flash_status_t run(const flash_merge_options_t* options, const std::vector<flash_tensor_t>& out_views,
                       const std::vector<flash_tensor_t>& lse_views) const {
        return flash_attention_merge(out_views.data(), lse_views.data(), static_cast<int32_t>(out_views.size()), out.pointer(),
                                     lse.pointer(), options, nullptr);
    }

private:
    static int32_t any_type(Bytes& bytes) {
        return bytes.one_of<int32_t>({FLASH_DTYPE_FLOAT32, FLASH_DTYPE_BFLOAT16, FLASH_DTYPE_FLOAT16, FLASH_DTYPE_FLOAT64});
    }
    static int32_t lse_type(const Tensor& of) {
        return of.view.dtype == FLASH_DTYPE_FLOAT64 ? FLASH_DTYPE_FLOAT64 : FLASH_DTYPE_FLOAT32;
    }
    flash_tensor_t rows_shape(Bytes& bytes, int32_t dtype, bool input) const {
        return packed ? strided(bytes, dtype, {rows, heads, channels}, input)
                      : strided(bytes, dtype, {batch, rows, heads, channels}, input);
    }
    flash_tensor_t lse_shape(int32_t dtype) const {
        return packed ? contiguous(dtype, {heads, rows}) : contiguous(dtype, {batch, heads, rows});
    }
    // Rows with lse = -infinity: their out may hold anything.
    void hide(size_t n, Random& random) {
        const flash_tensor_t& o = outs[n].view;
        if (std::count(o.stride, o.stride + o.ndim, 0)) return;
        for (int64_t b = 0; b < batch; ++b)
            for (int64_t h = 0; h < heads; ++h)
                for (int64_t i = 0; i < rows; ++i) {
                    if (random.below(3)) continue;
                    lses[n].set((b * heads + h) * rows + i, -HUGE_VAL);
                    const int64_t at =
                        packed ? i * o.stride[0] + h * o.stride[1] : b * o.stride[0] + i * o.stride[1] + h * o.stride[2];
                    for (int64_t c = 0; c < channels; ++c) outs[n].set(at + c, std::nan(""));
                }
    }
};

std::vector<flash_tensor_t> views(const std::vector<Tensor>& tensors) {
    std::vector<flash_tensor_t> all;
    for (const Tensor& t : tensors) all.push_back(t.view);
    return all;
}

void compare(const MergeCase& problem) {
    double finest = 0;
    for (const Tensor& part : problem.outs) finest = std::max(finest, Rounding(part.view.dtype).sums);
    const double relative = 2 * Rounding(problem.out.view.dtype).u, absolute = 64 * finest;
    const auto at = [&](const flash_tensor_t& t, int64_t b, int64_t i, int64_t h) {
        return problem.packed ? i * t.stride[0] + h * t.stride[1] : b * t.stride[0] + i * t.stride[1] + h * t.stride[2];
    };
    const size_t count = problem.outs.size();
    for (int64_t b = 0; b < problem.batch; ++b)
        for (int64_t h = 0; h < problem.heads; ++h)
            for (int64_t i = 0; i < problem.rows; ++i) {
                const int64_t row = (b * problem.heads + h) * problem.rows + i;
                double largest = -HUGE_VAL, sum = 0;
                for (size_t n = 0; n < count; ++n) largest = std::max(largest, problem.lses[n].get(row));
                for (size_t n = 0; n < count && largest > -HUGE_VAL; ++n) sum += std::exp(problem.lses[n].get(row) - largest);
                const double lse = largest > -HUGE_VAL ? largest + std::log(sum) : -HUGE_VAL;
                if (problem.lse.present()) {
                    const double got = problem.lse.get(row);
                    FUZZ_CHECK(got == lse || std::fabs(got - lse) < 1e-5, "lse %.17g, expected %.17g", got, lse);
                }
                for (int64_t c = 0; c < problem.channels; ++c) {
                    double o = 0;
                    for (size_t n = 0; n < count; ++n)
                        if (problem.lses[n].get(row) > -HUGE_VAL)
                            o += std::exp(problem.lses[n].get(row) - lse) *
                                 problem.outs[n].get(at(problem.outs[n].view, b, i, h) + c);
                    const double got = problem.out.get(at(problem.out.view, b, i, h) + c);
                    FUZZ_CHECK(std::fabs(got - o) <= relative * std::fabs(o) + absolute + 0x1p-25, "out %.17g, expected %.17g",
                               got, o);
                }
            }
}

void refuse(MergeCase& problem, flash_merge_options_t options, Bytes& bytes) {
    std::vector<flash_tensor_t> outs = views(problem.outs), lses = views(problem.lses);
    const auto part = static_cast<size_t>(bytes.below(static_cast<int64_t>(outs.size())));
    flash_status_t expected = FLASH_STATUS_INVALID;
    std::string what;
    TensorTraits traits;
    traits.exact = outs.size() > 1;
    switch (bytes.below(5)) {
        case 0: options.struct_size = 4, expected = FLASH_STATUS_VERSION, what = "struct_size"; break;
        case 1: options.flags = 1, what = "flags"; break;
        case 2: options.reserved = 1, what = "reserved"; break;
        case 3: traits.rows = true, what = invalidate_tensor(outs[part], outs[0], traits, bytes); break;
        default: what = invalidate_tensor(lses[part], outs[0], traits, bytes); break;
    }
    if (what.empty()) return;
    const std::vector<char> before = problem.out.bytes();
    check_status(problem.run(&options, outs, lses), expected, what.c_str());
    FUZZ_CHECK(problem.out.holds(before), "out was written by a refused call: %s", what.c_str());
}

}  // namespace

void merge_target(Bytes& bytes) {
    MergeCase problem(bytes);
    flash_merge_options_t options = {};
    options.struct_size = sizeof options;
    options.num_threads = problem.num_threads;
    if (bytes.chance(100)) return refuse(problem, options, bytes);
    const std::vector<flash_tensor_t> outs = views(problem.outs), lses = views(problem.lses);
    check_status(problem.run(&options, outs, lses), FLASH_STATUS_OK, "merge");
    compare(problem);
}

}  // namespace fuzz
