// 2- and 3-bit codebooks on CPUs: dequantize, and pack what codebook4_quantize found. The formulas and the byte layout
// are in kernels/codebook_bits.py; every path here gives the reference's bytes and weights bit for bit.
//
// As with 4 bits a block's possible weights are computed once, in a table that is repeated until it fills a vector: the
// bits above a code then do not matter, so a word that holds the code in its lowest bits is an index as it is.
#include "codebook4.h"

namespace {

using namespace lowbit;

constexpr int64_t kTile = 1 << 14;  // weights whose scales are decoded at a time; whole blocks of every size

// Code `i` of a stream; only bytes that hold a bit of it are read.
template <int kBits> int code_of(const uint8_t* bytes, int64_t i) {
    const int64_t bit = kBits * i;
    const int shift = bit % 8;
    int word = bytes[bit / 8];
    if (shift + kBits > 8) word |= bytes[bit / 8 + 1] << 8;
    return word >> shift & ((1 << kBits) - 1);
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)

// For each of 32 codes the two bytes in which it lies, and by how many bits it is shifted there.
template <int kBits> struct Places {
    alignas(64) uint8_t bytes[64] = {};
    alignas(64) uint16_t shifts[32] = {};
    constexpr Places() {
        for (int i = 0; i < 32; i++) {
            bytes[2 * i] = kBits * i / 8;
            bytes[2 * i + 1] = kBits * i / 8 + 1;
            shifts[i] = kBits * i % 8;
        }
    }
};
template <int kBits> constexpr Places<kBits> kPlaces{};

// 32 codes as words, with bits of the next codes above them.
template <int kBits> __m512i load_codes(const uint8_t* bytes) {
    const __m128i packed = _mm_maskz_loadu_epi8((1 << 4 * kBits) - 1, bytes);
    const __m512i words = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(packed), _mm512_load_si512(kPlaces<kBits>.bytes));
    return _mm512_srlv_epi16(words, _mm512_load_si512(kPlaces<kBits>.shifts));
}

// codebook: 16 floats, repeated.
template <int kBits, typename T> struct Table {
    __m512i entries;
    Table(const float* codebook, float scale)
        : entries(words_twice<T>(_mm512_mul_ps(_mm512_loadu_ps(codebook), _mm512_set1_ps(scale)), scale)) {}
    void expand(const uint8_t* bytes, T* out) const {
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(load_codes<kBits>(bytes), entries));
    }
    T operator[](int code) const {
        alignas(64) T values[32];
        _mm512_store_si512(values, entries);
        return values[code];
    }
};

template <int kBits> struct Table<kBits, float> {
    __m512 entries;
    Table(const float* codebook, float scale)
        : entries(_mm512_mul_ps(_mm512_loadu_ps(codebook), _mm512_set1_ps(scale))) {}
    void expand(const uint8_t* bytes, float* out) const {
        const __m512i codes = load_codes<kBits>(bytes);
        const __m256i halves[2] = {_mm512_castsi512_si256(codes), _mm512_extracti64x4_epi64(codes, 1)};
        for (int i = 0; i < 2; i++) {
            _mm512_storeu_ps(out + 16 * i, _mm512_permutexvar_ps(_mm512_cvtepu16_epi32(halves[i]), entries));
        }
    }
    float operator[](int code) const {
        float values[16];
        _mm512_storeu_ps(values, entries);
        return values[code];
    }
};

#else

template <int kBits, typename T> struct Table {
    T entries[1 << kBits];
    Table(const float* codebook, float scale) {
        for (int i = 0; i < 1 << kBits; i++) entries[i] = rounded<T>(codebook[i] * scale);
    }
    void expand(const uint8_t* bytes, T* out) const {
        for (int eight = 0; eight < 4; eight++, bytes += kBits, out += 8) {
            uint32_t word = 0;
            for (int b = 0; b < kBits; b++) word |= uint32_t{bytes[b]} << 8 * b;
            for (int i = 0; i < 8; i++) out[i] = entries[word >> kBits * i & ((1 << kBits) - 1)];
        }
    }
    T operator[](int code) const { return entries[code]; }
};

