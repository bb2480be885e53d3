// What the kernels between the matrix products share: vectors, sums over a row, the exponential.
//
// Vectors are the compiler's own (GCC and clang lower them to AVX512, AVX2, SSE2 or NEON). A result depends neither on
// their width nor on the rest of the call: every element is computed alone by correctly rounded operations, and a sum
// over a row runs in kLanes partial sums that are folded in one fixed order.

#pragma once

#include <cmath>

#include "row_vectors.h"

namespace {

using lowbit::Args;

// So many elements are 5 us of RMS norm or 13 us of SwiGLU on one Zen 4 core; fewer are not worth waking a thread for.
constexpr int64_t kSerialWork = 1 << 14;

// f(row) for every row.
template <typename F> inline void for_rows(int64_t rows, int64_t work, int threads, F f) {
    lowbit::parallel_for(rows, work > kSerialWork ? threads : 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) f(row);
    });
}

// Rows or heads whose sums are taken before the first of them is scaled: a sum's last additions, its root and its
// quotient take some 60 cycles, in which the processor can work on the next sum.
constexpr int64_t kBlock = 8;

// f(begin, end) for blocks of at most kBlock rows.
template <typename F> inline void for_blocks(int64_t rows, int64_t work, int threads, F f) {
    lowbit::parallel_for(rows, work > kSerialWork ? threads : 1, [&](int64_t begin, int64_t end) {
        for (; begin < end; begin += kBlock) f(begin, std::min(end, begin + kBlock));
    });
}

// ---- vectors of kWidth values, or of the last `count` of a row and zeros -------------------------------------------

inline Floats round_as(const float*, Floats v) { return v; }
inline Floats round_as(const uint16_t*, Floats v) { return floats_of(rounded_bits(v) & 0xffff0000); }

inline Floats vector_of(const float*) { return Floats{}; }
inline Halves vector_of(const uint16_t*) { return Halves{}; }

template <typename T, typename Count> inline Floats load(const T* p, Count count) {
    auto v = vector_of(p);
    std::memcpy(&v, p, count * sizeof(T));
    return widen(v);
}

// Two vectors at once. Those of bfloat16 are the elements 0, 2, 4.. and 1, 3, 5.. of 2 kWidth, which lie in the lower
// and upper halves of words: shifts and masks read and write them, where a vector of neighbours takes slow shuffles.
struct Pair {
    Floats a, b;
};
using PairCount = std::integral_constant<int64_t, 2 * kWidth>;

inline Pair operator+(Pair x, Pair y) { return {x.a + y.a, x.b + y.b}; }
inline Pair operator-(Pair x, Pair y) { return {x.a - y.a, x.b - y.b}; }
inline Pair operator*(Pair x, Pair y) { return {x.a * y.a, x.b * y.b}; }
inline Pair operator/(Pair x, Pair y) { return {x.a / y.a, x.b / y.b}; }
inline Pair operator*(Pair x, float y) { return {x.a * y, x.b * y}; }
inline Pair operator-(float x, Pair y) { return {x - y.a, x - y.b}; }
inline Pair operator/(float x, Pair y) { return {x / y.a, x / y.b}; }
inline Pair operator-(Pair x) { return {-x.a, -x.b}; }
template <typename T> inline Pair round_as(const T* p, Pair v) { return {round_as(p, v.a), round_as(p, v.b)}; }

inline Pair load(const float* p, PairCount) { return {load(p, Full{}), load(p + kWidth, Full{})}; }
inline void store(float* p, PairCount, Pair v) {
    store(p, Full{}, v.a);
    store(p + kWidth, Full{}, v.b);
}
inline Pair load(const uint16_t* p, PairCount) {
    Words words;
    std::memcpy(&words, p, sizeof words);
    return {floats_of(words << 16), floats_of(words & 0xffff0000)};
}
inline void store(uint16_t* p, PairCount, Pair v) {
    const Words words = rounded_bits(v.a) >> 16 | (rounded_bits(v.b) & 0xffff0000);
    std::memcpy(p, &words, sizeof words);
}

