// What a row of logits needs for its softmax, over the vectors of row_vectors.h: loads that fill up the last vector, sums
// in kLanes partial sums that are folded in one fixed order, and an exponential. A result depends neither on the
// vectors' width nor on the number of threads nor on the other rows.
#pragma once

#include <cmath>

#include "row_vectors.h"

namespace {

constexpr float kMinusInfinity = -__builtin_inff();
inline Floats filled(const float*, float value) { return Floats{} + value; }
inline Halves filled(const uint16_t*, float value) { return Halves{} + lowbit::to_bfloat16(value); }

// `count` values and, in the lanes after them, `fill`.
template <typename T, typename Count> inline Floats load(const T* p, Count count, float fill) {
    auto v = filled(p, fill);
    std::memcpy(&v, p, count * sizeof(T));
    return widen(v);
}

// f(partial sum, i, count) for the vectors of a row.
template <typename F> inline void for_vectors(int64_t size, F f) {
    int64_t start = 0;
    for (; start + kLanes <= size; start += kLanes)
        for (int j = 0; j < kVectors; j++) f(j, start + j * kWidth, Full{});
    for (int j = 0; start < size; j++, start += kWidth) {
        if (start + kWidth <= size) f(j, start, Full{});
        else f(j, start, size - start);
    }
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

template <typename Op> inline float fold(const Floats* partial, Op op) {
    float lanes[kLanes];
    std::memcpy(lanes, partial, sizeof lanes);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = op(lanes[i], lanes[i + half]);
    return lanes[0];
}

inline float sum_of(const Floats* partial) {
    return fold(partial, [](float a, float b) { return a + b; });
}

// e^x for x <= 0, within 2 units in the last place; 0 where it is below the normal numbers; nan stays nan.
// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r is its Taylor series to r^7, whose rest is below 0.1 units. ln 2 is
// split as in Cephes' expf.
inline Floats exp_of_negative(Floats x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits
    const Floats shifted = x * 1.44269504f + magic;
    const Floats n = shifted - magic;
    const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts; the first product is exact
    Floats p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    const Floats power = floats_of((bits_of(shifted) - (0x4b400000 - 127)) << 23);  // 0x4b400000: the bits of magic
    return x < -87.0f ? Floats{} : p * power;
}

}  // namespace
