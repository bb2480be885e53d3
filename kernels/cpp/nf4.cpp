// NF4 on CPUs: quantize, dequantize, and the linear layer for a few rows. The formulas and the byte layout are in
// kernels/nf4.py; every path here gives the reference's codes and 16-bit weights bit for bit.
//
// A block shares one absmax, so its 16 possible weights are computed once, in a table; decoding is a table look-up by
// nibble. Paths are chosen when compiling: AVX512-BF16, AVX512F, AVX2, NEON, or plain C++.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr int kGroup = 32;            // smallest block; all vector code works on 32 weights in 16 bytes
constexpr int kNestedBlock = 256;     // absmax values that share one nested_absmax
constexpr int kMaxRows = 8;           // rows of x that one pass over the weight serves
constexpr int kPrefetchBytes = 4096;  // 4096x4096, one Zen 4 core: 6 % faster for 1 row, 11 % for 4
[[maybe_unused]] constexpr int64_t kSerialWork = 1 << 16;  // fewer weights than this are not worth a second thread

enum DType { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Scales as stored: float32, or 8-bit codes of a 256-entry map with a scale per 256 and one offset (double_quant).
struct Absmax {
    const float* values;
    const uint8_t* codes;
    const float* nested_absmax;
    float nested_offset;
    const float* map;

    float operator[](int64_t block) const {
        return values ? values[block] : map[codes[block]] * nested_absmax[block / kNestedBlock] + nested_offset;
    }
};

int code_at(const uint8_t* packed, int64_t i) { return i % 2 ? packed[i / 2] & 15 : packed[i / 2] >> 4; }

// ---- 16-bit floats, round to nearest even, subnormals kept -------------------------------------------------------

uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

float from_bfloat16(uint16_t value) {
    uint32_t bits = uint32_t(value) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

uint16_t to_float16(float value) {
#if defined(__F16C__)
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    __fp16 half = value;
    uint16_t result;
    std::memcpy(&result, &half, 2);
    return result;
#else
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x47800000) return sign | 0x7c00;  // 65536 and more
    if (magnitude < 0x38800000) {                       // subnormal: adding 0.5 lets the float adder round
        float shifted;
        std::memcpy(&shifted, &magnitude, 4);
        shifted += 0.5f;
        std::memcpy(&bits, &shifted, 4);
        return sign | (bits - 0x3f000000);
    }
    magnitude += 0xc8000fff + ((magnitude >> 13) & 1);  // exponent bias 127 -> 15, and half a unit
    return sign | (magnitude >> 13);
#endif
}

void store_as(float value, float* out) { *out = value; }
void store_as(float value, uint16_t* out) { *out = to_bfloat16(value); }

// ---- quantize ----------------------------------------------------------------------------------------------------

// Largest |w| of a block as float bits, whose integer order is the numeric order with inf and nan on top.
uint32_t absmax_bits(const float* w, int64_t n) {
    uint32_t result = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, w + i, 4);
        result = std::max(result, bits & 0x7fffffff);
    }
    return result;
}

void quantize_block(const float* w, int64_t n, float absmax, const float* thresholds, uint8_t* packed) {
    uint8_t codes[kGroup];
    const float inverse = 1.0f / std::max(absmax, 1e-38f);
    for (int64_t start = 0; start < n; start += kGroup) {
        const int64_t count = std::min<int64_t>(kGroup, n - start);
        float normalized[kGroup] = {};  // padding is 0, whose code is 7
        for (int64_t i = 0; i < count; i++) normalized[i] = w[start + i] * inverse;
        for (int i = 0; i < kGroup; i++) {
            int32_t code = 0;
            for (int t = 0; t < 15; t++) code += normalized[i] > thresholds[t];
            codes[i] = code;
        }
        for (int64_t i = 0; i < (count + 1) / 2; i++) packed[start / 2 + i] = codes[2 * i] << 4 | codes[2 * i + 1];
    }
}

// ---- dequantize: 16 bytes -> 32 weights through the block's table ------------------------------------------------

