// 4-bit codebooks on CPUs: quantize and dequantize. The formulas and the byte layout are in kernels/codebook4.py; every
// path here gives the reference's codes and weights bit for bit.
//
// A block shares one absmax, so its 16 possible weights are computed once, in a table; decoding is a table look-up by
// nibble. Paths are chosen when compiling: AVX512, AVX2, NEON, or plain C++.
#include "codebook4.h"

#if defined(__linux__)
#include <unistd.h>
#endif

namespace {

using namespace lowbit;

// ---- quantize ----------------------------------------------------------------------------------------------------

// Largest |w| of a block as float bits, whose integer order is the numeric order with inf and nan on top.
template <typename T> uint32_t absmax_bits(const T* w, int64_t n) {
    uint32_t result = 0;
    for (int64_t i = 0; i < n; i++) {
        const float value = load(w + i);
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        result = std::max(result, bits & 0x7fffffff);
    }
    return result;
}

// How many of 15 ascending thresholds lie below a weight, and the code of that interval.
class Intervals {
  public:
    Intervals(const float* thresholds, const uint8_t* order) : thresholds_(thresholds), order_(order) {
#if defined(__AVX512F__)
        float padded[32];
        std::fill(padded, padded + 32, __builtin_inff());
        std::copy(thresholds, thresholds + 15, padded);
        middle_ = _mm512_set1_ps(padded[7]);
        for (int i = 0; i < 3; i++) steps_[i] = _mm512_loadu_ps(padded + (4 >> i) - 1);
        codes_ = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)order));
#endif
    }

    // 32 weights to 16 bytes.
    template <typename T> void pack_group(const T* w, float inverse, uint8_t* packed) const {
#if defined(__AVX512F__)
        for (int half = 0; half < 2; half++) {
            const __m512i codes = find(_mm512_mul_ps(wide(w + 16 * half), _mm512_set1_ps(inverse)));
            const __m512i bytes = _mm512_or_si512(_mm512_slli_epi64(codes, 4), _mm512_srli_epi64(codes, 32));
            _mm_storel_epi64((__m128i*)(packed + 8 * half), _mm512_cvtepi64_epi8(bytes));
        }
#else
        float normalized[kGroup];
        for (int i = 0; i < kGroup; i++) normalized[i] = load(w + i) * inverse;
        pack_normalized(normalized, kGroup, packed);
#endif
    }

    // Up to 32 weights; the second code of a last odd byte is that of 0.
    template <typename T> void pack_rest(const T* w, int64_t count, float inverse, uint8_t* packed) const {
        float normalized[kGroup] = {};
        for (int64_t i = 0; i < count; i++) normalized[i] = load(w + i) * inverse;
        pack_normalized(normalized, count, packed);
    }

  private:
    void pack_normalized(const float* normalized, int64_t count, uint8_t* packed) const {
        int32_t intervals[kGroup];
        for (int i = 0; i < kGroup; i++) {
            intervals[i] = 0;
            for (int t = 0; t < 15; t++) intervals[i] += normalized[i] > thresholds_[t];
        }
        for (int64_t i = 0; i < (count + 1) / 2; i++) {
            packed[i] = static_cast<uint8_t>(order_[intervals[2 * i]] << 4 | order_[intervals[2 * i + 1]]);
        }
    }

#if defined(__AVX512F__)
    static __m512 wide(const float* w) { return _mm512_loadu_ps(w); }
    static __m512 wide(const uint16_t* w) {
        const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)w));
        return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    }
    // Binary search: the interval grows by 8, 4, 2 and 1 where the threshold in the middle of what is left lies below.
    __m512i find(__m512 values) const {
        __m512i interval = _mm512_maskz_set1_epi32(_mm512_cmp_ps_mask(values, middle_, _CMP_GT_OQ), 8);
        for (int i = 0; i < 3; i++) {
            const __m512 threshold = _mm512_permutexvar_ps(interval, steps_[i]);
            const __mmask16 above = _mm512_cmp_ps_mask(values, threshold, _CMP_GT_OQ);
            interval = _mm512_mask_add_epi32(interval, above, interval, _mm512_set1_epi32(4 >> i));
        }
        return _mm512_permutexvar_epi32(interval, codes_);
    }
    __m512 middle_, steps_[3];  // steps_[i][j] = thresholds[j + (4 >> i) - 1]
    __m512i codes_;
