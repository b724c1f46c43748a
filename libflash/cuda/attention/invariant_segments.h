// Invariant rows: the segments of the keys of a sequence. The sums of a segment start from zero. The sums of all segments are
// folded from the last segment to the first (invariant_softmax.cuh), whether one thread block computes all segments or several
// thread blocks compute them in parallel. Segments depend only on key numbers. Changing any constant here changes the bits of
// rows. No CUDA header.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define LIBFLASH_HOST_DEVICE __host__ __device__
#else
#define LIBFLASH_HOST_DEVICE
#endif

namespace libflash::cuda {

// The version of this rule and of the rule in invariant_softmax.cuh; `explain` prints it.
constexpr int kInvariantVersion = 2;
// Keys whose scores are compared with the kept maximum together: a key tile of decode, half a key tile of prefill.
constexpr int kInvariantUnit = 64;

// Short sequences have short segments, so that a single sequence has enough segments for a GPU. From kSegmentGrowth keys on
// segments become longer, 16 of each length, so that their number stays small; but not longer than accumulators can add up.
constexpr int kFirstSegment = 512, kSegmentGrowth = 16384, kLastSegment = 16384;
constexpr int kSegmentsBefore = kSegmentGrowth / kFirstSegment, kSegmentsOfLength = 16;

// The length of the first kSegmentsOfLength segments from kSegmentGrowth on, and how often the length doubles. First keys and
// lengths of the later segments are those of these segments times a power of two.
constexpr int kLongerSegment = kSegmentGrowth / kSegmentsOfLength, kDoublings = 4;
static_assert(kLongerSegment << kDoublings == kLastSegment, "it doubles until it is the last one");

LIBFLASH_HOST_DEVICE inline int64_t begin_of_segment(int64_t n) {
    if (n < kSegmentsBefore) return n * kFirstSegment;
    const int64_t longer = n - kSegmentsBefore,
                  doublings = longer / kSegmentsOfLength < kDoublings ? longer / kSegmentsOfLength : kDoublings;
    return (kSegmentGrowth + (longer - doublings * kSegmentsOfLength) * kLongerSegment) << doublings;
}

// The segment of a key.
LIBFLASH_HOST_DEVICE inline int segment_of(int key) {
    if (key < kSegmentGrowth) return key / kFirstSegment;
    int doublings = 0;
    for (int i = 1; i <= kDoublings; ++i) doublings += key >= kSegmentGrowth << i;
    return kSegmentsBefore + kSegmentsOfLength * doublings + ((key >> doublings) - kSegmentGrowth) / kLongerSegment;
}

// Whether a segment begins at the key.
LIBFLASH_HOST_DEVICE inline bool begins_segment(int key) {
    int size = kFirstSegment;
    for (int next = kSegmentGrowth / kSegmentsOfLength; next <= kLastSegment; next *= 2)
        if (key / kSegmentsOfLength >= next) size = next;
    return (key & (size - 1)) == 0;  // sizes are powers of two
}

// How many segments `keys` keys have.
inline int64_t segments_of(int64_t keys) {
    int64_t n = 0;
    while (begin_of_segment(n) < keys) ++n;
    return n;
}

}  // namespace libflash::cuda