void expand(const uint8_t* bytes, const uint16_t* table, uint16_t* out) {
#if defined(__AVX512BW__)
    const __m512i entries = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)table));
    const __m128i packed = _mm_loadu_si128((const __m128i*)bytes);
    const __m128i high = _mm_srli_epi16(packed, 4);  // bit 4 and up: ignored or masked below
    const __m256i codes = _mm256_set_m128i(_mm_unpackhi_epi8(high, packed), _mm_unpacklo_epi8(high, packed));
    // The table is there twice, so that bit 4 of an index does not matter.
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(codes), entries));
#elif defined(__AVX2__)
    const __m256i entries = _mm256_loadu_si256((const __m256i*)table);
    const __m256i even_bytes = _mm256_set1_epi16(0x00ff);
    const __m256i planes = _mm256_permute4x64_epi64(
        _mm256_packus_epi16(_mm256_and_si256(entries, even_bytes), _mm256_srli_epi16(entries, 8)), 0xd8);
    const __m128i low_plane = _mm256_castsi256_si128(planes), high_plane = _mm256_extracti128_si256(planes, 1);
    const __m128i packed = _mm_loadu_si128((const __m128i*)bytes), mask = _mm_set1_epi8(15);
    const __m128i high = _mm_and_si128(_mm_srli_epi16(packed, 4), mask), low = _mm_and_si128(packed, mask);
    for (int half = 0; half < 2; half++) {
        const __m128i codes = half ? _mm_unpackhi_epi8(high, low) : _mm_unpacklo_epi8(high, low);
        const __m128i a = _mm_shuffle_epi8(low_plane, codes), b = _mm_shuffle_epi8(high_plane, codes);
        _mm_storeu_si128((__m128i*)(out + 16 * half), _mm_unpacklo_epi8(a, b));
        _mm_storeu_si128((__m128i*)(out + 16 * half + 8), _mm_unpackhi_epi8(a, b));
    }
#elif defined(__aarch64__)
    const uint8x16x2_t planes = vld2q_u8((const uint8_t*)table);  // low bytes, high bytes
    const uint8x16_t packed = vld1q_u8(bytes);
    const uint8x16x2_t codes = vzipq_u8(vshrq_n_u8(packed, 4), vandq_u8(packed, vdupq_n_u8(15)));
    for (int half = 0; half < 2; half++) {
        const uint8x16x2_t words = {vqtbl1q_u8(planes.val[0], codes.val[half]),
                                    vqtbl1q_u8(planes.val[1], codes.val[half])};
        vst2q_u8((uint8_t*)(out + 16 * half), words);
    }
#else
    for (int i = 0; i < kGroup / 2; i++) out[2 * i] = table[bytes[i] >> 4], out[2 * i + 1] = table[bytes[i] & 15];
#endif
}

void expand(const uint8_t* bytes, const float* table, float* out) {
#if defined(__AVX512F__)
    const __m512 entries = _mm512_loadu_ps(table);
    for (int half = 0; half < 2; half++) {
        const __m128i packed = _mm_loadl_epi64((const __m128i*)(bytes + 8 * half));
        const __m128i codes = _mm_unpacklo_epi8(_mm_srli_epi16(packed, 4), packed);  // the look-up takes 4 bits
        _mm512_storeu_ps(out + 16 * half, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), entries));
    }
#else
    for (int i = 0; i < kGroup / 2; i++) out[2 * i] = table[bytes[i] >> 4], out[2 * i + 1] = table[bytes[i] & 15];
#endif
}

template <int kDType, typename T>
void dequantize(const uint8_t* packed, const Absmax& absmax, const float* codebook, int64_t numel, int64_t block_size,
                T* out, int threads) {
    const int64_t num_blocks = (numel + block_size - 1) / block_size;
#pragma omp parallel for schedule(static) num_threads(threads) if (numel > kSerialWork)
    for (int64_t block = 0; block < num_blocks; block++) {
        const float scale = absmax[block];
        T table[16];
        for (int i = 0; i < 16; i++) {
            const float value = codebook[i] * scale;
            if constexpr (kDType == kFloat16) table[i] = to_float16(value);
            else store_as(value, table + i);
        }
        const int64_t begin = block * block_size, end = std::min(begin + block_size, numel);
        int64_t i = begin;
        for (; i + kGroup <= end; i += kGroup) expand(packed + i / 2, table, out + i);
        for (; i < end; i++) out[i] = table[code_at(packed, i)];
    }
}

