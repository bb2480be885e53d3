// The linear layer over 4-bit codebooks for a few rows of x: weights are decoded beside the dot products, never stored.
// Formulas and bytes are in kernels/codebook4.py. Weights are those of dequantize in the dtype of x, except that
// AVX512-BF16 takes subnormals for zeros; sums are float32.
#include "codebook4.h"

#include <vector>

namespace {

using namespace lowbit;

constexpr int kMaxRows = 8;           // rows of x that one pass over the weight serves
constexpr int kPrefetchBytes = 4096;  // 4096x4096, one Zen 4 core: 6 % faster for 1 row, 11 % for 4

struct Linear {
    const uint8_t* packed;
    Absmax absmax;
    const float* codebook;
    int64_t num_rows, out_features, in_features, block_size;  // num_rows: rows of x, at most kMaxRows
    int64_t threads;

    int64_t useful_threads() const { return out_features * in_features > kSerialWork ? threads : 1; }
};

// Any in_features: rows may start inside a block or inside a byte. Each weight row is decoded, then multiplied.
template <typename T> void linear_any(const Linear& p, const T* x, T* y) {
    const int64_t K = p.in_features;
    static thread_local std::vector<float> wide;
    wide.resize(p.num_rows * K);
    for (int64_t i = 0; i < p.num_rows * K; i++) wide[i] = load(x + i);
    const float* x32 = wide.data();
    parallel_for(p.out_features, p.useful_threads(), [&](int64_t first, int64_t last) {
        static thread_local std::vector<float> weights;
        weights.resize(K);
        float* w = weights.data();
        for (int64_t feature = first; feature < last; feature++) {
            const int64_t begin = feature * K;
            for (int64_t k = 0; k < K;) {
                const int64_t block = (begin + k) / p.block_size;
                float buffer, table[16];
                const float scale = *p.absmax.decode(block, 1, &buffer);
                for (int i = 0; i < 16; i++) table[i] = round_as(x, p.codebook[i] * scale);
                const int64_t stop = std::min(K, (block + 1) * p.block_size - begin);
                for (; k < stop; k++) w[k] = table[code_at(p.packed, begin + k)];
            }
            for (int64_t m = 0; m < p.num_rows; m++) {
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t k = 0; k < K; k++) sum += w[k] * x32[m * K + k];
                store(y + m * p.out_features + feature, sum);
            }
        }
    });
}

// ---- vector units behind one interface ---------------------------------------------------------------------------
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

#if !defined(LOWBIT_NO_VECTOR_UNIT)

// Dot products in float32: [16 even elements | 16 odd elements] of x per group. With kRounded the table is rounded to
// bfloat16, so that a bfloat16 x meets the weights that dequantize to bfloat16 gives.
template <bool kRounded> struct FloatUnit {
    using X = float;
    using Vector = Float32::Vector;
    using Table = Float32::Table;
    static constexpr int kSize = kGroup, kParts = kSize / Float32::kLanes;

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
// The bytes of a group are there several times, shifted by 0, 4, 8 and 12 bits; the low 4 bits of each word are then the
// code (the table is there twice, so that bit 4 does not matter).
struct BFloat16Base {
    using X = uint16_t;
    using Vector = __m512;
    using Table = __m512i;

    static Vector zero() { return _mm512_setzero_ps(); }
    static float sum(Vector v) { return _mm512_reduce_add_ps(v); }
    static Table table(const float* codebook, float scale, float*) {
        const __m512 values = _mm512_mul_ps(_mm512_loadu_ps(codebook), _mm512_set1_ps(scale));
        return (__m512i)_mm512_cvtne2ps_pbh(values, values);
    }
    static Vector multiply_add(__m512i w, const X* x, int part, Vector sum) {
        return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_loadu_si512(x + 32 * part));
    }
};

// 32 weights from one vector of words:
//   words   0..7: elements 1, 5, 9 ...    8..15: 0, 4, 8 ...    16..23: 3, 7, 11 ...    24..31: 2, 6, 10 ...
struct BFloat16Unit : BFloat16Base {
    static constexpr int kSize = kGroup, kParts = 1;
    static int place(int k) {
        constexpr int lane[4] = {1, 0, 3, 2};
        return lane[k % 4] * 8 + k / 4;
    }
    static __m512i weights(const uint8_t* bytes, int, Table table) {
        const __m512i shifts = _mm512_set_epi64(0x000c000c000c000c, 0x000c000c000c000c, 0x0008000800080008,
                                                0x0008000800080008, 0x0004000400040004, 0x0004000400040004, 0, 0);
        const __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)bytes));
        return _mm512_permutexvar_epi16(_mm512_srlv_epi16(words, shifts), table);
    }
};

