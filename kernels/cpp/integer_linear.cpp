// Products of 8-bit activations with 4- and 8-bit weights in integer arithmetic. Grids and roundings: kernels/int4.py and
// kernels/int8.py; the sums over a group are exact, so only the order of groups, ascending everywhere, decides bits.
//
// Layout: a panel holds 32 output features. One dword holds 4 (8-bit) or 8 (4-bit) codes of one feature along k, and the
// dwords of the 32 features lie side by side: lanes of a vector are features, so an accumulator meets its scale lane by
// lane, a group of 32 costs one conversion beside 8 dot products, and nothing is added across lanes.
//     codes   [panels, ceil(K / 8), 32] dwords of 8 4-bit codes, or [panels, 2 ceil(K / 8), 32] dwords of 4 8-bit codes
//     scales  [panels, groups, 32] float32;  zeros [panels, groups, 32] uint8, or none
// A dword of 4-bit codes is that of the packed weight, even k in low nibbles; so activation codes are stored as
// k = 0 2 4 6 1 3 5 7 of each 8. 8-bit codes are stored plus 128: processors multiply unsigned by signed bytes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "lowbit.h"

#define LOWBIT_INLINE __attribute__((always_inline))

namespace {

constexpr int kPanel = 32;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds |v| < 2^22 half to even
constexpr int kQuantMax = 127;
constexpr int64_t kSerialWork = 1 << 16;  // fewer products than this are not worth a second thread
constexpr int64_t kSerialRows = 1 << 13;  // elements of x, the same
constexpr int64_t kFewRows = 8;           // these wait for memory, which streams best in one run a thread

int64_t padded(int64_t K) { return (K + 7) / 8 * 8; }
int64_t row_stride(int64_t K) { return (K + 63) / 64 * 64 | 64; }  // an odd number of cache lines: no two rows collide

// ---- activations -------------------------------------------------------------------------------------------------

uint32_t magnitude(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits & 0x7fffffff;
}

// Codes of one row and its scale: max |x| / 127, or the given one. A row with inf or nan: scale nan, codes 0.
template <typename T> float quantize_row(const T* x, int64_t K, const float* given, int8_t* codes) {
    uint32_t largest = 0;  // as integers, magnitudes sort like the numbers, with inf and nan on top
    for (int64_t k = 0; k < K; k++) largest = std::max(largest, magnitude(lowbit::load(x + k)));
    if (largest >= 0x7f800000) {
        std::memset(codes, 0, K);
        return NAN;
    }
    float absmax;
    std::memcpy(&absmax, &largest, 4);
    float scale = given ? *given : absmax / kQuantMax;
    if (!given && scale == 0) scale = 1;
    for (int64_t k = 0; k < K; k++) {
        float v = lowbit::load(x + k) / scale;
        v = v < -kQuantMax ? -kQuantMax : v;
        v = v > kQuantMax ? kQuantMax : v;
        codes[k] = static_cast<int8_t>(static_cast<int>((v + kRound) - kRound));
    }
    return scale;
}

// 0 1 2 3 4 5 6 7 -> 0 2 4 6 1 3 5 7 in each 8 codes
void evens_first(int8_t* codes, int64_t count) {
    int64_t k = 0;
#if defined(__SSSE3__)
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    for (; k + 16 <= count; k += 16) {
        __m128i* p = reinterpret_cast<__m128i*>(codes + k);
        _mm_storeu_si128(p, _mm_shuffle_epi8(_mm_loadu_si128(p), order));
    }
#endif
    for (; k < count; k += 8) {
        int8_t* c = codes + k;
        const int8_t sorted[8] = {c[0], c[2], c[4], c[6], c[1], c[3], c[5], c[7]};
        std::memcpy(c, sorted, 8);
    }
}

struct Problem {
    const void* x;         // [M, K] float32 or bfloat16
    const float* x_scale;  // given scale, or null: one a row
    const int32_t* order;  // [K]: x is read as x[order[k]]; or null
    const void* codes;     // panels, or the packed weight [N, K / 2] or [N, K]
    const float* scales;   // panels, or [N, groups]
    const uint8_t* zeros;  // panels, or [N, groups]; or null
    const void* bias;      // [N] of x's dtype or null
    void* y;               // [M, N]
    int8_t* x_codes;       // [M, row_stride(K)]
    int32_t* x_starts;     // [M, groups]: what an accumulator starts with; minus the sum of codes where there are zeros
    float* x_scales;       // [M]
    int64_t M, N, K, group, groups;
    bool x_bfloat16, y_bfloat16, four_bits, panels;
    int64_t threads;