// ---- linear: vector units behind one interface -------------------------------------------------------------------
// A unit decodes the `part`-th slice of a group of 32 weights and multiplies it with the same slice of x. x is brought
// into the order of `place` once a call, so that decoded weights never need a shuffle.

#if defined(__AVX512F__)
struct Float32 {
    static constexpr int kLanes = 16;
    using Vector = __m512;
    using Table = __m512;
    static Vector zero() { return _mm512_setzero_ps(); }
    static Table table(const float* entries) { return _mm512_loadu_ps(entries); }
    static Vector weights(const uint8_t* bytes, bool high, Table table) {
        const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)bytes));
        return _mm512_permutexvar_ps(high ? _mm512_srli_epi32(codes, 4) : codes, table);  // takes 4 bits
    }
    static Vector multiply_add(Vector w, const float* x, Vector sum) {
        return _mm512_fmadd_ps(w, _mm512_loadu_ps(x), sum);
    }
    static float sum(Vector v) { return _mm512_reduce_add_ps(v); }
};
#elif defined(__AVX2__) && defined(__FMA__)
struct Float32 {
    static constexpr int kLanes = 8;
    using Vector = __m256;
    struct Table { __m256 low, high; };
    static Vector zero() { return _mm256_setzero_ps(); }
    static Table table(const float* entries) { return {_mm256_loadu_ps(entries), _mm256_loadu_ps(entries + 8)}; }
    static Vector weights(const uint8_t* bytes, bool high, const Table& table) {
        const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)bytes));
        const __m256i codes = high ? _mm256_srli_epi32(both, 4) : both;  // the look-up takes 3 bits
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));  // sign bit = bit 3 of the code
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, codes),
                                _mm256_permutevar8x32_ps(table.high, codes), upper);
    }
    static Vector multiply_add(Vector w, const float* x, Vector sum) {
        return _mm256_fmadd_ps(w, _mm256_loadu_ps(x), sum);
    }
    static float sum(Vector v) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
    }
};
#elif defined(__aarch64__)
struct Float32 {
    static constexpr int kLanes = 4;
    using Vector = float32x4_t;
    using Table = uint8x16x4_t;
    static Vector zero() { return vdupq_n_f32(0); }
    static Table table(const float* entries) {
        const uint8_t* bytes = (const uint8_t*)entries;
        return {vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)};
    }
    static Vector weights(const uint8_t* bytes, bool high, const Table& table) {
        uint32_t four;
        std::memcpy(&four, bytes, 4);
        const uint8x8_t both = vreinterpret_u8_u32(vdup_n_u32(four));
        const uint8x8_t codes = high ? vshr_n_u8(both, 4) : vand_u8(both, vdup_n_u8(15));
        const uint32x4_t wide = vmovl_u16(vget_low_u16(vmovl_u8(codes)));
        const uint32x4_t offsets = vmlaq_n_u32(vdupq_n_u32(0x03020100), wide, 0x04040404);  // bytes 4c..4c+3
        return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(offsets)));
    }
    static Vector multiply_add(Vector w, const float* x, Vector sum) { return vfmaq_f32(sum, w, vld1q_f32(x)); }
    static float sum(Vector v) { return vaddvq_f32(v); }
};
#else
#define LOWBIT_NO_VECTOR_UNIT  // linear_any serves all shapes
#endif

struct Linear {
    const uint8_t* packed;
    Absmax absmax;
    const float* codebook;
    int64_t num_rows, out_features, in_features, block_size;  // num_rows: rows of x, at most kMaxRows
    int threads;
};

float load(float value) { return value; }
float load(uint16_t value) { return from_bfloat16(value); }

