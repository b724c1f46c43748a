// exp of doubles for probabilities, with fewer instructions than the CUDA library's exp and no branch.
#pragma once

namespace libflash::cuda {

// exp(x) for x <= 700; 0 for x < -708, where it is below the smallest normal number times four. NaN propagates. With
// n = x / ln 2, rounded, and r = x - n ln 2, exp(r) is a polynomial of degree 11 whose relative error is 1.6e-17; including
// rounding errors, the error of the result is about one unit in the last place.
__device__ __forceinline__ double exp_of_score(double x) {
    constexpr double kInverse = 0x1.71547652b82fep+0, kLn2 = 0x1.62e42fefa39efp-1, kRestOfLn2 = 0x1.abc9e3b39803fp-56;
    constexpr double kRounds = 0x1.8p+52;  // adding this leaves the nearest integer in the low bits
    const double sum = fma(x, kInverse, kRounds), n = sum - kRounds;
    const double r = fma(n, -kRestOfLn2, fma(n, -kLn2, x));
    // (exp(r) - 1 - r) / r^2 by Chebyshev approximation on [-ln 2 / 2, ln 2 / 2].
    double y = 0x1.af389eea54156p-26;
    y = fma(y, r, 0x1.28917c9f3a495p-22);
    y = fma(y, r, 0x1.71de0db2eb873p-19);
    y = fma(y, r, 0x1.a019b914881bap-16);
    y = fma(y, r, 0x1.a01a01a7c2f2cp-13);
    y = fma(y, r, 0x1.6c16c17889f3cp-10);
    y = fma(y, r, 0x1.11111111109b5p-7);
    y = fma(y, r, 0x1.5555555553d68p-5);
    y = fma(y, r, 0x1.5555555555556p-3);
    y = fma(y, r, 0x1.0000000000001p-1);
    y = fma(fma(y, r, 1.0), r, 1.0);
    // A product with 2^n rather than an addition to the exponent, which could turn NaN into a number.
    const double power = __hiloint2double(static_cast<int>((static_cast<unsigned>(__double2loint(sum)) + 1023u) << 20), 0);
    return x < -708.0 ? 0.0 : y * power;
}

}  // namespace libflash::cuda