    int64_t panel_bytes() const { return padded(K) / (four_bits ? 8 : 4) * 4 * kPanel; }
};

template <typename T> void quantize_rows(const Problem& p, int64_t begin, int64_t end, int32_t constant_zero) {
    const int64_t stride = row_stride(p.K);
    thread_local std::vector<T> reordered;
    reordered.resize(p.order ? p.K : 0);
    for (int64_t m = begin; m < end; m++) {
        const T* x = static_cast<const T*>(p.x) + m * p.K;
        if (p.order) {
            for (int64_t k = 0; k < p.K; k++) reordered[k] = x[p.order[k]];
            x = reordered.data();
        }
        int8_t* codes = p.x_codes + m * stride;
        p.x_scales[m] = quantize_row(x, p.K, p.x_scale, codes);
        std::memset(codes + p.K, 0, padded(p.K) - p.K);
        for (int64_t g = 0; g < p.groups; g++) {
            int32_t sum = 0;
            for (int64_t k = g * p.group; k < (g + 1) * p.group; k++) sum += codes[k];
            p.x_starts[m * p.groups + g] = -sum * (p.zeros ? 1 : constant_zero);
        }
        if (p.four_bits) evens_first(codes, padded(p.K));
    }
}

// ---- vector units: dot() adds, lane by lane, the products of 4 unsigned codes with 4 signed ones ------------------

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
struct Unit {
        // 512 rows of a 4096x4096 weight: 12 rows for 8 bits, 8 for 4 bits (spills) are a third slower, 4 rows equal.
    static constexpr int kLanes = 16, kRows = 6, kVectors = 2;
    static constexpr bool kSignedBytes = false;
    using Int = __m512i;
    using Float = __m512;
    static Int load(const uint8_t* p) { return _mm512_loadu_si512(p); }
    static Int load_zeros(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
    static Int broadcast(int32_t v) { return _mm512_set1_epi32(v); }
    static Int multiply(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
    static Int low(Int v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
    static Int high(Int v) { return low(_mm512_srli_epi16(v, 4)); }
    static Int bytes(Int v) { return v; }
    static Int dot4(Int acc, Int w, Int x) { return _mm512_dpbusd_epi32(acc, w, x); }
    static Int dot8(Int acc, Int w, Int x) { return dot4(acc, w, x); }
    static Float zero() { return _mm512_setzero_ps(); }
    static Float multiply_add(Float sum, Int v, const float* scale) {
        return _mm512_add_ps(sum, _mm512_mul_ps(_mm512_cvtepi32_ps(v), _mm512_loadu_ps(scale)));
    }
    static void store(float* p, Float v) { _mm512_storeu_ps(p, v); }
};
#elif defined(__AVX2__)
struct Unit {
    static constexpr int kLanes = 8, kRows = 2, kVectors = 2;
    static constexpr bool kSignedBytes = true;
    using Int = __m256i;
    using Float = __m256;
    static Int load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
    static Int load_zeros(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
    static Int broadcast(int32_t v) { return _mm256_set1_epi32(v); }
    static Int multiply(Int a, Int b) { return _mm256_mullo_epi32(a, b); }
    static Int low(Int v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
    static Int high(Int v) { return low(_mm256_srli_epi16(v, 4)); }
    static Int bytes(Int v) { return _mm256_xor_si256(v, _mm256_set1_epi8(-128)); }
    // Sums of two products stay in 16 bits: 2 * 15 * 127, and below |w| moves w's sign to x: 2 * 128 * 127.
    static Int dot4(Int acc, Int w, Int x) {
#if defined(__AVXVNNI__)
        return _mm256_dpbusd_avx_epi32(acc, w, x);
#else
        return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
#endif
    }
    static Int dot8(Int acc, Int w, Int x) { return dot4(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w)); }
    static Float zero() { return _mm256_setzero_ps(); }
    static Float multiply_add(Float sum, Int v, const float* scale) {
        return _mm256_add_ps(sum, _mm256_mul_ps(_mm256_cvtepi32_ps(v), _mm256_loadu_ps(scale)));
    }
    static void store(float* p, Float v) { _mm256_storeu_ps(p, v); }
};
#elif defined(__aarch64__)
struct Unit {
    static constexpr int kLanes = 4, kRows = 4, kVectors = 2;
    static constexpr bool kSignedBytes = true;
    using Int = int32x4_t;
    using Float = float32x4_t;
    static Int load(const uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
    static Int load_zeros(const uint8_t* p) { return Int{p[0], p[1], p[2], p[3]}; }
    static Int broadcast(int32_t v) { return vdupq_n_s32(v); }
    static Int multiply(Int a, Int b) { return vmulq_s32(a, b); }
    static Int low(Int v) { return vandq_s32(v, vdupq_n_s32(0x0f0f0f0f)); }
    static Int high(Int v) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(v), 4)); }
    static Int bytes(Int v) { return veorq_s32(v, vdupq_n_s32(static_cast<int32_t>(0x80808080))); }
    static Int dot4(Int acc, Int w, Int x) {
        const int8x16_t a = vreinterpretq_s8_s32(w), b = vreinterpretq_s8_s32(x);
#if defined(__ARM_FEATURE_DOTPROD)
        return vdotq_s32(acc, a, b);
#else
        // Sums of two products stay in 16 bits: 2 * 128 * 127.
        const int16x8_t lower = vmull_s8(vget_low_s8(a), vget_low_s8(b)), upper = vmull_high_s8(a, b);
        return vpadalq_s16(acc, vpaddq_s16(lower, upper));
#endif
    }
    static Int dot8(Int acc, Int w, Int x) { return dot4(acc, w, x); }
    static Float zero() { return vdupq_n_f32(0); }
    static Float multiply_add(Float sum, Int v, const float* scale) {
        return vaddq_f32(sum, vmulq_f32(vcvtq_f32_s32(v), vld1q_f32(scale)));
    }
    static void store(float* p, Float v) { vst1q_f32(p, v); }
};
#else
struct Unit {
    static constexpr int kLanes = 4, kRows = 2, kVectors = 2;
    static constexpr bool kSignedBytes = false;
    using Int = int32_t __attribute__((vector_size(16)));
    using Float = float __attribute__((vector_size(16)));
    static Int load(const uint8_t* p) {
        Int v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static Int load_zeros(const uint8_t* p) { return Int{p[0], p[1], p[2], p[3]}; }
    static Int broadcast(int32_t v) { return Int{v, v, v, v}; }
    static Int multiply(Int a, Int b) { return a * b; }
    static Int low(Int v) { return v & 0x0f0f0f0f; }
    static Int high(Int v) { return v >> 4 & 0x0f0f0f0f; }
    static Int bytes(Int v) { return v; }
    static Int dot4(Int acc, Int w, Int x) {
        for (int j = 0; j < 32; j += 8) acc += (w >> j & 255) * (x << (24 - j) >> 24);
        return acc;
    }
    static Int dot8(Int acc, Int w, Int x) { return dot4(acc, w, x); }
    static Float zero() { return Float{}; }
    static Float multiply_add(Float sum, Int v, const float* scale) {
        Float s;
        std::memcpy(&s, scale, sizeof s);
        return sum + Float{(float)v[0], (float)v[1], (float)v[2], (float)v[3]} * s;
    }
    static void store(float* p, Float v) { std::memcpy(p, &v, sizeof v); }
};
#endif

// ---- one panel ---------------------------------------------------------------------------------------------------

struct Panel {
    const uint8_t* codes;
    const float* scales;
    const uint8_t* zeros;
};

LOWBIT_INLINE inline int32_t dword(const int8_t* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return v;
}

// sums[r][n] of R rows from `row` on and the features of kVectors vectors from `first` on, before the rows' scales.
template <int R, bool kFour>
LOWBIT_INLINE inline void tile(const Problem& p, const Panel& w, int64_t row, int64_t first, float (*sums)[kPanel]) {
    using Int = Unit::Int;
    constexpr int V = Unit::kVectors, L = Unit::kLanes;
    const int64_t stride = row_stride(p.K), steps = (p.groups == 1 ? padded(p.K) : p.group) / 8;
    const int8_t* x = p.x_codes + row * stride;
    const int32_t* starts = p.x_starts + row * p.groups;
    const uint8_t* codes = w.codes + first * 4;
    Unit::Float total[R * V];
#pragma GCC unroll 32
    for (int i = 0; i < R * V; i++) total[i] = Unit::zero();
    for (int64_t g = 0; g < p.groups; g++) {
        Int acc[R * V];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const Int start = Unit::broadcast(starts[r * p.groups + g]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                acc[r * V + v] = kFour && w.zeros
                    ? Unit::multiply(start, Unit::load_zeros(w.zeros + g * kPanel + first + v * L)) : start;
            }
        }
        for (int64_t i = 0; i < steps; i++, x += 8) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                Int weights[V];
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) {
                    if constexpr (kFour) {
                        const Int both = Unit::load(codes + v * L * 4);
                        weights[v] = half ? Unit::high(both) : Unit::low(both);
                    } else {
                        weights[v] = Unit::bytes(Unit::load(codes + half * kPanel * 4 + v * L * 4));
                    }
                }
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const Int xs = Unit::broadcast(dword(x + r * stride + 4 * half));
#pragma GCC unroll 4
                    for (int v = 0; v < V; v++) {
                        Int& a = acc[r * V + v];
                        a = kFour ? Unit::dot4(a, weights[v], xs) : Unit::dot8(a, weights[v], xs);
                    }
                }
            }
            codes += (kFour ? 1 : 2) * kPanel * 4;
        }
        const float* scales = w.scales + g * kPanel + first;
#pragma GCC unroll 32
        for (int i = 0; i < R * V; i++) total[i] = Unit::multiply_add(total[i], acc[i], scales + i % V * L);
    }