// Any in_features: rows may start inside a block or inside a byte. Each weight row is decoded, then multiplied.
template <typename T> void linear_any(const Linear& p, const T* x, T* y) {
    const int64_t K = p.in_features;
    std::vector<float> x32(p.num_rows * K);
    for (size_t i = 0; i < x32.size(); i++) x32[i] = load(x[i]);
#pragma omp parallel num_threads(p.threads) if (p.out_features * K > kSerialWork)
    {
        std::vector<float> weights(K);
#pragma omp for schedule(static)
        for (int64_t feature = 0; feature < p.out_features; feature++) {
            const int64_t begin = feature * K;
            for (int64_t k = 0; k < K;) {
                const int64_t block = (begin + k) / p.block_size;
                float table[16];
                for (int i = 0; i < 16; i++) {
                    const float value = p.codebook[i] * p.absmax[block];
                    table[i] = sizeof(T) == 4 ? value : from_bfloat16(to_bfloat16(value));
                }
                const int64_t stop = std::min(K, (block + 1) * p.block_size - begin);
                for (; k < stop; k++) weights[k] = table[code_at(p.packed, begin + k)];
            }
            for (int64_t m = 0; m < p.num_rows; m++) {
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t k = 0; k < K; k++) sum += weights[k] * x32[m * K + k];
                store_as(sum, y + m * p.out_features + feature);
            }
        }
    }
}

#if !defined(LOWBIT_NO_VECTOR_UNIT)

// Dot products in float32: [16 even elements | 16 odd elements] of x per group. With kRounded the table is rounded to
// bfloat16, so that a bfloat16 x meets the weights that dequantize to bfloat16 gives.
template <bool kRounded> struct FloatUnit {
    using X = float;
    using Vector = Float32::Vector;
    using Table = Float32::Table;
    static constexpr int kParts = kGroup / Float32::kLanes;

    static int place(int k) { return k % 2 * 16 + k / 2; }
    static Vector zero() { return Float32::zero(); }
    static float sum(Vector v) { return Float32::sum(v); }
    static Table table(const float* codebook, float scale, float* entries) {
        for (int i = 0; i < 16; i++) {
            const float value = codebook[i] * scale;
            entries[i] = kRounded ? from_bfloat16(to_bfloat16(value)) : value;
        }
        return Float32::table(entries);
    }
    static Vector weights(const uint8_t* bytes, int part, const Table& table) {
        return Float32::weights(bytes + part * Float32::kLanes % 16, part < kParts / 2, table);
    }
    static Vector multiply_add(Vector w, const X* x, int part, Vector sum) {
        return Float32::multiply_add(w, x + part * Float32::kLanes, sum);
    }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
// All 32 weights of a group at once. The 16 bytes are there four times, shifted by 0, 4, 8 and 12 bits; the low 4 bits
// of each word are then the code (the table is there twice, so that bit 4 does not matter):
//   words   0..7: elements 1, 5, 9 ...    8..15: 0, 4, 8 ...    16..23: 3, 7, 11 ...    24..31: 2, 6, 10 ...
struct BFloat16Unit {
    using X = uint16_t;
    using Vector = __m512;
    using Table = __m512i;
    static constexpr int kParts = 1;

    static int place(int k) {
        constexpr int lane[4] = {1, 0, 3, 2};
        return lane[k % 4] * 8 + k / 4;
    }
    static Vector zero() { return _mm512_setzero_ps(); }
    static float sum(Vector v) { return _mm512_reduce_add_ps(v); }
    static Table table(const float* codebook, float scale, float*) {
        const __m512 values = _mm512_mul_ps(_mm512_loadu_ps(codebook), _mm512_set1_ps(scale));
        return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(values));
    }
    static __m512i weights(const uint8_t* bytes, int, Table table) {
        const __m512i shifts = _mm512_set_epi64(0x000c000c000c000c, 0x000c000c000c000c, 0x0008000800080008,
                                                0x0008000800080008, 0x0004000400040004, 0x0004000400040004, 0, 0);
        const __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)bytes));
        return _mm512_permutexvar_epi16(_mm512_srlv_epi16(words, shifts), table);
    }
    static Vector multiply_add(__m512i w, const X* x, int, Vector sum) {
        return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_loadu_si512(x));
    }
};
#else
using BFloat16Unit = FloatUnit<true>;
#endif

