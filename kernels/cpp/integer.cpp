// INT4 and INT8 weights: quantize, dequantize, and y = x W^T for few rows of x, W rounded to x's dtype. Grids, bytes and
// roundings: kernels/int4.py and kernels/int8.py.
//
// The 16 weights that a group of 4-bit codes can mean are one register, as for NF4: a look-up by nibble gives weights in
// the order of x, from the bytes as they are stored. Sums run in lanes along k that are added once at the end, in an
// order that depends on in_features and the processor only.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "lowbit.h"

#define LOWBIT_INLINE __attribute__((always_inline)) inline

namespace {

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds |v| < 2^22 half to even
constexpr int64_t kSerialWork = 1 << 15;  // fewer weights than this are not worth a second thread
constexpr int kMostRows = 8;

struct Weight {
    const uint8_t* packed;  // [N, ceil(K / 2)], or [N, K] int8
    const float* scales;    // [N, groups]
    const uint8_t* zeros;   // [N, groups], or null
    int64_t N, K, group, groups;
    bool four_bits;

    explicit Weight(lowbit::Args& args) {
        packed = args.pointer<const uint8_t>(), scales = args.pointer<const float>();
        zeros = args.pointer<const uint8_t>(), four_bits = args.integer() == 4;
        N = args.integer(), K = args.integer(), group = args.integer(), groups = K / group;
    }
    int64_t row_bytes() const { return four_bits ? (K + 1) / 2 : K; }
    int zero(int64_t n, int64_t g) const { return zeros ? zeros[n * groups + g] : 8; }
    int64_t threads(int64_t wanted) const { return N * K > kSerialWork ? wanted : 1; }
};

// ---- quantize ----------------------------------------------------------------------------------------------------

struct Grid {
    int64_t group;
    bool four_bits, symmetric;
    float divisor;
    int64_t scale_dtype;
};

int32_t bits_of(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

float float_of(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

int32_t sorted(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }  // integers in the order of the floats

// Rounds a scale, positive or 0, to float16; inf above its largest.
float as_float16(float v) {
    if (v < 0x1p-14f) return (v + 0.5f) - 0.5f;  // subnormal: multiples of 2^-24, the places of 0.5..1
    const int32_t bits = bits_of(v);
    const float rounded = float_of((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fff);
    return rounded > 65504.0f ? float_of(0x7f800000) : rounded;
}

float as_scale(float v, int64_t dtype) {
    if (dtype == lowbit::kBFloat16) v = lowbit::from_bfloat16(lowbit::to_bfloat16(v));
    if (dtype == lowbit::kFloat16) v = as_float16(v);
    return v == 0 ? 1 : v;
}

// Codes of one group, 4-bit ones plus their zero; false if a weight or the scale is not finite. `size` is a constant for
// the usual groups, and the loops are plain, so that compilers make vectors of them on any processor.
template <typename Size>
bool quantize_group(const float* w, Size size, const Grid& grid, int8_t* codes, float* out_scale, uint8_t* out_zero) {
    int32_t largest = 0, low = 0, high = 0;
#pragma omp simd reduction(max : largest, high) reduction(min : low)
    for (int64_t i = 0; i < size; i++) {
        const int32_t bits = bits_of(w[i]), place = sorted(bits), magnitude = bits & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
        low = place < low ? place : low;
        high = place > high ? place : high;
    }
    if (largest >= 0x7f800000) return false;
    const float lowest = low < 0 ? float_of(sorted(low)) : 0, highest = float_of(high);
    const float span = grid.symmetric ? float_of(largest) / grid.divisor : (highest - lowest) / 15;
    const float scale = as_scale(span, grid.scale_dtype);
    if (bits_of(scale) >= 0x7f800000) return false;
    float zero = 0, least = -127, most = 127;
    if (grid.four_bits) {
        zero = 8;
        if (!grid.symmetric) {
            zero = std::min(-lowest / scale, 15.0f);
            zero = (zero + kRound) - kRound;
            *out_zero = static_cast<uint8_t>(zero);
        }
        least = -zero, most = 15 - zero;
    }
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
        float v = w[i] / scale;
        v = v < least ? least : v;
        v = v > most ? most : v;
        codes[i] = static_cast<int8_t>(static_cast<int>((v + kRound) - kRound + zero));
    }
    *out_scale = scale;
    return true;
}

template <typename T>
bool quantize_row(const T* w, int64_t K, const Grid& grid, uint8_t* packed, float* scales, uint8_t* zeros) {
    thread_local std::vector<float> wide;
    thread_local std::vector<int8_t> codes;
    wide.resize(K), codes.resize(K + 1);
    for (int64_t k = 0; k < K; k++) wide[k] = lowbit::load(w + k);
    const auto groups = [&](auto size) {
        for (int64_t g = 0, k = 0; k < K; g++, k += size) {
            uint8_t* zero = zeros ? zeros + g : nullptr;
            if (!quantize_group(&wide[k], size, grid, &codes[k], scales + g, zero)) return false;
        }
        return true;
    };
    const bool finite = grid.group == 32   ? groups(std::integral_constant<int64_t, 32>{})
                        : grid.group == 64 ? groups(std::integral_constant<int64_t, 64>{})
                                           : groups(grid.group);
    if (!finite) return false;
    if (!grid.four_bits) {
        std::memcpy(packed, codes.data(), K);
        return true;
    }
    codes[K] = 0;
    const int8_t* pairs = codes.data();
#pragma omp simd
    for (int64_t i = 0; i < (K + 1) / 2; i++) packed[i] = static_cast<uint8_t>(pairs[2 * i] | pairs[2 * i + 1] << 4);
    return true;
}

// ---- dequantize --------------------------------------------------------------------------------------------------

#if defined(__AVX512BW__)
#define LOWBIT_TABLES
LOWBIT_INLINE __m512 table_of(int zero, float scale) {
    const __m512i codes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(zero))), _mm512_set1_ps(scale));
}
// Each half holds the 16 entries, so that bit 4 of an index does not matter. Rounded in integers: the instruction that
// converts to bfloat16 takes subnormal numbers for zeros.
LOWBIT_INLINE __m512i bfloat16_table(int zero, float scale) {
    const __m512i bits = _mm512_castps_si512(table_of(zero, scale));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}