#pragma GCC unroll 32
    for (int i = 0; i < R * V; i++) Unit::store(sums[i / V] + first + i % V * L, total[i]);
}

template <typename X, typename Y>
void store_tile(const Problem& p, const float (*sums)[kPanel], int64_t row, int64_t rows, int64_t feature) {
    const int64_t count = std::min<int64_t>(kPanel, p.N - feature);
    const X* bias = static_cast<const X*>(p.bias);
    for (int64_t r = 0; r < rows; r++) {
        Y* y = static_cast<Y*>(p.y) + (row + r) * p.N + feature;
        const float scale = p.x_scales[row + r];
        if (bias) {
            for (int64_t n = 0; n < count; n++) {
                lowbit::store(y + n, lowbit::round_as(y, sums[r][n] * scale) + lowbit::load(bias + feature + n));
            }
        } else {
            for (int64_t n = 0; n < count; n++) lowbit::store(y + n, sums[r][n] * scale);
        }
    }
}

template <int R, bool kFour>
__attribute__((noinline)) void panel_rows(const Problem& p, const Panel& w, int64_t row, int64_t feature) {
    float sums[R][kPanel];
    for (int64_t first = 0; first < kPanel; first += Unit::kVectors * Unit::kLanes) {
        tile<R, kFour>(p, w, row, first, sums);
    }
    if (!p.x_bfloat16) store_tile<float, float>(p, sums, row, R, feature);
    else if (p.y_bfloat16) store_tile<uint16_t, uint16_t>(p, sums, row, R, feature);
    else store_tile<uint16_t, float>(p, sums, row, R, feature);
}