// 64 weights from two vectors of words: 1, 5 ... 61 | 3, 7 ... 63, and 4 bits further 0, 4 ... | 2, 6 ...
struct WideBFloat16Unit : BFloat16Base {
    static constexpr int kSize = 64, kParts = 2;
    static int place(int k) {
        constexpr int lane[4] = {2, 0, 3, 1};
        return lane[k % 4] * 16 + k / 4;
    }
    static __m512i weights(const uint8_t* bytes, int part, Table table) {
        const __m512i shifts = _mm512_set_epi64(0x0008000800080008, 0x0008000800080008, 0x0008000800080008,
                                                0x0008000800080008, 0, 0, 0, 0);
        const __m512i words = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)bytes));
        const __m512i low = _mm512_srlv_epi16(words, shifts);
        return _mm512_permutexvar_epi16(part ? _mm512_srli_epi16(low, 4) : low, table);
    }
};
#else
using BFloat16Unit = FloatUnit<true>;
using WideBFloat16Unit = BFloat16Unit;
#endif

// kFeatures output features from `feature` on, for kRows rows of x. A group never crosses a block, since in_features is
// divisible by its size; several features need their blocks to end at the same k, so in_features divisible by block_size.
// x is [in_features / kSize, kRows, kSize]: what one group of weights meets lies together.
template <typename Unit, int kRows, int kFeatures>
void dot_rows(const Linear& p, int64_t feature, const typename Unit::X* x, float (*out)[kRows]) {
    constexpr int kSize = Unit::kSize;
    constexpr int kChains = kRows * kFeatures > 8 ? 1 : 2;  // sums that do not wait for each other; at most 16 registers
    typename Unit::Vector sums[kFeatures][kRows][kChains];
    for (auto& rows : sums) for (auto& chains : rows) for (auto& sum : chains) sum = Unit::zero();
    typename Unit::Table tables[kFeatures];
    float entries[kFeatures][16];
    const int64_t K = p.in_features, begin = feature * K, blocks_per_row = K / p.block_size;
    const int64_t first = begin / p.block_size, last = (begin + kFeatures * K - 1) / p.block_size;
    static thread_local std::vector<float> buffer;
    buffer.resize(last + 1 - first);
    const float* scales = p.absmax.decode(first, last + 1 - first, buffer.data());
    const uint8_t* bytes[kFeatures];
    for (int f = 0; f < kFeatures; f++) bytes[f] = p.packed + begin / 2 + f * (K / 2);

    const auto step = [&](int64_t k, int odd) {
        const typename Unit::X* group = x + k * kRows;
#pragma GCC unroll 8
        for (int part = 0; part < Unit::kParts; part++) {
            const int chain = (part + odd) % kChains;
#pragma GCC unroll 4
            for (int f = 0; f < kFeatures; f++) {
                const auto w = Unit::weights(bytes[f] + (k >> 1), part, tables[f]);
#pragma GCC unroll 8
                for (int m = 0; m < kRows; m++) {
                    sums[f][m][chain] = Unit::multiply_add(w, group + m * kSize, part, sums[f][m][chain]);
                }
            }
        }
    };
    int64_t end = (first + 1) * p.block_size - begin;
    for (int64_t k = 0; k < K; end += p.block_size, scales++) {
        const int64_t stop = std::min(K, end);
#pragma GCC unroll 4
        for (int f = 0; f < kFeatures; f++) {
            tables[f] = Unit::table(p.codebook, scales[f * blocks_per_row], entries[f]);
            __builtin_prefetch(bytes[f] + (k >> 1) + kPrefetchBytes);
        }
        if (Unit::kParts == 1) {
            for (; k + 2 * kSize <= stop; k += 2 * kSize) step(k, 0), step(k + kSize, 1);
            if (k < stop) step(k, 0), k += kSize;
        } else {
            for (; k < stop; k += kSize) step(k, 0);
        }
    }
    for (int f = 0; f < kFeatures; f++) {
        for (int m = 0; m < kRows; m++) {
            out[f][m] = Unit::sum(sums[f][m][0]) + (kChains == 2 ? Unit::sum(sums[f][m][kChains - 1]) : 0.0f);
        }
    }
}