// kFeatures output features from `feature` on, for kRows rows of x. A group of 32 never crosses a block, since in_features
// is divisible by 32; several features need their blocks to end at the same k, so in_features divisible by block_size.
// x is [in_features / 32, kRows, 32]: what one group of weights meets lies together.
template <typename Unit, int kRows, int kFeatures>
void dot_rows(const Linear& p, int64_t feature, const typename Unit::X* x, float (*out)[kRows]) {
    constexpr int kChains = kRows * kFeatures > 8 ? 1 : 2;  // sums that do not wait for each other; at most 16 registers
    typename Unit::Vector sums[kFeatures][kRows][kChains];
    for (auto& rows : sums) for (auto& chains : rows) for (auto& sum : chains) sum = Unit::zero();
    typename Unit::Table tables[kFeatures];
    float entries[kFeatures][16];
    const int64_t K = p.in_features, begin = feature * K, blocks_per_row = K / p.block_size;
    const uint8_t* bytes[kFeatures];
    for (int f = 0; f < kFeatures; f++) bytes[f] = p.packed + begin / 2 + f * (K / 2);

    const auto step = [&](int64_t k, int chain) {
        const typename Unit::X* group = x + k * kRows;
        for (int f = 0; f < kFeatures; f++) __builtin_prefetch(bytes[f] + (k >> 1) + kPrefetchBytes);
#pragma GCC unroll 8
        for (int part = 0; part < Unit::kParts; part++) {
#pragma GCC unroll 2
            for (int f = 0; f < kFeatures; f++) {
                const auto w = Unit::weights(bytes[f] + (k >> 1), part, tables[f]);
#pragma GCC unroll 8
                for (int m = 0; m < kRows; m++) {
                    sums[f][m][chain] = Unit::multiply_add(w, group + m * kGroup, part, sums[f][m][chain]);
                }
            }
        }
    };
    int64_t block = begin / p.block_size;  // a 64-bit division costs as much as a block's arithmetic: once a row
    int64_t end = (block + 1) * p.block_size - begin;
    for (int64_t k = 0; k < K; block++, end += p.block_size) {
        const int64_t stop = std::min(K, end);
#pragma GCC unroll 2
        for (int f = 0; f < kFeatures; f++) {
            tables[f] = Unit::table(p.codebook, p.absmax[block + f * blocks_per_row], entries[f]);
        }
        for (; k + 2 * kGroup <= stop; k += 2 * kGroup) step(k, 0), step(k + kGroup, kChains - 1);
        if (k < stop) step(k, 0), k += kGroup;
    }
    for (int f = 0; f < kFeatures; f++) {
        for (int m = 0; m < kRows; m++) {
            out[f][m] = Unit::sum(sums[f][m][0]) + (kChains == 2 ? Unit::sum(sums[f][m][kChains - 1]) : 0.0f);
        }
    }
}

template <typename Unit, typename T, int kRows>
void linear_grouped(const Linear& p, const typename Unit::X* x, T* y) {
    constexpr int kFeatures = 2;
    const bool aligned = p.in_features % p.block_size == 0;
#pragma omp parallel for schedule(static) num_threads(p.threads) if (p.out_features * p.in_features > kSerialWork)
    for (int64_t first = 0; first < p.out_features; first += kFeatures) {
        const int count = std::min<int64_t>(kFeatures, p.out_features - first);
        float out[kFeatures][kRows];
        if (aligned && count == kFeatures) dot_rows<Unit, kRows, kFeatures>(p, first, x, out);
        else for (int f = 0; f < count; f++) dot_rows<Unit, kRows, 1>(p, first + f, x, out + f);
        for (int f = 0; f < count; f++) {
            for (int m = 0; m < kRows; m++) store_as(out[f][m], y + m * p.out_features + first + f);
        }
    }
}