// Byte i becomes word 2i, its low nibble, and word 2i + 1, its high one; look-ups ignore the bits above.
LOWBIT_INLINE __m512i look_up32(__m128i bytes, __m512i table) {
    const __m512i v = _mm512_cvtepu8_epi32(bytes);
    return _mm512_permutexvar_epi16(_mm512_or_si512(v, _mm512_slli_epi32(v, 12)), table);
}
LOWBIT_INLINE __m512 look_up16(__m128i bytes, __m512 table) {
    const __m512i v = _mm512_cvtepu8_epi64(bytes);
    return _mm512_permutexvar_ps(_mm512_or_si512(v, _mm512_slli_epi64(v, 28)), table);
}
// Whole steps of a group; returns how many weights are done.
inline int64_t decode_steps(const uint8_t* packed, int64_t count, int zero, float scale, uint16_t* out) {
    const __m512i table = bfloat16_table(zero, scale);
    int64_t k = 0;
    for (; k + 32 <= count; k += 32) {
        _mm512_storeu_si512(out + k, look_up32(_mm_loadu_si128((const __m128i*)(packed + k / 2)), table));
    }
    return k;
}
inline int64_t decode_steps(const uint8_t* packed, int64_t count, int zero, float scale, float* out) {
    const __m512 table = table_of(zero, scale);
    int64_t k = 0;
    for (; k + 16 <= count; k += 16) {
        _mm512_storeu_ps(out + k, look_up16(_mm_loadl_epi64((const __m128i*)(packed + k / 2)), table));
    }
    return k;
}
#endif