// f(i, count) for the vectors of a row: pairs, then at most one whole vector and one part.
template <typename F> inline void for_vectors(int64_t size, F f) {
    int64_t i = 0;
    for (; i + 2 * kWidth <= size; i += 2 * kWidth) f(i, PairCount{});
    if (i + kWidth <= size) {
        f(i, Full{});
        i += kWidth;
    }
    if (i < size) f(i, size - i);
}

// ---- sums over a row -----------------------------------------------------------------------------------------------

// Lane i + lane i + half, down to one: the same order whatever the width.
inline float fold(const Floats* sums) {
#if defined(__AVX512F__)  // without a way through memory: it takes longer than a short row
    const __m512 all = (__m512)(sums[0] + sums[1]);
    const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(all), upper);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float lanes[kLanes];
    std::memcpy(lanes, sums, sizeof lanes);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
#endif
}

inline void accumulate(Floats* sums, int j, Floats v) { sums[j] += v; }
inline void accumulate(Floats* sums, int j, Pair v) {
    sums[j] += v.a;
    sums[j + kVectors / 2] += v.b;
}

// f(j, i, count) for the vectors of a row, where j is for `accumulate`. The element that a lane holds depends on the
// type, and not on the width of a vector.
template <typename T, typename F> inline void for_lanes(int64_t size, F f) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        if constexpr (sizeof(T) == 2)
            for (int j = 0; j < kVectors / 2; j++) f(j, i + 2 * j * kWidth, PairCount{});
        else
            for (int j = 0; j < kVectors; j++) f(j, i + j * kWidth, Full{});
    }
    for (int j = 0; i < size; i += kWidth, j++) {
        if (i + kWidth <= size) f(j, i, Full{});
        else f(j, i, size - i);
    }
}

// 1 / sqrt(mean(x^2) + eps). With `residual`, x + residual (rounded) takes the place of x and is written to `sum`.
template <typename T> float inverse_rms(const T* x, const T* residual, T* sum, int64_t size, float eps) {
    Floats sums[kVectors] = {};
    for_lanes<T>(size, [&](int j, int64_t i, auto count) {
        auto v = load(x + i, count);
        if (residual) {
            v = round_as(x, v + load(residual + i, count));
            store(sum + i, count, v);
        }
        accumulate(sums, j, v * v);
    });
    return 1.0f / std::sqrt(fold(sums) / static_cast<float>(size) + eps);
}

// ---- exponential ---------------------------------------------------------------------------------------------------

// Between low and high; nan stays.
inline Floats clamp(Floats x, float low, float high) {
#if defined(__AVX512F__)  // these return their second operand where one is nan; GCC 12 makes four instructions of it
    return (Floats)_mm512_max_ps(_mm512_set1_ps(low), _mm512_min_ps(_mm512_set1_ps(high), (__m512)x));
#else
    x = x > high ? Floats{} + high : x;
    return x < low ? Floats{} + low : x;
#endif
}

// 1 + e^x. x = n ln 2 + r with |r| <= ln 2 / 2, and e^r is its Taylor series to r^7, whose rest is below 0.1 ulp, by
// Estrin's scheme: the latency of Horner's is what a row waits for. 2^n is applied as 2^(n-1) and 2, which reaches inf
// where e^x does. nan stays. ln 2 is split as in Cephes' expf.
inline Floats one_plus_exp(Floats x) {
    x = clamp(x, -87.0f, 89.0f);      // 1 + e^x is 1; e^x is inf
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits
    const Floats shifted = x * 1.44269504f + magic;
    const Floats n = shifted - magic;
    const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts; the first product is exact
    const Floats r2 = r * r;
    const Floats p45 = r * (1.0f / 120) + 1.0f / 24, p67 = r * (1.0f / 5040) + 1.0f / 720;
    const Floats p = (p67 * r2 + p45) * r2 + (r * (1.0f / 6) + 0.5f);
    const Floats power = p * r2 + r + 1.0f;
    const Floats half = power * floats_of((bits_of(shifted) - (0x4b400000 - 126)) << 23);  // 0x4b400000: magic's bits
    return 1.0f + (half + half);
}
inline Pair one_plus_exp(Pair x) { return {one_plus_exp(x.a), one_plus_exp(x.b)}; }