#endif
    const float* thresholds_;
    const uint8_t* order_;
};

// Returns whether every weight is finite.
template <typename T>
bool quantize(const T* weight, int64_t numel, int64_t block_size, const Intervals& intervals, uint8_t* packed,
              float* absmax, int64_t threads) {
    const int64_t num_blocks = (numel + block_size - 1) / block_size;
    bool finite = true;
    const auto body = [&](int64_t first, int64_t last) {
        const Intervals tables = intervals;  // a copy that stores through `packed` cannot change stays in registers
        uint32_t largest = 0;
        for (int64_t block = first; block < last; block++) {
            const int64_t begin = block * block_size, n = std::min(block_size, numel - begin);
            const T* w = weight + begin;
            const uint32_t bits = absmax_bits(w, n);
            largest = std::max(largest, bits);
            std::memcpy(absmax + block, &bits, 4);
            const float inverse = 1.0f / std::max(absmax[block], 1e-38f);
            int64_t i = 0;
            for (; i + kGroup <= n; i += kGroup) tables.pack_group(w + i, inverse, packed + (begin + i) / 2);
            if (i < n) tables.pack_rest(w + i, n - i, inverse, packed + (begin + i) / 2);
        }
        if (largest >= 0x7f800000) __atomic_store_n(&finite, false, __ATOMIC_RELAXED);
    };
    parallel_for(num_blocks, numel > kSerialWork ? threads : 1, body);
    return finite;
}

// ---- dequantize: 16 bytes -> 32 weights through the block's table ------------------------------------------------

#if defined(__AVX512BW__)

// kStream writes past the caches: `out` must then be aligned to 64 bytes.
template <bool kStream> void put(void* out, __m512i values) {
    if constexpr (kStream) _mm512_stream_si512((__m512i*)out, values);
    else _mm512_storeu_si512(out, values);
}

// The 16 weights of a block, twice, so that bit 4 of an index does not matter.
template <typename T> struct Table {
    __m512i entries;
    Table(const float* codebook, float scale)
        : entries(words_twice<T>(_mm512_mul_ps(_mm512_loadu_ps(codebook), _mm512_set1_ps(scale)), scale)) {}
    template <bool kStream> void expand(const uint8_t* bytes, T* out) const {
        // Byte j / 2 goes into the high half of word j; times 16 (even j) or 256 (odd j), the product's high half has
        // code j in its low 4 bits. A multiplication, since shifts and look-ups wait for the same units on Zen 4.
        const __m512i places = _mm512_set_epi64(
            0x0f800f800e800e80, 0x0d800d800c800c80, 0x0b800b800a800a80, 0x0980098008800880, 0x0780078006800680,
            0x0580058004800480, 0x0380038002800280, 0x0180018000800080);
        const __m512i packed = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)bytes));
        const __m512i words = _mm512_shuffle_epi8(packed, places);
        const __m512i codes = _mm512_mulhi_epu16(words, _mm512_set1_epi32(0x01000010));
        put<kStream>(out, _mm512_permutexvar_epi16(codes, entries));
    }
    T operator[](int code) const {
        alignas(64) uint16_t values[32];
        _mm512_store_si512(values, entries);
        T result;
        std::memcpy(&result, values + code, 2);
        return result;
    }
};