template <typename T> void decode_group4(const uint8_t* packed, int64_t count, int zero, float scale, T* out) {
    int64_t k = 0;
#if defined(LOWBIT_TABLES)
    k = decode_steps(packed, count, zero, scale, out);
#endif
    for (; k + 2 <= count; k += 2) {
        const int byte = packed[k / 2];
        lowbit::store(out + k, static_cast<float>((byte & 15) - zero) * scale);
        lowbit::store(out + k + 1, static_cast<float>((byte >> 4) - zero) * scale);
    }
    if (k < count) lowbit::store(out + k, static_cast<float>((packed[k / 2] & 15) - zero) * scale);
}

// Weights of row n, rounded to T.
template <typename T> void decode_row(const Weight& w, int64_t n, T* out) {
    const uint8_t* row = w.packed + n * w.row_bytes();
    for (int64_t g = 0; g < w.groups; g++) {
        const float scale = w.scales[n * w.groups + g];
        const int64_t first = g * w.group;
        if (w.four_bits) {
            decode_group4(row + first / 2, w.group, w.zero(n, g), scale, out + first);
        } else {
            const int8_t* codes = reinterpret_cast<const int8_t*>(row) + first;
            for (int64_t i = 0; i < w.group; i++) lowbit::store(out + first + i, static_cast<float>(codes[i]) * scale);
        }
    }
}

// ---- few rows of x -----------------------------------------------------------------------------------------------

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define LOWBIT_BFLOAT16_UNIT
template <bool kTail> LOWBIT_INLINE __m512i load_x(const uint16_t* x, __mmask32 tail) {
    if constexpr (kTail) return _mm512_maskz_loadu_epi16(tail, x);
    return _mm512_loadu_si512(x);
}
// 32 weights from the codes at k: `grid` holds the table of a group's 4-bit codes, or the scale of 8-bit ones.
template <bool kFour, bool kTail>
LOWBIT_INLINE __m512i load_weights(const uint8_t* row, int64_t k, __m512i grid, __mmask32 tail) {
    __m512i weights;
    if constexpr (kFour) {
        const __m128i* p = reinterpret_cast<const __m128i*>(row + k / 2);
        const __mmask16 bytes = static_cast<__mmask16>((1u << (_mm_popcnt_u32(tail) + 1) / 2) - 1);
        weights = look_up32(kTail ? _mm_maskz_loadu_epi8(bytes, p) : _mm_loadu_si128(p), grid);
    } else {
        const __m256i* p = reinterpret_cast<const __m256i*>(row + k);
        const __m256i codes = kTail ? _mm256_maskz_loadu_epi8(tail, p) : _mm256_loadu_si256(p);
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
        const __m512 scale = _mm512_castsi512_ps(grid);
        weights = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, scale), _mm512_mul_ps(low, scale));
    }
    return kTail ? _mm512_maskz_mov_epi16(tail, weights) : weights;
}
// acc[f * R + r] += x[r] . w[f] over the 32 k from `k` on, or fewer in a tail.
template <int R, int F, bool kFour, bool kTail>
LOWBIT_INLINE void step(const uint16_t* x, int64_t x_stride, const uint8_t* rows, int64_t row_bytes, int64_t k,
                        const __m512i* grids, __mmask32 tail, __m512* acc) {
    __m512i xs[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) xs[r] = load_x<kTail>(x + r * x_stride + k, tail);
#pragma GCC unroll 4
    for (int f = 0; f < F; f++) {
        __builtin_prefetch(rows + (f + F) * row_bytes + (kFour ? k / 2 : k));  // rows are short streams to a processor
        const __m512i weights = load_weights<kFour, kTail>(rows + f * row_bytes, k, grids[f], tail);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            acc[f * R + r] = _mm512_dpbf16_ps(acc[f * R + r], (__m512bh)weights, (__m512bh)xs[r]);
        }
    }
}