template <typename Unit, typename T> void linear(const Linear& p, const T* x, T* y) {
    if (p.in_features % kGroup) return linear_any(p, x, y);
    std::vector<typename Unit::X> placed(p.num_rows * p.in_features);
    for (int64_t m = 0; m < p.num_rows; m++) {
        for (int64_t k = 0; k < p.in_features; k++) {
            auto& target = placed[(k / kGroup * p.num_rows + m) * kGroup + Unit::place(k % kGroup)];
            const T value = x[m * p.in_features + k];
            if constexpr (sizeof(target) == sizeof(T)) target = value;
            else target = load(value);
        }
    }
    const auto* data = placed.data();
    switch (p.num_rows) {
        case 1: return linear_grouped<Unit, T, 1>(p, data, y);
        case 2: return linear_grouped<Unit, T, 2>(p, data, y);
        case 3: return linear_grouped<Unit, T, 3>(p, data, y);
        case 4: return linear_grouped<Unit, T, 4>(p, data, y);
        case 5: return linear_grouped<Unit, T, 5>(p, data, y);
        case 6: return linear_grouped<Unit, T, 6>(p, data, y);
        case 7: return linear_grouped<Unit, T, 7>(p, data, y);
        default: return linear_grouped<Unit, T, kMaxRows>(p, data, y);
    }
}

#endif  // LOWBIT_NO_VECTOR_UNIT

}  // namespace

extern "C" {

// Returns 1 if the weight holds inf or nan (codes are then meaningless), else 0.
int nf4_quantize(const float* weight, int64_t numel, int64_t block_size, const float* thresholds, uint8_t* packed,
                 float* absmax, int threads) {
    const int64_t num_blocks = (numel + block_size - 1) / block_size;
    int not_finite = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : not_finite) if (numel > kSerialWork)
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t begin = block * block_size, n = std::min(block_size, numel - begin);
        const uint32_t bits = absmax_bits(weight + begin, n);
        not_finite |= bits >= 0x7f800000;
        std::memcpy(absmax + block, &bits, 4);
        quantize_block(weight + begin, n, absmax[block], thresholds, packed + begin / 2);
    }
    return not_finite;
}

// absmax: float values if codes is null, else unused. out: numel elements of dtype.
void nf4_dequantize(const uint8_t* packed, const float* absmax, const uint8_t* codes, const float* nested_absmax,
                    const float* nested_offset, const float* map, const float* codebook, int64_t numel,
                    int64_t block_size, void* out, int dtype, int threads) {
    const Absmax scales{absmax, codes, nested_absmax, codes ? *nested_offset : 0, map};
    switch (dtype) {
        case kFloat32: return dequantize<kFloat32>(packed, scales, codebook, numel, block_size, (float*)out, threads);
        case kBFloat16: return dequantize<kBFloat16>(packed, scales, codebook, numel, block_size, (uint16_t*)out, threads);
        default: return dequantize<kFloat16>(packed, scales, codebook, numel, block_size, (uint16_t*)out, threads);
    }
}

// x [num_rows, in_features], y [num_rows, out_features], both of dtype (float32 or bfloat16); num_rows in 1..8.
void nf4_linear(const void* x, const uint8_t* packed, const float* absmax, const uint8_t* codes,
                const float* nested_absmax, const float* nested_offset, const float* map, const float* codebook,
                int64_t num_rows, int64_t out_features, int64_t in_features, int64_t block_size, void* y, int dtype,
                int threads) {
    const Absmax scales{absmax, codes, nested_absmax, codes ? *nested_offset : 0, map};
    const Linear p{packed, scales, codebook, num_rows, out_features, in_features, block_size, threads};
#if defined(LOWBIT_NO_VECTOR_UNIT)
    if (dtype == kFloat32) linear_any(p, (const float*)x, (float*)y);
    else linear_any(p, (const uint16_t*)x, (uint16_t*)y);
#else
    if (dtype == kFloat32) linear<FloatUnit<false>>(p, (const float*)x, (float*)y);
    else linear<BFloat16Unit>(p, (const uint16_t*)x, (uint16_t*)y);
#endif
}

}  // extern "C"
