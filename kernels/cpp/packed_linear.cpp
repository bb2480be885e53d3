// y = x W^T (+ bias) for serving: dense weights or 4-bit codes into a table, any number of rows. Layouts and roundings:
// kernels/packed_linear.py.
//
// An accumulator is a vector whose lanes run along k: lane i sums k = i, i + lanes, ... in order, and the lanes are
// added once at the end, halves first. Every path below keeps that order for every element of y, so the bits of a row
// depend neither on the other rows nor on threads, panels or chunks.
//
// Why lanes along k: W stays row by row as it was loaded (a dense weight needs no second copy), and the 16 weights that
// a block of codes can mean are one register, looked up by nibble without a shuffle afterwards.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "lowbit.h"

// Accumulators stay in registers only if nothing that sees them is a call.
#define LOWBIT_INLINE __attribute__((always_inline))

namespace {

using lowbit::from_bfloat16;
using lowbit::to_bfloat16;

// A tile of accumulators and its 4 + 1 operands: 29 of 32 registers (AVX512, NEON), or 13 of 16.
constexpr int kRows = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kFeatures = 6;
#else
constexpr int kFeatures = 2;
#endif
constexpr int kMaxPanel = 48;            // most features of a panel of weights that all rows pass
constexpr int kSumsStride = kMaxPanel + 3;
constexpr int64_t kPanelBytes = 20 << 10;  // decoded weights in the first-level cache, beside the rows of a tile
constexpr int64_t kRowsBytes = 512 << 10;  // x that stays in the second-level cache while panels pass
// Rows of x up to which codes are decoded in registers, once for all rows, instead of into a panel.
// 30 layers of SmolLM2-135M, 8 rows, per Zen 4 core: 12.4 ms, 13.4 ms through a panel; 16 rows 24.8 ms, 22.0 ms.
constexpr int kFusedRows = 8;
constexpr int64_t kPrefetchBytes = 8192;  // same layers, one row: 4.1 ms, without 4.9 ms
[[maybe_unused]] constexpr int64_t kSerialWork = 1 << 15;  // fewer products than this are not worth a second thread

struct Problem {
    const void* x;
    int64_t num_rows;
    const void* weight;   // [N, K] floats, or codes [N, K / 32, 8] words of 16 bits
    const float* absmax;  // [N, K / group] or null: dense
    int64_t group;
    const float* codebook;
    const void* bias;  // [N] of x's dtype or null
    bool rounds_before_bias;
    void* y;
    int64_t N, K;
    bool x_bfloat16, y_bfloat16;
    int threads;
};

// ---- vector units ------------------------------------------------------------------------------------------------
// A unit multiplies kStep elements along k at once. `table` holds the 16 weights of one block; `decode` turns 16
// bytes of codes into 32 weights.

#if defined(__AVX512F__)
// Adds the lanes of accumulators: always i and i + 8, then i + 4, i + 2, i + 1, for however many side by side.
struct LaneSums {
    static __m128 quarter(const __m512& v) {
        const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), upper);
        return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }
    static __m128 sum4(__m128 a, __m128 b, __m128 c, __m128 d) {
        const __m128 ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
        const __m128 cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
        return _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd));
    }
    // halves(a, b): [a0 + a2, a1 + a3, b0 + b2, b1 + b3] in quarters; quarters(a, b) the same one level down.
    static __m512 halves(__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    static __m512 quarters(__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    static __m512 eighths(__m512 a, __m512 b) {
        const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
        return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    static __m512 lanes(__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
    }
    // Two features of four rows: quarter r holds 2 partial sums of each feature of row r.
    static LOWBIT_INLINE __m512 two_features(const __m512* v, const __m512* w) {
        return eighths(quarters(halves(v[0], v[1]), halves(v[2], v[3])),
                       quarters(halves(w[0], w[1]), halves(w[2], w[3])));
    }
    // Four rows and up to four features: vector f of row r is v[f * R + r]. Stores four sums of each row.
    template <int R, int F> static LOWBIT_INLINE void four_rows(const __m512* v, float* out, int64_t stride) {
        const __m512* last = v + (F - 1) * R;
        const __m512 low = two_features(v, F > 1 ? v + R : last), high = F > 2 ? two_features(v + 2 * R, last) : low;
        const __m512 all = lanes(low, high);
        _mm_storeu_ps(out, _mm512_castps512_ps128(all));
        _mm_storeu_ps(out + stride, _mm512_extractf32x4_ps(all, 1));
        _mm_storeu_ps(out + 2 * stride, _mm512_extractf32x4_ps(all, 2));
        _mm_storeu_ps(out + 3 * stride, _mm512_extractf32x4_ps(all, 3));
    }
    // out[r * stride + f] = all lanes of v[f * R + r]
    template <int R, int F>
    static LOWBIT_INLINE void sums(const __m512* v, float* out, int64_t stride) {
        // Up to three stores too many in a row of `out`: the next features, or padding, come there later.
#pragma GCC unroll 2
        for (int r = 0; r + 4 <= R; r += 4) {
#pragma GCC unroll 2
            for (int f = 0; f < F; f += 4) {
                if (f + 4 <= F) four_rows<R, 4>(v + f * R + r, out + r * stride + f, stride);
                else four_rows<R, F % 4 ? F % 4 : 4>(v + f * R + r, out + r * stride + f, stride);
            }
        }
#pragma GCC unroll 4
        for (int r = R / 4 * 4; r < R; r++) {
#pragma GCC unroll 2
            for (int f = 0; f < F / 4 * 4; f += 4) {
                const __m512* u = v + f * R + r;
                _mm_storeu_ps(out + r * stride + f,
                              sum4(quarter(u[0]), quarter(u[R]), quarter(u[2 * R]), quarter(u[3 * R])));
            }
#pragma GCC unroll 4
            for (int f = F / 4 * 4; f < F; f++) {
                const __m128 a = quarter(v[f * R + r]);
                _mm_store_ss(out + r * stride + f, sum4(a, a, a, a));
            }
        }
    }
};

struct FloatVector : LaneSums {
    static constexpr int kLanes = 16;
    using Vector = __m512;
    static Vector zero() { return _mm512_setzero_ps(); }
    static Vector load(const float* p) { return _mm512_loadu_ps(p); }
    static Vector multiply_add(Vector a, Vector b, Vector sum) { return _mm512_fmadd_ps(a, b, sum); }
    static void decode(const uint8_t* codes, const float* table, float* out) {
        const __m512 entries = _mm512_loadu_ps(table);
        const __m512i words = _mm512_broadcast_i64x4(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)codes)));
        const __m512i shifts = _mm512_set_epi32(4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0);
        const __m512i high = _mm512_srli_epi32(words, 8);  // a look-up takes the lowest 4 bits
        _mm512_storeu_ps(out, _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), entries));
        _mm512_storeu_ps(out + 16, _mm512_permutexvar_ps(_mm512_srlv_epi32(high, shifts), entries));
    }
};
#elif defined(__AVX2__) && defined(__FMA__)
struct FloatVector {
    static constexpr int kLanes = 8;
    using Vector = __m256;
    static Vector zero() { return _mm256_setzero_ps(); }
    static Vector load(const float* p) { return _mm256_loadu_ps(p); }
    static Vector multiply_add(Vector a, Vector b, Vector sum) { return _mm256_fmadd_ps(a, b, sum); }
    static void decode(const uint8_t* codes, const float* table, float* out) {
        const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
        __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)codes));
        for (int l = 0; l < 4; l++, words = _mm256_srli_epi32(words, 4)) {
            const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(words, 28));  // sign bit = bit 3 of the code
            const __m256 a = _mm256_permutevar8x32_ps(low, words), b = _mm256_permutevar8x32_ps(high, words);
            _mm256_storeu_ps(out + 8 * l, _mm256_blendv_ps(a, b, upper));
        }
    }
};
#else
struct FloatVector {
    static constexpr int kLanes = 4;
    using Vector = float __attribute__((vector_size(16)));
    static Vector zero() { return Vector{}; }
    static Vector load(const float* p) {
        Vector v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static Vector multiply_add(Vector a, Vector b, Vector sum) { return sum + a * b; }
    static void decode(const uint8_t* codes, const float* table, float* out) {
        for (int l = 0; l < 4; l++) {
            for (int w = 0; w < 8; w++) out[8 * l + w] = table[codes[2 * w + l / 2] >> l % 2 * 4 & 15];
        }
    }
};
#endif

// Sums in float32 of float32 operands; with a bfloat16 x, the weights in the table were rounded to bfloat16.
struct FloatUnit : FloatVector {
    using Element = float;
    static constexpr int kStep = kLanes;
    static float widen(float value) { return value; }
    static float widen(uint16_t value) { return from_bfloat16(value); }
#if !defined(__AVX512F__)
    static float sum(const Vector& v) {
        float lane[kLanes];
        std::memcpy(lane, &v, sizeof lane);
        for (int half = kLanes / 2; half; half /= 2) {
            for (int i = 0; i < half; i++) lane[i] += lane[i + half];
        }
        return lane[0];
    }
    // out[r * stride + f] = all lanes of v[f * R + r]
    template <int R, int F> static void sums(const Vector* v, float* out, int64_t stride) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
            for (int f = 0; f < F; f++) out[r * stride + f] = sum(v[f * R + r]);
        }
    }