// y[r, n] for R rows and F features from n on, weights decoded in registers.
template <int R, int F, bool kFour> void features(const Weight& w, const uint16_t* x, uint16_t* y, int64_t n) {
    const int64_t row_bytes = w.row_bytes(), x_stride = w.K, groups = w.groups, group = w.group;
    const uint8_t *rows = w.packed + n * row_bytes, *zeros = w.zeros ? w.zeros + n * groups : nullptr;
    const float* scales = w.scales + n * groups;
    const __m512 codes = table_of(0, 1), centred = table_of(8, 1);
    __m512 acc[F * R];
#pragma GCC unroll 32
    for (int i = 0; i < F * R; i++) acc[i] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512i grids[F];
#pragma GCC unroll 4
        for (int f = 0; f < F; f++) {
            const __m512 scale = _mm512_set1_ps(scales[f * groups + g]);
            if constexpr (kFour) {
                const __m512 from_zero = zeros ? _mm512_sub_ps(codes, _mm512_set1_ps(zeros[f * groups + g])) : centred;
                grids[f] = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(from_zero, scale)));
            } else {
                grids[f] = _mm512_castps_si512(scale);
            }
        }
        int64_t k = g * group;
        const int64_t end = k + group;
        for (; k + 32 <= end; k += 32) step<R, F, kFour, false>(x, x_stride, rows, row_bytes, k, grids, 0, acc);
        if (k < end) step<R, F, kFour, true>(x, x_stride, rows, row_bytes, k, grids, (1u << (end - k)) - 1, acc);
    }
#pragma GCC unroll 32
    for (int i = 0; i < F * R; i++) lowbit::store(y + i % R * w.N + n + i / R, _mm512_reduce_add_ps(acc[i]));
}

template <int R, bool kFour>
void all_features(const Weight& w, const uint16_t* x, uint16_t* y, int64_t rows, int64_t begin, int64_t end) {
    if constexpr (R > 0) {
        if (rows != R) return all_features<R - 1, kFour>(w, x, y, rows, begin, end);
        constexpr int F = R <= 4 ? 4 : 2;
        for (; begin + F <= end; begin += F) features<R, F, kFour>(w, x, y, begin);
        for (; begin < end; begin++) features<R, 1, kFour>(w, x, y, begin);
    }
}
#endif

float dot(const float* a, const float* b, int64_t count) {
    float lanes[16] = {};
    int64_t k = 0;
    for (; k + 16 <= count; k += 16) {
        for (int i = 0; i < 16; i++) lanes[i] += a[k + i] * b[k + i];
    }
    for (int i = 0; k < count; k++, i++) lanes[i] += a[k] * b[k];
    for (int half = 8; half; half /= 2) {
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    }
    return lanes[0];
}

template <typename T> void few_rows(const Weight& w, const T* x, int64_t rows, T* y, int64_t threads) {
    thread_local std::vector<float> x_wide;  // of the calling thread
    x_wide.resize(rows * w.K);
    for (int64_t i = 0; i < rows * w.K; i++) x_wide[i] = lowbit::load(x + i);
    const float* wide = x_wide.data();
    lowbit::parallel_for(w.N, threads, [&](int64_t begin, int64_t end) {
        thread_local std::vector<T> decoded;
        thread_local std::vector<float> weights;
        decoded.resize(w.K), weights.resize(w.K);
        for (int64_t n = begin; n < end; n++) {
            decode_row(w, n, decoded.data());
            for (int64_t k = 0; k < w.K; k++) weights[k] = lowbit::load(&decoded[k]);
            for (int64_t r = 0; r < rows; r++) lowbit::store(y + r * w.N + n, dot(weights.data(), wide + r * w.K, w.K));
        }
    }, 1);
}

}  // namespace

