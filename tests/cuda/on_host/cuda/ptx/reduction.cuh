// Replaces the library's header.
#pragma once

namespace libflash::cuda {

struct WarpQuad {
    static void add(float* quads, int lane, const float (&x)[4]) {
        for (int e = 0; e < 4; ++e) quads[lane * 4 + e] += x[e];
    }
    static void load(const float* quads, int lane, float (&x)[4]) {
        for (int e = 0; e < 4; ++e) x[e] = quads[lane * 4 + e];
    }
};

}  // namespace libflash::cuda
