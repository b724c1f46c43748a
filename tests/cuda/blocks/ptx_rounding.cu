// Tests pack_pair and from_float of ptx/math.cuh: the order of the halves, and rounding to nearest even. The inputs combine all
// upper 16 bits with lower bits at, just above and just below the possible ties of either type.
#include <algorithm>
#include <cmath>

#include "check.cuh"
#include "cuda/ptx/math.cuh"

using namespace libflash::cuda;

namespace {

// The bits of x in a type with that many mantissa bits, whose smallest normal number is 2^kLowest, by definition: the nearest
// multiple of the unit in the last place. -1: NaN.
template <int kMantissa, int kLowest>
int nearest_bits(float x) {
    if (std::isnan(x)) return -1;
    const int sign = std::signbit(x) ? 0x8000 : 0, infinity = (3 - 2 * kLowest) << kMantissa;
    if (std::isinf(x)) return sign | infinity;
    const double size = std::fabs(static_cast<double>(x));
    const int exponent = size == 0 ? kLowest : std::max(kLowest, std::ilogb(size));
    // A carry into the next power of two is also one into the exponent field.
    const int units = static_cast<int>(std::nearbyint(std::scalbn(size, kMantissa - exponent)));
    return sign | std::min(infinity, units + ((exponent - kLowest) << kMantissa));
}

// The inverse.
template <int kMantissa, int kLowest>
double value_of(int bits) {
    if (bits < 0) return NAN;
    const int mantissa = bits & ((1 << kMantissa) - 1), field = (bits & 0x7fff) >> kMantissa;
    const double size = field == 3 - 2 * kLowest ? INFINITY
                        : field == 0             ? std::scalbn(mantissa, kLowest - kMantissa)
                                                 : std::scalbn(mantissa + (1 << kMantissa), field - 1 + kLowest - kMantissa);
    return bits & 0x8000 ? -size : size;
}

struct Half {
    using type = __half;
    static constexpr const char* kName = "f16";
    static int bits(float x) { return nearest_bits<10, -14>(x); }
    static double value(int bits) { return value_of<10, -14>(bits); }
    static bool is_nan(int bits) { return (bits & 0x7fff) > 0x7c00; }
};
struct Bfloat {
    using type = __nv_bfloat16;
    static constexpr const char* kName = "bf16";
    static int bits(float x) { return nearest_bits<7, -126>(x); }
    static double value(int bits) { return value_of<7, -126>(bits); }
    static bool is_nan(int bits) { return (bits & 0x7fff) > 0x7f80; }
};

__device__ uint32_t bits_of(__half x) { return __half_as_ushort(x); }
__device__ uint32_t bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }

template <class T>
__global__ void round_all(const float* x, int count, uint32_t* pairs, uint32_t* single, float* back) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    pairs[i] = pack_pair(x[i], x[count - 1 - i], T());
    single[i] = bits_of(from_float(x[i], T()));
    back[i] = to_float(from_float(x[i], T()));
}

std::vector<float> floats_around_ties() {
    std::vector<uint32_t> low;
    for (uint32_t top = 0; top < 8; ++top)
        for (const uint32_t rest : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x1fffu}) low.push_back(top << 13 | rest);
    std::vector<float> all;
    for (uint32_t upper = 0; upper < 0x10000; ++upper)
        for (const uint32_t lower : low) all.push_back(blocks::float_of_bits(upper << 16 | lower));
    return all;
}

template <class Type>
void check_type(const std::vector<float>& x) {
    const int count = static_cast<int>(x.size());
    const blocks::Device<float> there(x), back(x.size(), 0.0f);
    const blocks::Device<uint32_t> pairs(x.size(), 0), single(x.size(), 0);
    round_all<typename Type::type><<<(count + 255) / 256, 256>>>(there.get(), count, pairs.get(), single.get(), back.get());
    blocks::finish(Type::kName);
    const std::vector<uint32_t> got = pairs.read(), alone = single.read();
    const std::vector<float> returned = back.read();
    const std::string name = Type::kName;
    blocks::Check low("pack_pair low " + name), high("pack_pair high " + name), one("from_float " + name),
        again("to_float " + name);
    const auto canonical = [](uint32_t bits) { return Type::is_nan(static_cast<int>(bits)) ? -1 : static_cast<int>(bits); };
    for (int i = 0; i < count; ++i) {
        const int expected = Type::bits(x[i]), other = count - 1 - i;
        low.equal(canonical(got[i] & 0xffff), expected, "%.9g", x[i]);
        high.equal(canonical(got[other] >> 16), expected, "%.9g", x[i]);
        one.equal(canonical(alone[i]), expected, "%.9g", x[i]);
        again.equal(returned[i], Type::value(expected), "bits 0x%x", expected);
    }
}

}  // namespace

int main() {
    const std::vector<float> x = floats_around_ties();
    check_type<Half>(x);
    check_type<Bfloat>(x);
    return blocks::failed_checks() > 0;
}