// weights, dtype, out_features, in_features, group, bits, symmetric, divisor, scale dtype, packed, scales, zeros or 0,
// status: set to 1 if a weight or a scale is not finite; threads
extern "C" void integer_quantize(const int64_t* boxed) {
    lowbit::Args args(boxed);
    const void* weights = args.pointer<const void>();
    const bool bfloat16 = args.integer() == lowbit::kBFloat16;
    const int64_t N = args.integer(), K = args.integer();
    Grid grid;
    grid.group = args.integer(), grid.four_bits = args.integer() == 4, grid.symmetric = args.integer();
    grid.divisor = args.real(), grid.scale_dtype = args.integer();
    uint8_t* packed = args.pointer<uint8_t>();
    float* scales = args.pointer<float>();
    uint8_t* zeros = args.pointer<uint8_t>();
    int64_t* status = args.pointer<int64_t>();
    const int64_t row_bytes = grid.four_bits ? (K + 1) / 2 : K, groups = K / grid.group;
    std::atomic<bool> failed{false};
    lowbit::parallel_for(N, N * K > kSerialWork ? args.integer() : 1, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end && !failed; n++) {
            uint8_t *row = packed + n * row_bytes, *row_zeros = zeros ? zeros + n * groups : nullptr;
            float* row_scales = scales + n * groups;
            const auto quantize = [&](const auto* w) { return quantize_row(w + n * K, K, grid, row, row_scales, row_zeros); };
            const bool fine = bfloat16 ? quantize((const uint16_t*)weights) : quantize((const float*)weights);
            if (!fine) failed = true;
        }
    });
    *status = failed;
}

// packed, scales, zeros or 0, bits, out_features, in_features, group, out, dtype, threads
extern "C" void integer_dequantize(const int64_t* boxed) {
    lowbit::Args args(boxed);
    const Weight w(args);
    void* out = args.pointer<void>();
    const bool bfloat16 = args.integer() == lowbit::kBFloat16;
    lowbit::parallel_for(w.N, w.threads(args.integer()), [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; n++) {
            if (bfloat16) decode_row(w, n, (uint16_t*)out + n * w.K);
            else decode_row(w, n, (float*)out + n * w.K);
        }
    });
}

// packed, scales, zeros or 0, bits, out_features, in_features, group, x, y, dtype of both, number of rows, threads
extern "C" void integer_few_rows(const int64_t* boxed) {
    lowbit::Args args(boxed);
    const Weight w(args);
    const void* x = args.pointer<const void>();
    void* y = args.pointer<void>();
    const bool bfloat16 = args.integer() == lowbit::kBFloat16;
    const int64_t rows = args.integer(), threads = w.threads(args.integer());
    if (!bfloat16) return few_rows(w, (const float*)x, rows, (float*)y, threads);
#if defined(LOWBIT_BFLOAT16_UNIT)
    constexpr int64_t kBlock = 32;  // features whose codes stay in the second-level cache while all rows pass
    lowbit::parallel_for((w.N + kBlock - 1) / kBlock, threads, [&](int64_t first, int64_t last) {
        for (int64_t n = first * kBlock; n < std::min(w.N, last * kBlock); n += kBlock) {
            const int64_t end = std::min(w.N, n + kBlock);
            for (int64_t row = 0; row < rows; row += kMostRows) {
                const uint16_t* xs = static_cast<const uint16_t*>(x) + row * w.K;
                uint16_t* ys = static_cast<uint16_t*>(y) + row * w.N;
                const int64_t count = std::min<int64_t>(kMostRows, rows - row);
                if (w.four_bits) all_features<kMostRows, true>(w, xs, ys, count, n, end);
                else all_features<kMostRows, false>(w, xs, ys, count, n, end);
            }
        }
    }, 1);
#else
    few_rows(w, (const uint16_t*)x, rows, (uint16_t*)y, threads);
#endif
}
