// What the kernels of codebooks share: scales, rounding and vector headers. Formulas and bytes: kernels/codebook4.py.

#pragma once

#include "lowbit.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace lowbit {

constexpr int kGroup = 32;                // smallest block; vector code works on 32 weights in 16 bytes
constexpr int kNestedBlock = 256;         // absmax values that share one nested_absmax
constexpr int64_t kSerialWork = 1 << 16;  // fewer weights than this are not worth a second thread

inline int code_at(const uint8_t* packed, int64_t i) { return i % 2 ? packed[i / 2] & 15 : packed[i / 2] >> 4; }

// Scales as stored: float32, or 8-bit codes of a 256-entry map with a scale per 256 and one offset (double_quant).
class Absmax {
  public:
    // The next four arguments: absmax, nested_absmax and nested_offset (null without double_quant), map.
    explicit Absmax(Args& args)
        : stored_(args.pointer<const void>()), nested_absmax_(args.pointer<const float>()),
          nested_offset_(args.pointer<const float>()), map_(args.pointer<const float>()) {
#if defined(__AVX512VBMI__)
        for (int i = 0; nested_absmax_ && i < 1024; i++) planes_[i % 4][i / 4] = reinterpret_cast<const uint8_t*>(map_)[i];
#endif
    }

    // The scales of blocks first..first + count, in `buffer` if they must be computed.
    const float* decode(int64_t first, int64_t count, float* buffer) const {
        if (!nested_absmax_) return static_cast<const float*>(stored_) + first;
        const uint8_t* codes = static_cast<const uint8_t*>(stored_) + first;
        for (int64_t i = 0; i < count;) {
            const int64_t nested = (first + i) / kNestedBlock;
            const int64_t stop = std::min(count, (nested + 1) * kNestedBlock - first);
            decode_nested(codes + i, stop - i, nested_absmax_[nested], *nested_offset_, buffer + i);
            i = stop;
        }
        return buffer;
    }

  private:
#if defined(__AVX512VBMI__)
    // 64 look-ups in 256 entries at once, a byte of the result at a time: from the lower or the upper half of its plane.
    void decode_nested(const uint8_t* codes, int64_t count, float scale, float offset, float* out) const {
        // 4-byte pieces in the order in which the unpacking below gives all 64 floats in ascending order
        const __m512i pieces = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m512 scales = _mm512_set1_ps(scale), offsets = _mm512_set1_ps(offset);
        for (int64_t i = 0; i < count; i += 64) {
            const int64_t left = std::min<int64_t>(64, count - i);
            const __m512i some = _mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - left), codes + i);
            const __m512i indices = _mm512_permutexvar_epi32(pieces, some);
            const __mmask64 upper = _mm512_movepi8_mask(indices);
            __m512i bytes[4];
            for (int b = 0; b < 4; b++) {
                const __m512i* plane = reinterpret_cast<const __m512i*>(planes_[b]);
                bytes[b] = _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(plane[0], indices, plane[1]),
                                                  _mm512_permutex2var_epi8(plane[2], indices, plane[3]));
            }
            const __m512i low[2] = {_mm512_unpacklo_epi8(bytes[0], bytes[1]), _mm512_unpackhi_epi8(bytes[0], bytes[1])};
            const __m512i high[2] = {_mm512_unpacklo_epi8(bytes[2], bytes[3]), _mm512_unpackhi_epi8(bytes[2], bytes[3])};
            for (int q = 0; q < 4 && 16 * q < left; q++) {
                const __m512i bits = q % 2 ? _mm512_unpackhi_epi16(low[q / 2], high[q / 2])
                                           : _mm512_unpacklo_epi16(low[q / 2], high[q / 2]);
                const __m512 product = _mm512_mul_ps(_mm512_castsi512_ps(bits), scales);  // two roundings, not one
                const __mmask16 mask = left - 16 * q >= 16 ? 0xffff : (1 << (left - 16 * q)) - 1;
                _mm512_mask_storeu_ps(out + i + 16 * q, mask, _mm512_add_ps(product, offsets));
            }
        }
    }
    alignas(64) uint8_t planes_[4][256];  // byte b of each entry of the map
#else
    void decode_nested(const uint8_t* codes, int64_t count, float scale, float offset, float* out) const {
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits;
            std::memcpy(&bits, map_ + codes[i], 4);
            asm("" : "+r"(bits));  // in a general register: compilers would insert lane by lane into vectors, or gather
            std::memcpy(out + i, &bits, 4);
        }
        for (int64_t i = 0; i < count; i++) out[i] = out[i] * scale + offset;  // two roundings: -ffp-contract=off
    }
#endif
    const void* stored_;
    const float* nested_absmax_;
    const float* nested_offset_;
    const float* map_;
};

struct Half {  // float16, so that it is not taken for bfloat16
    uint16_t bits;
};

// Round to nearest even, subnormals kept.
inline uint16_t to_float16(float value) {
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

// `value` as a table holds it: float, uint16_t (bfloat16) or Half.
template <typename T> T rounded(float value) {
    if constexpr (std::is_same_v<T, float>) return value;
    else if constexpr (std::is_same_v<T, Half>) return {to_float16(value)};
    else return to_bfloat16(value);
}

#if defined(__AVX512BW__)
constexpr float kNoSubnormals = 1e-30f;  // a larger scale times any entry but 0 is a normal number

// 16 values as words of T (Half or bfloat16), twice; `scale` is the largest of their magnitudes.
template <typename T> __m512i words_twice(__m512 values, [[maybe_unused]] float scale) {
    if constexpr (std::is_same_v<T, Half>) {
        return _mm512_broadcast_i64x4(_mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
#if defined(__AVX512BF16__)
    if (scale > kNoSubnormals) return (__m512i)_mm512_cvtne2ps_pbh(values, values);  // takes subnormals for zeros
#endif
    const __m512i bits = _mm512_castps_si512(values), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
}
#endif

}  // namespace lowbit