template <> struct Table<float> {
    __m512 entries;
    Table(const float* codebook, float scale)
        : entries(_mm512_mul_ps(_mm512_loadu_ps(codebook), _mm512_set1_ps(scale))) {}
    template <bool kStream> void expand(const uint8_t* bytes, float* out) const {
        for (int half = 0; half < 2; half++) {
            const __m128i packed = _mm_loadl_epi64((const __m128i*)(bytes + 8 * half));
            const __m128i codes = _mm_unpacklo_epi8(_mm_srli_epi16(packed, 4), packed);  // the look-up takes 4 bits
            const __m512 weights = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), entries);
            put<kStream>(out + 16 * half, _mm512_castps_si512(weights));
        }
    }
    float operator[](int code) const {
        float values[16];
        _mm512_storeu_ps(values, entries);
        return values[code];
    }
};

#else

template <typename T> struct Table {
    T entries[16];
    Table(const float* codebook, float scale) {
        for (int i = 0; i < 16; i++) entries[i] = rounded<T>(codebook[i] * scale);
    }
    template <bool> void expand(const uint8_t* bytes, T* out) const {
#if defined(__AVX2__)
        if constexpr (sizeof(T) == 2) return expand_words(bytes, (uint16_t*)out);
#elif defined(__aarch64__)
        if constexpr (sizeof(T) == 2) return expand_words(bytes, (uint8_t*)out);
#endif
        for (int i = 0; i < kGroup / 2; i++) {
            out[2 * i] = entries[bytes[i] >> 4];
            out[2 * i + 1] = entries[bytes[i] & 15];
        }
    }
    T operator[](int code) const { return entries[code]; }

  private:
#if defined(__AVX2__)
    void expand_words(const uint8_t* bytes, uint16_t* out) const {
        const __m256i words = _mm256_loadu_si256((const __m256i*)entries);
        const __m256i even_bytes = _mm256_set1_epi16(0x00ff);
        const __m256i planes = _mm256_permute4x64_epi64(
            _mm256_packus_epi16(_mm256_and_si256(words, even_bytes), _mm256_srli_epi16(words, 8)), 0xd8);
        const __m128i low_plane = _mm256_castsi256_si128(planes), high_plane = _mm256_extracti128_si256(planes, 1);
        const __m128i packed = _mm_loadu_si128((const __m128i*)bytes), mask = _mm_set1_epi8(15);
        const __m128i high = _mm_and_si128(_mm_srli_epi16(packed, 4), mask), low = _mm_and_si128(packed, mask);
        for (int half = 0; half < 2; half++) {
            const __m128i codes = half ? _mm_unpackhi_epi8(high, low) : _mm_unpacklo_epi8(high, low);
            const __m128i a = _mm_shuffle_epi8(low_plane, codes), b = _mm_shuffle_epi8(high_plane, codes);
            _mm_storeu_si128((__m128i*)(out + 16 * half), _mm_unpacklo_epi8(a, b));
            _mm_storeu_si128((__m128i*)(out + 16 * half + 8), _mm_unpackhi_epi8(a, b));
        }
    }
#elif defined(__aarch64__)
    void expand_words(const uint8_t* bytes, uint8_t* out) const {
        const uint8x16x2_t planes = vld2q_u8((const uint8_t*)entries);  // low bytes, high bytes
        const uint8x16_t packed = vld1q_u8(bytes);
        const uint8x16x2_t codes = vzipq_u8(vshrq_n_u8(packed, 4), vandq_u8(packed, vdupq_n_u8(15)));
        for (int half = 0; half < 2; half++) {
            const uint8x16x2_t words = {vqtbl1q_u8(planes.val[0], codes.val[half]),
                                        vqtbl1q_u8(planes.val[1], codes.val[half])};
            vst2q_u8(out + 32 * half, words);
        }
    }
#endif
};

#endif

constexpr int64_t kTile = 1 << 14;  // weights whose scales are decoded at a time; whole blocks of every size
constexpr int64_t kStreamBytes = 1 << 25;  // outputs of this size and more, where the last cache is not larger

int64_t stream_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
    static const int64_t cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return std::max(cache, kStreamBytes);
#else
    return kStreamBytes;
#endif
}