#endif
    static void decode_block(const Problem& p, const uint8_t* codes, float scale, int64_t count, float* out) {
        float table[16];
        for (int i = 0; i < 16; i++) {
            const float value = p.codebook[i] * scale;
            table[i] = p.x_bfloat16 ? from_bfloat16(to_bfloat16(value)) : value;
        }
        for (int64_t k = 0; k < count; k += 32) decode(codes + k / 2, table, out + k);
    }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define LOWBIT_BFLOAT16_UNIT
struct BFloat16Unit : LaneSums {
    using Element = uint16_t;
    using Vector = __m512;
    static constexpr int kStep = 32, kLanes = 16;
    static Vector zero() { return _mm512_setzero_ps(); }
    static __m512i load(const uint16_t* p) { return _mm512_loadu_si512(p); }
    static Vector multiply_add(__m512i a, __m512i b, Vector sum) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }
    static uint16_t widen(uint16_t value) { return value; }
    static uint16_t widen(float) { return 0; }  // float32 weights never meet a bfloat16 x
    static __m512i table(__m512 codebook, float scale) {
        const __m512 values = _mm512_mul_ps(codebook, _mm512_set1_ps(scale));
        return (__m512i)_mm512_cvtne2ps_pbh(values, values);  // twice, without a shuffle
    }
    static __m512i weights(const uint8_t* codes, __m512i table) {
        const __m512i shifts = _mm512_set_epi64(0x000c000c000c000c, 0x000c000c000c000c, 0x0008000800080008,
                                                0x0008000800080008, 0x0004000400040004, 0x0004000400040004, 0, 0);
        const __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)codes));
        // The table is there twice, so that bit 4 of an index does not matter.
        return _mm512_permutexvar_epi16(_mm512_srlv_epi16(words, shifts), table);
    }
    static LOWBIT_INLINE void decode_block(const Problem& p, const uint8_t* codes, float scale, int64_t count,
                                           uint16_t* out) {
        const __m512i entries = table(_mm512_loadu_ps(p.codebook), scale);
        for (int64_t k = 0; k < count; k += 32) _mm512_storeu_si512(out + k, weights(codes + k / 2, entries));
    }
};
#endif

