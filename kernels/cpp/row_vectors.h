// Vectors of kWidth values of a row, for the kernels between the matrix products. They are the compiler's own (GCC and
// clang lower them to AVX512, AVX2, SSE2 or NEON); every element is computed alone by correctly rounded operations, and
// sums run in kLanes partial sums, so that a result does not depend on the vectors' width.
#pragma once

#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "lowbit.h"

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kLanes = 32;  // partial sums of a row, on every processor
constexpr int kVectors = kLanes / kWidth;

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));

inline Words bits_of(Floats v) { return reinterpret_cast<Words>(v); }
inline Floats floats_of(Words w) { return reinterpret_cast<Floats>(w); }

inline Floats widen(Floats v) { return v; }
#if defined(__AVX512F__)  // GCC 12 takes five instructions for these two
inline Floats widen(Halves h) { return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16); }
#else
inline Floats widen(Halves h) { return floats_of(__builtin_convertvector(h, Words) << 16); }
#endif

// Rounded to bfloat16 in the upper half of each word: nearest, ties to even. A nan here comes from arithmetic or from a
// bfloat16, so the lower half of its word is 0 and the addition leaves it a nan. (AVX512-BF16's instruction is not
// used: it flushes subnormal numbers to zero.)
inline Words rounded_bits(Floats v) {
    const Words bits = bits_of(v);
    return bits + 0x7fff + (bits >> 16 & 1);
}

inline Floats narrow(const float*, Floats v) { return v; }
inline Halves narrow(const uint16_t*, Floats v) { return __builtin_convertvector(rounded_bits(v) >> 16, Halves); }

// Counts are Full where a whole vector is there, so that the branch and the partial copy compile away.
using Full = std::integral_constant<int64_t, kWidth>;

template <typename T, typename Count> inline void store(T* p, Count count, Floats value) {
    const auto v = narrow(p, value);
    std::memcpy(p, &v, count * sizeof(T));
}

}  // namespace
