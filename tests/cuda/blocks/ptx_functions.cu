// Tests exp2_approx and tanh_accurate of ptx/math.cuh with every float of their range, and min_or_nan and max_or_nan. The
// device compares with its double functions; these are compared with the host's at every kStride-th float.
#include <cmath>
#include <limits>

#include <algorithm>

#include "check.cuh"
#include "cuda/ptx/math.cuh"

using namespace libflash::cuda;

namespace {

constexpr uint32_t kStride = 10007;

struct Exp2 {
    static constexpr const char* kName = "exp2_approx on [-150, 0]";
    static constexpr double kLimit = 0x1p-22;  // relative
    __device__ static float tested(float x) { return exp2_approx(x); }
    // Results below the smallest normal number are 0, by definition.
    __host__ __device__ static double expected(float x) {
        const double exact = ::exp2(static_cast<double>(x));
        return exact < 0x1p-126 ? 0.0 : exact;
    }
};

struct Tanh {
    static constexpr const char* kName = "tanh_accurate";
    static constexpr double kLimit = 0x1p-21;
    __device__ static float tested(float x) { return tanh_accurate(x); }
    __host__ __device__ static double expected(float x) { return ::tanh(static_cast<double>(x)); }
};

// An error and the bits of its argument, packed for comparison as one number. NaN counts as infinite.
__device__ unsigned long long error_at(double error, uint32_t bits) {
    const float size = error == error ? static_cast<float>(error) : INFINITY;
    return static_cast<unsigned long long>(__float_as_uint(size)) << 32 | bits;
}

// The largest errors, relative and in units in the last place.
struct Worst {
    unsigned long long relative, ulp, seen;
};

template <class Function>
__global__ void compare_all(uint32_t first, uint32_t count, Worst* worst) {
    Worst mine{};
    const uint64_t all = uint64_t{gridDim.x} * blockDim.x;
    for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += all) {
        const uint32_t bits = first + static_cast<uint32_t>(i);
        const float x = __uint_as_float(bits);
        const double expected = Function::expected(x);
        const double error = fabs(static_cast<double>(Function::tested(x)) - expected);
        const int exponent = expected == 0.0 ? -126 : max(-126, ilogb(expected));
        const double relative = error == 0.0 ? 0.0 : error / fabs(expected);
        mine.relative = max(mine.relative, error_at(relative, bits));
        mine.ulp = max(mine.ulp, error_at(scalbn(error, 23 - exponent), bits));
        ++mine.seen;
    }
    atomicMax(&worst->relative, mine.relative);
    atomicMax(&worst->ulp, mine.ulp);
    atomicAdd(&worst->seen, mine.seen);
}

template <class Function>
__global__ void evaluate(uint32_t first, uint32_t count, float* tested, double* expected) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const float x = __uint_as_float(first + i * kStride);
    tested[i] = Function::tested(x);
    expected[i] = Function::expected(x);
}

double size_of(unsigned long long worst) { return blocks::float_of_bits(static_cast<uint32_t>(worst >> 32)); }
double place_of(unsigned long long worst) { return blocks::float_of_bits(static_cast<uint32_t>(worst)); }

template <class Function>
void check_every_float(blocks::Check& check, uint32_t first, uint32_t last) {
    const uint32_t count = last - first + 1;
    const blocks::Device<Worst> there(1, Worst{});
    compare_all<Function><<<4096, 256>>>(first, count, there.get());
    blocks::finish(Function::kName);
    const Worst worst = there.read()[0];
    check.equal(static_cast<double>(worst.seen), count, "the number of floats seen");
    check.compared_there(count);
    check.at_most(size_of(worst.relative), Function::kLimit, "%.9g, largest relative error", place_of(worst.relative));
    check.note(blocks::text("from %.9g", blocks::float_of_bits(first)) + blocks::text(" to %.9g", blocks::float_of_bits(last)) +
               blocks::text(" largest relative error 2^%.3f", std::log2(size_of(worst.relative))) +
               blocks::text(" at %.9g", place_of(worst.relative)) + blocks::text(", %.3f ulp", size_of(worst.ulp)) +
               blocks::text(" at %.9g", place_of(worst.ulp)));
}

template <class Function>
void check_some_floats(blocks::Check& check, uint32_t first, uint32_t last) {
    const uint32_t count = (last - first) / kStride + 1;
    const blocks::Device<float> tested(count, 0.0f);
    const blocks::Device<double> expected(count, 0.0);
    evaluate<Function><<<(count + 255) / 256, 256>>>(first, count, tested.get(), expected.get());
    blocks::finish(Function::kName);
    const std::vector<float> got = tested.read();
    const std::vector<double> reference = expected.read();
    for (uint32_t i = 0; i < count; ++i) {
        const double x = blocks::float_of_bits(first + i * kStride), host = Function::expected(static_cast<float>(x));
        check.at_most(std::fabs(reference[i] - host), 0x1p-48 * std::fabs(host), "%.9g, error of the reference", x);
        check.at_most(std::fabs(got[i] - host), Function::kLimit * std::fabs(host), "%.9g, error by the host", x);
    }
}

template <class Function>
void check_function(std::initializer_list<uint32_t> first, uint32_t size) {
    blocks::Check check(Function::kName);
    for (const uint32_t begin : first) {
        check_every_float<Function>(check, begin, begin + size);
        check_some_floats<Function>(check, begin, begin + size);
    }
}

__global__ void compare(bool larger, const float* values, int count, float* out) {
    const int i = threadIdx.x;
    for (int j = 0; j < count; ++j)
        out[i * count + j] = larger ? max_or_nan(values[i], values[j]) : min_or_nan(values[i], values[j]);
}

void check_or_nan(const char* name, bool larger) {
    const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> values = {0.0f, 1.0f, -1.0f, 2.5f, -2.5f, inf, -inf, nan, -nan, 1e-45f, -1e-45f, 3e38f, -3e38f};
    const int count = static_cast<int>(values.size());
    const blocks::Device<float> there(values), out(values.size() * values.size(), 0.0f);
    compare<<<1, count>>>(larger, there.get(), count, out.get());
    blocks::finish(name);
    const std::vector<float> got = out.read();
    blocks::Check check(name);
    for (int i = 0; i < count; ++i)
        for (int j = 0; j < count; ++j) {
            const float x = values[i], y = values[j];
            const float expected = std::isnan(x) || std::isnan(y) ? nan : (larger ? std::max(x, y) : std::min(x, y));
            check.equal(got[i * count + j], expected, "(%g, %g)", x, y);
        }
}

}  // namespace

int main() {
    check_function<Exp2>({0x80000000u}, 0x43160000u);  // -0 to -150
    check_function<Tanh>({0u, 0x80000000u}, 0x7f7fffffu);
    check_or_nan("min_or_nan", false);
    check_or_nan("max_or_nan", true);
    return blocks::failed_checks() > 0;
}