// ---- one tile of y -----------------------------------------------------------------------------------------------

// What the processor should fetch from memory while it multiplies: `step` bytes beside each step along k.
struct Ahead {
    const char* next;
    int64_t step;
    LOWBIT_INLINE void fetch() {
        for (int64_t i = 0; i < step; i += 64) __builtin_prefetch(next + i);
        next += step;
    }
};

// out[r * kSumsStride + f] = x[r] . w[f], for R rows and F features that lie `x_stride` and `w_stride` elements apart.
template <typename Unit, int R, int F>
void dot_tile(const typename Unit::Element* x, int64_t x_stride, const typename Unit::Element* w, int64_t w_stride,
              int64_t K, float* out, Ahead& ahead) {
    typename Unit::Vector acc[F * R];
#pragma GCC unroll 32
    for (int i = 0; i < F * R; i++) acc[i] = Unit::zero();
    const auto step = [&](const auto* xs, int64_t x_next, const auto* ws, int64_t w_next) LOWBIT_INLINE {
        decltype(Unit::load(xs)) rows[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) rows[r] = Unit::load(xs + r * x_next);
#pragma GCC unroll 8
        for (int f = 0; f < F; f++) {
            const auto weights = Unit::load(ws + f * w_next);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) acc[f * R + r] = Unit::multiply_add(weights, rows[r], acc[f * R + r]);
        }
    };
    const int64_t full = K / Unit::kStep * Unit::kStep;
    for (int64_t k = 0; k < full; k += Unit::kStep) {
        ahead.fetch();
        step(x + k, x_stride, w + k, w_stride);
    }
    if (full < K) {
        typename Unit::Element x_tail[R * Unit::kStep] = {}, w_tail[F * Unit::kStep] = {};
        for (int r = 0; r < R; r++) std::copy(x + r * x_stride + full, x + r * x_stride + K, x_tail + r * Unit::kStep);
        for (int f = 0; f < F; f++) std::copy(w + f * w_stride + full, w + f * w_stride + K, w_tail + f * Unit::kStep);
        step(x_tail, Unit::kStep, w_tail, Unit::kStep);
    }
    Unit::template sums<R, F>(acc, out, kSumsStride);
}