inline Floats sigmoid(const float*, Floats x) { return 1.0f / one_plus_exp(-x); }
#if defined(__AVX512F__)
// For what is rounded to bfloat16: within 2^-21, in half the time. 2^f for |f| <= 1/2 is its Taylor series to f^6, the
// quotient an estimate and one step of Newton's. Where e^-x is past float32, 0.
inline Floats sigmoid(const uint16_t*, Floats x) {
    const __m512 v = (__m512)x, two = _mm512_set1_ps(2.0f);
    const __m512 power = _mm512_mul_ps(v, _mm512_set1_ps(-1.44269504f));
    const __m512 whole = _mm512_roundscale_ps(power, 0), f = _mm512_sub_ps(power, whole);
    const __m512 f2 = _mm512_mul_ps(f, f);
    const auto line = [f](float a, float b) { return _mm512_fmadd_ps(f, _mm512_set1_ps(a), _mm512_set1_ps(b)); };
    __m512 p = _mm512_fmadd_ps(f2, _mm512_set1_ps(1.540353e-4f), line(1.333356e-3f, 9.618129e-3f));
    p = _mm512_fmadd_ps(f2, p, line(5.550411e-2f, 2.402265e-1f));
    p = _mm512_fmadd_ps(f2, p, line(6.931472e-1f, 1.0f));
    const __m512 divisor = _mm512_add_ps(_mm512_set1_ps(1.0f), _mm512_scalef_ps(p, whole));
    const __mmask16 small = _mm512_cmp_ps_mask(v, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);  // and nan
    const __m512 estimate = _mm512_maskz_rcp14_ps(small, divisor);
    return (Floats)_mm512_maskz_mul_ps(small, estimate, _mm512_fnmadd_ps(estimate, divisor, two));
}
// Whether silu = x * sigmoid(x) of every lane rounds to the bfloat16 that x / (1 + e^-x) rounds to: they differ by less
// than 32 places of float32 where e^-x is far from inf, so the middle between two bfloat16 has to be that far away.
inline bool rounds_as_quotient(const uint16_t*, Floats x, Floats silu) {
    const __m512i place = _mm512_and_si512((__m512i)(bits_of(silu) - (0x8000 - 32)), _mm512_set1_epi32(0xffff));
    const __mmask16 safe = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-80.0f), _CMP_GT_OQ);
    return _mm512_mask_cmpgt_epu32_mask(safe, place, _mm512_set1_epi32(64)) == 0xffff;
}
#else
inline Floats sigmoid(const uint16_t*, Floats x) { return 1.0f / one_plus_exp(-x); }
inline bool rounds_as_quotient(const uint16_t*, Floats, Floats) { return false; }
#endif
inline bool rounds_as_quotient(const float*, Floats, Floats) { return false; }
template <typename T> inline Pair sigmoid(const T* p, Pair x) { return {sigmoid(p, x.a), sigmoid(p, x.b)}; }
template <typename T> inline bool rounds_as_quotient(const T* p, Pair x, Pair silu) {
    return rounds_as_quotient(p, x.a, silu.a) && rounds_as_quotient(p, x.b, silu.b);
}

// x / (1 + e^-x) rounded to T: the same bits on every processor, though `silu` = x * sigmoid(x) is not.
template <typename T, typename V> inline V rounded_silu(const T* p, V x, V silu) {
    return rounds_as_quotient(p, x, silu) ? round_as(p, silu) : round_as(p, x / one_plus_exp(-x));
}

// ---- boxed ---------------------------------------------------------------------------------------------------------

template <void (*Float32)(Args&), void (*BFloat16)(Args&)> void by_dtype(const int64_t* args) {
    Args rest(args);
    if (rest.integer() == lowbit::kBFloat16)
        BFloat16(rest);
    else
        Float32(rest);
}

}  // namespace