// All rows in tiles of R = `rows` or fewer rows.
template <int R, bool kFour>
LOWBIT_INLINE inline void dispatch(const Problem& p, const Panel& w, int64_t row, int64_t rows, int64_t feature) {
    if constexpr (R > 0) {
        if (rows == R) panel_rows<R, kFour>(p, w, row, feature);
        else dispatch<R - 1, kFour>(p, w, row, rows, feature);
    }
}

template <bool kFour> void panel_product(const Problem& p, const Panel& w, int64_t feature) {
    const int64_t tiles = (p.M + Unit::kRows - 1) / Unit::kRows;
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t row = p.M * i / tiles, end = p.M * (i + 1) / tiles;
        dispatch<Unit::kRows, kFour>(p, w, row, end - row, feature);
    }
}

// ---- panels from packed weights ----------------------------------------------------------------------------------

// Writes one panel; features beyond the last have codes and scales 0.
void pack_panel(const Problem& p, int64_t panel, uint8_t* codes, float* scales, uint8_t* zeros) {
    const int64_t row_bytes = p.four_bits ? (p.K + 1) / 2 : p.K, dwords = padded(p.K) / (p.four_bits ? 8 : 4);
    const uint32_t flip = p.four_bits ? 0 : 0x80808080;
    for (int64_t i = 0; i < kPanel; i++) {
        const int64_t n = panel * kPanel + i;
        const bool real = n < p.N;
        for (int64_t g = 0; g < p.groups; g++) {
            scales[g * kPanel + i] = real ? p.scales[n * p.groups + g] : 0;
            if (zeros) zeros[g * kPanel + i] = real ? p.zeros[n * p.groups + g] : 0;
        }
    }
    for (int64_t i = 0; i < kPanel; i++) {
        const int64_t n = panel * kPanel + i;
        uint32_t* out = reinterpret_cast<uint32_t*>(codes) + i;
        const uint8_t* row = static_cast<const uint8_t*>(p.codes) + n * row_bytes;
        const int64_t whole = n < p.N ? row_bytes / 4 : 0;
        for (int64_t d = 0; d < whole; d++) {
            uint32_t value;
            std::memcpy(&value, row + 4 * d, 4);
            out[d * kPanel] = value ^ flip;
        }
        for (int64_t d = whole; d < dwords; d++) {
            uint32_t value = 0;
            if (n < p.N && d == whole) std::memcpy(&value, row + 4 * d, row_bytes - 4 * d);
            out[d * kPanel] = value ^ flip;
        }
    }
}