#if defined(LOWBIT_BFLOAT16_UNIT)
// The same from codes, which are decoded in registers: the weights are not kept.
template <int R, int F>
void dot_tile_codes(const Problem& p, const uint16_t* x, const uint8_t* codes, const float* absmax, int64_t num_groups,
                  float* out) {
    using Unit = BFloat16Unit;
    __m512 acc[F * R];
#pragma GCC unroll 32
    for (int i = 0; i < F * R; i++) acc[i] = Unit::zero();
    __m512i tables[F];
    const int64_t codes_stride = p.K / 2, x_stride = p.K;
    for (int64_t k = 0; k < p.K; absmax++) {
#pragma GCC unroll 8
        for (int f = 0; f < F; f++) {
            tables[f] = Unit::table(_mm512_loadu_ps(p.codebook), absmax[f * num_groups]);
        }
#pragma GCC unroll 8
        for (int f = 0; f < F; f++) __builtin_prefetch(codes + f * codes_stride + k / 2 + kPrefetchBytes);
        for (const int64_t stop = k + p.group; k < stop; k += 32) {
            __m512i rows[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) rows[r] = Unit::load(x + r * x_stride + k);
#pragma GCC unroll 8
            for (int f = 0; f < F; f++) {
                const __m512i weights = Unit::weights(codes + f * codes_stride + k / 2, tables[f]);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) acc[f * R + r] = Unit::multiply_add(weights, rows[r], acc[f * R + r]);
            }
        }
    }
    Unit::sums<R, F>(acc, out, kSumsStride);
}
#endif

// ---- from float32 sums to y --------------------------------------------------------------------------------------