template <typename Unit, int kRows, typename T>
void linear_grouped(const Linear& p, const typename Unit::X* x, T* y) {
    constexpr int kFeatures = kRows <= 4 ? 4 : 2;  // 4096x28672, 4 rows: 3.5 ms, 3.9 ms two by two; 1 row: 4 % faster
    const bool aligned = p.in_features % p.block_size == 0;
    const auto body = [&](int64_t begin, int64_t end) {
        for (int64_t first = begin * kFeatures; first < std::min(end * kFeatures, p.out_features); first += kFeatures) {
            const int count = std::min<int64_t>(kFeatures, p.out_features - first);
            float out[kFeatures][kRows];
            if (aligned && count == kFeatures) dot_rows<Unit, kRows, kFeatures>(p, first, x, out);
            else for (int f = 0; f < count; f++) dot_rows<Unit, kRows, 1>(p, first + f, x, out + f);
            for (int f = 0; f < count; f++) {
                for (int m = 0; m < kRows; m++) store(y + m * p.out_features + first + f, out[f][m]);
            }
        }
    };
    parallel_for((p.out_features + kFeatures - 1) / kFeatures, p.useful_threads(), body);
}

template <typename Unit, typename T> void linear(const Linear& p, const T* x, T* y) {
    constexpr int kSize = Unit::kSize;
    static thread_local std::vector<typename Unit::X> memory;
    memory.resize(p.num_rows * p.in_features + 64);
    auto* placed = memory.data();  // from a cache line's start on: vectors across two lines take twice as long
    while (reinterpret_cast<uintptr_t>(placed) % 64) placed++;
    for (int64_t m = 0; m < p.num_rows; m++) {
        for (int64_t group = 0; group < p.in_features / kSize; group++) {
            const T* source = x + m * p.in_features + group * kSize;
            typename Unit::X* target = placed + (group * p.num_rows + m) * kSize;
#pragma GCC unroll 64
            for (int k = 0; k < kSize; k++) {
                if constexpr (sizeof(*target) == sizeof(T)) target[Unit::place(k)] = source[k];
                else target[Unit::place(k)] = load(source + k);
            }
        }
    }
    switch (p.num_rows) {
        case 1: return linear_grouped<Unit, 1>(p, placed, y);
        case 2: return linear_grouped<Unit, 2>(p, placed, y);
        case 3: return linear_grouped<Unit, 3>(p, placed, y);
        case 4: return linear_grouped<Unit, 4>(p, placed, y);
        case 5: return linear_grouped<Unit, 5>(p, placed, y);
        case 6: return linear_grouped<Unit, 6>(p, placed, y);
        case 7: return linear_grouped<Unit, 7>(p, placed, y);
        default: return linear_grouped<Unit, kMaxRows>(p, placed, y);
    }
}

#endif  // LOWBIT_NO_VECTOR_UNIT

}  // namespace

// x [num_rows, in_features], y [num_rows, out_features], both of dtype (float32 or bfloat16); num_rows in 1..8.
extern "C" void codebook4_linear(const int64_t* args) {
    Args a(args);
    const void* x = a.pointer<const void>();
    const uint8_t* packed = a.pointer<const uint8_t>();
    const Absmax absmax(a);
    const float* codebook = a.pointer<const float>();
    const int64_t num_rows = a.integer(), out_features = a.integer(), in_features = a.integer();
    const int64_t block_size = a.integer();
    void* y = a.pointer<void>();
    const int64_t dtype = a.integer(), threads = a.integer();
    const Linear p{packed, absmax, codebook, num_rows, out_features, in_features, block_size, threads};
#if !defined(LOWBIT_NO_VECTOR_UNIT)
    if (in_features % kGroup == 0) {
        if (dtype == kFloat32) return linear<FloatUnit<false>>(p, (const float*)x, (float*)y);
        if (in_features % 64 || block_size % 64) return linear<BFloat16Unit>(p, (const uint16_t*)x, (uint16_t*)y);
        return linear<WideBFloat16Unit>(p, (const uint16_t*)x, (uint16_t*)y);
    }
#endif
    if (dtype == kFloat32) linear_any(p, (const float*)x, (float*)y);
    else linear_any(p, (const uint16_t*)x, (uint16_t*)y);
}