void product(const Problem& p) {
    const int32_t constant_zero = p.four_bits ? 8 : Unit::kSignedBytes ? 0 : 128;
    lowbit::parallel_for(p.M, p.M * p.K > kSerialRows ? p.threads : 1, [&](int64_t begin, int64_t end) {
        if (p.x_bfloat16) quantize_rows<uint16_t>(p, begin, end, constant_zero);
        else quantize_rows<float>(p, begin, end, constant_zero);
    });
    const auto panels = [&](int64_t begin, int64_t end) {
        thread_local std::vector<uint8_t> codes, zeros;
        thread_local std::vector<float> scales;
        const int64_t grid = p.groups * kPanel;
        if (!p.panels) codes.resize(p.panel_bytes()), scales.resize(grid), zeros.resize(p.zeros ? grid : 0);
        for (int64_t panel = begin; panel < end; panel++) {
            Panel w{static_cast<const uint8_t*>(p.codes) + panel * p.panel_bytes(), p.scales + panel * grid,
                    p.zeros ? p.zeros + panel * grid : nullptr};
            if (!p.panels) {
                w = {codes.data(), scales.data(), p.zeros ? zeros.data() : nullptr};
                pack_panel(p, panel, codes.data(), scales.data(), p.zeros ? zeros.data() : nullptr);
            }
            if (p.four_bits) panel_product<true>(p, w, panel * kPanel);
            else panel_product<false>(p, w, panel * kPanel);
        }
    };
    const int64_t threads = p.M * p.N * p.K > kSerialWork ? p.threads : 1;
    lowbit::parallel_for((p.N + kPanel - 1) / kPanel, threads, panels, p.M <= kFewRows ? 1 : 4);
}

}  // namespace