// `num_weights` from the start of a block on. All by value: a store through `out` may change nothing that the loop reads.
template <typename T, bool kStream>
void dequantize_tile(const uint8_t* packed, const float* scales, const float* codebook, int64_t num_weights,
                     int64_t block_size, T* out) {
    for (; num_weights > 0; scales++, num_weights -= block_size) {
        const Table<T> table(codebook, *scales);
        const int64_t size = std::min(block_size, num_weights);
        const uint8_t* const end = packed + size / kGroup * (kGroup / 2);
        for (; packed < end; packed += kGroup / 2, out += kGroup) table.template expand<kStream>(packed, out);
        if (size < block_size) {  // the last block
            for (int64_t i = 0; i < size % kGroup; i++) out[i] = table[code_at(packed, i)];
        }
    }
}

template <typename T, bool kStream>
void dequantize_as(const uint8_t* packed, const Absmax& absmax, const float* codebook, int64_t numel,
                   int64_t block_size, T* out, int64_t threads) {
    const auto body = [&](int64_t first_tile, int64_t last_tile) {
        float buffer[kTile / kGroup];
        for (int64_t tile = first_tile; tile < last_tile; tile++) {
            const int64_t begin = tile * kTile, count = std::min(kTile, numel - begin);
            const float* scales = absmax.decode(begin / block_size, (count + block_size - 1) / block_size, buffer);
            dequantize_tile<T, kStream>(packed + begin / 2, scales, codebook, count, block_size, out + begin);
        }
#if defined(__AVX512BW__)
        if (kStream) _mm_sfence();
#endif
    };
    parallel_for((numel + kTile - 1) / kTile, numel > kSerialWork ? threads : 1, body);
}

template <typename T>
void dequantize(const uint8_t* packed, const Absmax& absmax, const float* codebook, int64_t numel, int64_t block_size,
                void* out, int64_t threads) {
    const bool stream = numel * int64_t(sizeof(T)) >= stream_bytes() && reinterpret_cast<uintptr_t>(out) % 64 == 0;
    const auto run = stream ? dequantize_as<T, true> : dequantize_as<T, false>;
    run(packed, absmax, codebook, numel, block_size, static_cast<T*>(out), threads);
}

}  // namespace

// weight [numel] float32 or bfloat16 -> packed, absmax; writes 1 to not_finite if the weight holds inf or nan (the
// codes are then meaningless), else 0. order: the code of each interval between thresholds.
extern "C" void codebook4_quantize(const int64_t* args) {
    Args a(args);
    const int64_t dtype = a.integer();
    const void* weight = a.pointer<const void>();
    const int64_t numel = a.integer(), block_size = a.integer();
    const float* thresholds = a.pointer<const float>();
    const uint8_t* order = a.pointer<const uint8_t>();
    uint8_t* packed = a.pointer<uint8_t>();
    float* absmax = a.pointer<float>();
    int64_t* not_finite = a.pointer<int64_t>();
    const int64_t threads = a.integer();
    const Intervals intervals(thresholds, order);
    const bool finite =
        dtype == kFloat32
            ? quantize(static_cast<const float*>(weight), numel, block_size, intervals, packed, absmax, threads)
            : quantize(static_cast<const uint16_t*>(weight), numel, block_size, intervals, packed, absmax, threads);
    *not_finite = !finite;
}

// out: [numel] of dtype
extern "C" void codebook4_dequantize(const int64_t* args) {
    Args a(args);
    const uint8_t* packed = a.pointer<const uint8_t>();
    const Absmax absmax(a);
    const float* codebook = a.pointer<const float>();
    const int64_t numel = a.integer(), block_size = a.integer();
    void* out = a.pointer<void>();
    const int64_t dtype = a.integer(), threads = a.integer();
    const auto run = dtype == kFloat32 ? dequantize<float> : dtype == kBFloat16 ? dequantize<uint16_t> : dequantize<Half>;
    run(packed, absmax, codebook, numel, block_size, out, threads);
}