// A bias is added before the only rounding, as addmm does, or after it and rounded again, as a tensor of its own.
template <typename B, typename Y>
void store_row(const float* sums, const B* bias, bool rounds_before_bias, int64_t count, Y* y) {
    if (!bias) {
        for (int64_t i = 0; i < count; i++) lowbit::store(y + i, sums[i]);
    } else if (rounds_before_bias) {
        for (int64_t i = 0; i < count; i++) {
            lowbit::store(y + i, lowbit::round_as(y, sums[i]) + lowbit::load(bias + i));
        }
    } else {
        for (int64_t i = 0; i < count; i++) lowbit::store(y + i, sums[i] + lowbit::load(bias + i));
    }
}

#if defined(LOWBIT_BFLOAT16_UNIT)
__m512 widen(__m256i bfloat16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bfloat16), 16));
}

// The frequent case without scalar remainders; the overload is preferred to the template.
void store_row(const float* sums, const uint16_t* bias, bool rounds_before_bias, int64_t count, uint16_t* y) {
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 mask = count - i < 16 ? (1u << (count - i)) - 1 : 0xffff;
        __m512 value = _mm512_maskz_loadu_ps(mask, sums + i);
        if (bias) {
            if (rounds_before_bias) value = widen((__m256i)_mm512_cvtneps_pbh(value));
            value = _mm512_add_ps(value, widen(_mm256_maskz_loadu_epi16(mask, bias + i)));
        }
        _mm256_mask_storeu_epi16(y + i, mask, (__m256i)_mm512_cvtneps_pbh(value));
    }
}
#endif

void store_rows(const Problem& p, const float* sums, int64_t row, int64_t rows, int64_t feature, int64_t count) {
    const bool before = p.rounds_before_bias;
    for (int64_t r = 0; r < rows; r++, sums += kSumsStride) {
        const int64_t at = (row + r) * p.N + feature;
        const float* bias = p.bias ? (const float*)p.bias + feature : nullptr;
        const uint16_t* bias16 = p.bias ? (const uint16_t*)p.bias + feature : nullptr;
        if (!p.x_bfloat16) store_row(sums, bias, before, count, (float*)p.y + at);
        else if (p.y_bfloat16) store_row(sums, bias16, before, count, (uint16_t*)p.y + at);
        else store_row(sums, bias16, before, count, (float*)p.y + at);
    }
}

// ---- all of y ----------------------------------------------------------------------------------------------------

template <typename Unit> void decode_row(const Problem& p, int64_t feature, typename Unit::Element* out) {
    if (p.absmax) {
        const uint8_t* codes = (const uint8_t*)p.weight + feature * (p.K / 2);
        const float* absmax = p.absmax + feature * (p.K / p.group);
        for (int64_t k = 0; k < p.K; k += p.group) Unit::decode_block(p, codes + k / 2, *absmax++, p.group, out + k);
    } else {  // bfloat16 weights for float32 arithmetic
        const uint16_t* row = (const uint16_t*)p.weight + feature * p.K;
        for (int64_t k = 0; k < p.K; k++) out[k] = Unit::widen(row[k]);
    }
}

#if defined(LOWBIT_BFLOAT16_UNIT)
template <int R> void code_rows(const Problem& p, int64_t feature, int64_t count, float* sums) {
    constexpr int F = R <= 4 ? 6 : 3;  // at most 24 accumulators
    const uint16_t* x = (const uint16_t*)p.x;
    const int64_t num_groups = p.K / p.group;
    const auto codes = [&](int64_t f) { return (const uint8_t*)p.weight + (feature + f) * (p.K / 2); };
    const auto absmax = [&](int64_t f) { return p.absmax + (feature + f) * num_groups; };
    int64_t f = 0;
    for (; f + F <= count; f += F) dot_tile_codes<R, F>(p, x, codes(f), absmax(f), num_groups, sums + f);
    for (; f < count; f++) dot_tile_codes<R, 1>(p, x, codes(f), absmax(f), num_groups, sums + f);
}