#endif

// `num_weights` from the start of a block on.
template <int kBits, typename T>
void dequantize_tile(const uint8_t* packed, const float* scales, const float* codebook, int64_t num_weights,
                     int64_t block_size, T* out) {
    for (; num_weights > 0; scales++, num_weights -= block_size) {
        const Table<kBits, T> table(codebook, *scales);
        const int64_t size = std::min(block_size, num_weights);
        const uint8_t* const end = packed + size / kGroup * (4 * kBits);
        for (; packed < end; packed += 4 * kBits, out += kGroup) table.expand(packed, out);
        for (int64_t i = 0; i < size % kGroup; i++) out[i] = table[code_of<kBits>(packed, i)];  // the last block
    }
}

template <int kBits, typename T>
void dequantize(const uint8_t* packed, const Absmax& absmax, const float* codebook, int64_t numel, int64_t block_size,
                void* out, int64_t threads) {
    float repeated[16];
    for (int i = 0; i < 16; i++) repeated[i] = codebook[i % (1 << kBits)];
    const auto body = [&](int64_t first_tile, int64_t last_tile) {
        float buffer[kTile / kGroup];
        for (int64_t tile = first_tile; tile < last_tile; tile++) {
            const int64_t begin = tile * kTile, count = std::min(kTile, numel - begin);
            const float* scales = absmax.decode(begin / block_size, (count + block_size - 1) / block_size, buffer);
            T* const target = static_cast<T*>(out) + begin;
            dequantize_tile<kBits, T>(packed + begin / 8 * kBits, scales, repeated, count, block_size, target);
        }
    };
    parallel_for((numel + kTile - 1) / kTile, numel > kSerialWork ? threads : 1, body);
}

template <int kBits> void pack(const uint8_t* nibbles, int64_t numel, uint8_t* packed, int64_t threads) {
    const auto body = [&](int64_t first, int64_t last) {
        for (int64_t eight = first; eight < last; eight++) {
            const int64_t count = std::min<int64_t>(8, numel - 8 * eight);
            uint32_t word = 0;
            for (int64_t i = 0; i < count; i++) word |= uint32_t(code_at(nibbles, 8 * eight + i)) << kBits * i;
            const int64_t num_bytes = (count * kBits + 7) / 8;
            for (int64_t b = 0; b < num_bytes; b++) packed[eight * kBits + b] = static_cast<uint8_t>(word >> 8 * b);
        }
    };
    parallel_for((numel + 7) / 8, numel > kSerialWork ? threads : 1, body);
}

template <int kBits> auto decoder_of(int64_t dtype) {
    return dtype == kFloat32    ? dequantize<kBits, float>
           : dtype == kBFloat16 ? dequantize<kBits, uint16_t>
                                : dequantize<kBits, Half>;
}

}  // namespace

// bits: 2 or 3; out: [numel] of dtype
extern "C" void codebook_bits_dequantize(const int64_t* args) {
    Args a(args);
    const uint8_t* packed = a.pointer<const uint8_t>();
    const Absmax absmax(a);
    const float* codebook = a.pointer<const float>();
    const int64_t bits = a.integer(), numel = a.integer(), block_size = a.integer();
    void* out = a.pointer<void>();
    const int64_t dtype = a.integer(), threads = a.integer();
    const auto run = bits == 2 ? decoder_of<2>(dtype) : decoder_of<3>(dtype);
    run(packed, absmax, codebook, numel, block_size, out, threads);
}

// codes in nibbles, as codebook4_quantize writes them -> ceil(numel * bits / 8) bytes; bits past the last code are 0
extern "C" void codebook_bits_pack(const int64_t* args) {
    Args a(args);
    const uint8_t* nibbles = a.pointer<const uint8_t>();
    const int64_t bits = a.integer(), numel = a.integer();
    uint8_t* packed = a.pointer<uint8_t>();
    const int64_t threads = a.integer();
    (bits == 2 ? pack<2> : pack<3>)(nibbles, numel, packed, threads);
}