// x, dtype of x, num_rows, x_scale or 0, order or 0, weight codes, scales, zeros or 0, bits, in panels, out_features,
// in_features, group, bias or 0, y, dtype of y, scratch of num_rows * (row_stride(in_features) + 4 * groups + 4) bytes, threads
extern "C" void integer_linear(const int64_t* boxed) {
    lowbit::Args args(boxed);
    Problem p{};
    p.x = args.pointer<const void>(), p.x_bfloat16 = args.integer() == lowbit::kBFloat16, p.M = args.integer();
    p.x_scale = args.pointer<const float>(), p.order = args.pointer<const int32_t>();
    p.codes = args.pointer<const void>(), p.scales = args.pointer<const float>();
    p.zeros = args.pointer<const uint8_t>(), p.four_bits = args.integer() == 4, p.panels = args.integer();
    p.N = args.integer(), p.K = args.integer(), p.group = args.integer(), p.groups = p.K / p.group;
    p.bias = args.pointer<const void>();
    p.y = args.pointer<void>(), p.y_bfloat16 = args.integer() == lowbit::kBFloat16;
    p.x_codes = args.pointer<int8_t>();
    p.x_starts = reinterpret_cast<int32_t*>(p.x_codes + p.M * row_stride(p.K));
    p.x_scales = reinterpret_cast<float*>(p.x_starts + p.M * p.groups);
    p.threads = args.integer();
    product(p);
}

// weight codes, scales, zeros or 0, bits, out_features, in_features, group, panels of codes, scales, zeros or 0, threads
extern "C" void integer_repack(const int64_t* boxed) {
    lowbit::Args args(boxed);
    Problem p{};
    p.codes = args.pointer<const void>(), p.scales = args.pointer<const float>();
    p.zeros = args.pointer<const uint8_t>(), p.four_bits = args.integer() == 4;
    p.N = args.integer(), p.K = args.integer(), p.group = args.integer(), p.groups = p.K / p.group;
    uint8_t* codes = args.pointer<uint8_t>();
    float* scales = args.pointer<float>();
    uint8_t* zeros = args.pointer<uint8_t>();
    const int64_t grid = p.groups * kPanel;
    lowbit::parallel_for((p.N + kPanel - 1) / kPanel, args.integer(), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            pack_panel(p, i, codes + i * p.panel_bytes(), scales + i * grid, zeros ? zeros + i * grid : nullptr);
        }
    });
}

// x, dtype of x, num_rows, row size, given scale or 0, codes, scales, threads
extern "C" void quantize_activations(const int64_t* boxed) {
    lowbit::Args args(boxed);
    const void* x = args.pointer<const void>();
    const bool bfloat16 = args.integer() == lowbit::kBFloat16;
    const int64_t M = args.integer(), K = args.integer();
    const float* given = args.pointer<const float>();
    int8_t* codes = args.pointer<int8_t>();
    float* scales = args.pointer<float>();
    lowbit::parallel_for(M, M * K > kSerialRows ? args.integer() : 1, [&](int64_t begin, int64_t end) {
        for (int64_t m = begin; m < end; m++) {
            scales[m] = bfloat16 ? quantize_row((const uint16_t*)x + m * K, K, given, codes + m * K)
                                 : quantize_row((const float*)x + m * K, K, given, codes + m * K);
        }
    });
}