// Features begin..end for at most kFusedRows rows.
void code_features(const Problem& p, int64_t begin, int64_t end) {
    float sums[kFusedRows * kSumsStride];
    for (int64_t feature = begin; feature < end; feature += kMaxPanel) {
        const int64_t count = std::min<int64_t>(kMaxPanel, end - feature);
        switch (p.num_rows) {
            case 1: code_rows<1>(p, feature, count, sums); break;
            case 2: code_rows<2>(p, feature, count, sums); break;
            case 3: code_rows<3>(p, feature, count, sums); break;
            case 4: code_rows<4>(p, feature, count, sums); break;
            case 5: code_rows<5>(p, feature, count, sums); break;
            case 6: code_rows<6>(p, feature, count, sums); break;
            case 7: code_rows<7>(p, feature, count, sums); break;
            default: code_rows<8>(p, feature, count, sums);
        }
        store_rows(p, sums, 0, p.num_rows, feature, count);
    }
}
#endif

template <typename Unit, int R>
void tile_rows(const Problem& p, const typename Unit::Element* x, const typename Unit::Element* w, int64_t w_stride,
               int64_t count, float* sums, Ahead& ahead) {
    int64_t f = 0;
    for (; f + kFeatures <= count; f += kFeatures) {
        dot_tile<Unit, R, kFeatures>(x, p.K, w + f * w_stride, w_stride, p.K, sums + f, ahead);
    }
    for (; f < count; f++) dot_tile<Unit, R, 1>(x, p.K, w + f * w_stride, w_stride, p.K, sums + f, ahead);
}

// Features begin..end for all rows, panel by panel of weights that are dense or decoded first.
template <typename Unit>
void linear_features(const Problem& p, const typename Unit::Element* x, int64_t begin, int64_t end) {
    using Element = typename Unit::Element;
    const bool direct = !p.absmax && sizeof(Element) == (p.x_bfloat16 ? 2 : 4);
    const int64_t w_stride = direct ? p.K : p.K + 32;  // not a power of two apart
    const int64_t element_bytes = sizeof(Element), row_bytes = p.absmax ? p.K / 2 : p.K * (p.x_bfloat16 ? 2 : 4);
    const int64_t panel_features = std::clamp<int64_t>(kPanelBytes / (w_stride * element_bytes) / kFeatures * kFeatures,
                                                       kFeatures, kMaxPanel);
    const int64_t row_block = std::max<int64_t>(kRowsBytes / (p.K * element_bytes) / kRows, 8) * kRows;
    std::vector<Element> decoded(direct ? 0 : panel_features * w_stride);
    float sums[kRows * kSumsStride];
    for (int64_t first = 0; first < p.num_rows; first += row_block) {
        const int64_t last = std::min(p.num_rows, first + row_block), num_tiles = (last - first + kRows - 1) / kRows;
        for (int64_t feature = begin; feature < end; feature += panel_features) {
            const int64_t count = std::min(panel_features, end - feature);
            const Element* w = direct ? (const Element*)p.weight + feature * p.K : decoded.data();
            if (!direct) for (int64_t f = 0; f < count; f++) decode_row<Unit>(p, feature + f, &decoded[f * w_stride]);
            // The next panel comes from memory while this one is multiplied.
            const int64_t steps = num_tiles * ((count + kFeatures - 1) / kFeatures) * (p.K / Unit::kStep) + 1;
            Ahead ahead{(const char*)p.weight + (feature + count) * row_bytes, count * row_bytes / steps + 1};
            for (int64_t row = first; row < last; row += kRows) {
                const int64_t rows = std::min<int64_t>(kRows, last - row);
                const Element* x_rows = x + row * p.K;
                switch (rows) {
                    case 1: tile_rows<Unit, 1>(p, x_rows, w, w_stride, count, sums, ahead); break;
                    case 2: tile_rows<Unit, 2>(p, x_rows, w, w_stride, count, sums, ahead); break;
                    case 3: tile_rows<Unit, 3>(p, x_rows, w, w_stride, count, sums, ahead); break;
                    default: tile_rows<Unit, 4>(p, x_rows, w, w_stride, count, sums, ahead);
                }
                store_rows(p, sums, row, rows, feature, count);
            }
        }
    }
}

template <typename Unit> void linear(const Problem& p, const typename Unit::Element* x) {
    const int64_t units = (p.N + kFeatures - 1) / kFeatures;
    const int64_t threads = p.num_rows * p.N * p.K > kSerialWork ? p.threads : 1;
    const auto part = [&](int64_t first, int64_t last) {
        const int64_t begin = first * kFeatures, end = std::min(p.N, last * kFeatures);
#if defined(LOWBIT_BFLOAT16_UNIT)
        if (p.absmax && p.x_bfloat16 && p.num_rows <= kFusedRows) return code_features(p, begin, end);
#endif
        linear_features<Unit>(p, x, begin, end);
    };
    // Few rows wait for memory, which streams best in long runs: one row of SmolLM2-135M's layers takes 2.6 ms in one part
    // a thread, 3.0 ms in four.
    lowbit::parallel_for(units, threads, part, p.num_rows <= 8 ? 1 : 4);
}

}  // namespace

// x, num_rows, weight, absmax or 0, group, codebook, bias or 0, rounds_before_bias, y, out_features, in_features,
// dtypes of x and y, threads
extern "C" void packed_linear(const int64_t* boxed) {
    lowbit::Args args(boxed);
    Problem p;
    p.x = args.pointer<const void>(), p.num_rows = args.integer(), p.weight = args.pointer<const void>();
    p.absmax = args.pointer<const float>(), p.group = args.integer(), p.codebook = args.pointer<const float>();
    p.bias = args.pointer<const void>(), p.rounds_before_bias = args.integer(), p.y = args.pointer<void>();
    p.N = args.integer(), p.K = args.integer();
    p.x_bfloat16 = args.integer() == lowbit::kBFloat16, p.y_bfloat16 = args.integer() == lowbit::kBFloat16;
    p.threads = args.integer();
    if (!p.x_bfloat16) return linear<FloatUnit>(p, (const float*)p.x);
#if defined(LOWBIT_BFLOAT16_UNIT)
    linear<BFloat16Unit>(p, (const uint16_t*)p.x);
#else
    std::vector<float> x(p.num_rows * p.K);
    for (size_t i = 0; i < x.size(); i++) x[i] = from_bfloat16(((const uint16_t*)p.x)[i]);
    linear<FloatUnit>(p, x.data());
#endif
}

// codes, absmax, group, codebook, out [N, K] of dtype, N, K, dtype, threads
extern "C" void dequantize(const int64_t* boxed) {
    lowbit::Args args(boxed);
    Problem p{};
    p.weight = args.pointer<const void>(), p.absmax = args.pointer<const float>(), p.group = args.integer();
    p.codebook = args.pointer<const float>();
    void* out = args.pointer<void>();
    p.N = args.integer(), p.K = args.integer();
    p.x_bfloat16 = args.integer() == lowbit::kBFloat16;
    p.threads = args.integer();
    lowbit::parallel_for(p.N, p.N * p.K > kSerialWork ? p.threads : 1, [&](int64_t begin, int64_t end) {
        for (int64_t feature = begin; feature < end; feature++) {
            if (!p.x_bfloat16) {
                decode_row<FloatUnit>(p, feature, (float*)out + feature * p.K);
            } else {
#if defined(LOWBIT_BFLOAT16_UNIT)
                decode_row<BFloat16Unit>(p, feature, (uint16_t*)out + feature * p.K);
#else
                std::vector<float> row(p.K);  // float32 arithmetic, on weights that are rounded already
                decode_row<FloatUnit>(p, feature, row.data());
                for (int64_t k = 0; k < p.K; k++) lowbit::store((uint16_t*)out + feature * p.K + k, row[k]);
#endif
            }
        }
    });
}
