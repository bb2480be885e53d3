// What attention's forward and backward share (attention.cpp): vectors, packing, the product, tiles.
//
// All products have one kernel: `strip_product` multiplies rows of elements, broadcast one by one, with packed vectors.
// An element is 4 bytes: a float, or a pair of bfloat16 for the machine's dot instruction; where that is missing,
// bfloat16 is widened while it is packed.
#pragma once

#include "attention_vectors.h"

#include <algorithm>
#include <vector>

namespace {

using lowbit::Args;

// Queries of a tile; keys between two rescalings of the sums. Measured on two Zen 4 cores with heads of 64 and 128: 128
// takes 2 to 7 % less time than 64, which loads and stores the sums twice as often, on documents of 200 rows too.
constexpr int kQueries = 128, kKeys = 128;
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// The larger, the smaller; b where one is nan.
Vector larger(Vector a, Vector b) {
#if defined(__AVX512F__)
    return (Vector)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}
Vector smaller(Vector a, Vector b) {
#if defined(__AVX512F__)
    return (Vector)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}

// 2^x for x <= 0, within 2 ulp; 0 below 2^-125; nan stays nan. 2^fraction is a polynomial that is minimax in relative
// error (7.5e-8) on its range.
Vector exp2(Vector x) {
#if defined(__AVX512DQ__)
    const Vector r = (Vector)_mm512_reduce_ps((__m512)x, 9);  // x - floor(x), and 0 for infinities
    Vector p = splat(0.0018775766f);
    p = multiply_add(p, r, splat(0.0089893406f));
    p = multiply_add(p, r, splat(0.055826318f));
    p = multiply_add(p, r, splat(0.24015361f));
    p = multiply_add(p, r, splat(0.69315308f));
    p = multiply_add(p, r, splat(0.99999994f));
    return (Vector)_mm512_scalef_ps((__m512)p, (__m512)x);  // p * 2^floor(x)
#else
    const Vector floor = splat(-125.0f);
    const auto tiny = x < floor;
    const Vector clamped = tiny ? floor : x;
    const Vector shifted = clamped + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are x, rounded to an integer
    const Vector r = clamped - (shifted - 12582912.0f);
    Vector p = splat(0.0013276471f);
    p = multiply_add(p, r, splat(0.0096755410f));
    p = multiply_add(p, r, splat(0.055507131f));
    p = multiply_add(p, r, splat(0.24022120f));
    p = multiply_add(p, r, splat(0.69314694f));
    p = multiply_add(p, r, splat(1.0000001f));
    const Vector power = (Vector)(((Ints)shifted << 23) + (127 << 23));
    return tiny ? Vector{} : p * power;
#endif
}

// ---- elements: packing rows of numbers for the products ----------------------------------------------------------

struct FloatDot {
    using Element = float;
    using Operand = Vector;
    static constexpr int kPair = 1;
    static Operand load(const float* p) { return load_vector(p); }
    static Operand broadcast(float value) { return splat(value); }
    static Vector add(Vector sum, Operand a, Operand b) { return multiply_add(a, b, sum); }

    // Rows of weights: as they are, which is both shapes.
    static void store_rows(Vector first, Vector second, float* rows, int64_t stride, float*) {
        store_vector(rows, first);
        store_vector(rows + stride, second);
    }
    static void store_pair(Vector first, Vector second, float* rows, int64_t stride) {
        store_rows(first, second, rows, stride, nullptr);
    }
    template <typename T> static void pack_row(const T* row, int64_t dim, float* out) {
        for (int64_t d = 0; d < dim; d++) out[d] = lowbit::load(row + d);
    }
    // Columns of `count` rows -> out [dim][kQueries], zeros up to `padded` rows.
    template <typename T>
    static void pack_columns(const T* rows, int64_t stride, int64_t count, int64_t padded, int64_t dim, float* out) {
        for (int64_t m = 0; m < padded; m++) {
            for (int64_t d = 0; d < dim; d++) {
                out[d * kQueries + m] = m < count ? lowbit::load(rows + m * stride + d) : 0;
            }
        }
    }
    // Rows -> out [padded][width], zeros behind them and behind dim.
    template <typename T>
    static void pack_pairs(const T* rows, int64_t stride, int64_t count, int64_t padded, int64_t dim, int64_t width,
                           float* out) {
        for (int64_t n = 0; n < padded; n++) {
            for (int64_t d = 0; d < width; d++) {
                out[n * width + d] = n < count && d < dim ? lowbit::load(rows + n * stride + d) : 0;
            }
        }
    }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define LOWBIT_PAIR_DOT

// 16 rows of 16 words, zeros where the masks say so -> their columns, `stride` words apart.
void transpose_words(const void* rows, int64_t stride_bytes, int64_t count, __mmask16 columns, uint32_t* out,
                     int64_t stride) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) {
        const char* row = static_cast<const char*>(rows) + i * stride_bytes;
        r[i] = i < count ? _mm512_maskz_loadu_epi32(columns, row) : _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {  // r[4 * j + i]: column 4 * lane + i of rows 4 * j ..
        const __m512i a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        const __m512i c = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        const __m512i d = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
        t[i] = _mm512_shuffle_i32x4(a, b, 0x88);
        t[8 + i] = _mm512_shuffle_i32x4(a, b, 0xdd);
        t[4 + i] = _mm512_shuffle_i32x4(c, d, 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
    for (int i = 0; i < 16; i++) {
        if (columns >> i & 1) _mm512_storeu_si512(out + i * stride, t[i]);
    }
}

struct PairDot {
    using Element = uint32_t;
    using Operand = __m512i;
    static constexpr int kPair = 2;
    static Operand load(const uint32_t* p) { return _mm512_loadu_si512(p); }
    static Operand broadcast(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
    static Vector add(Vector sum, Operand a, Operand b) {
        return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }

    // Two rows of weights, rounded: as rows `stride` words apart, and as pairs, an element a lane.
    static __m512i round_both(Vector first, Vector second) {
        return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }
    static __m512i interleave(__m512i both) {
        const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                               6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        return _mm512_permutexvar_epi16(order, both);
    }
    static void store_rows(Vector first, Vector second, uint32_t* rows, int64_t stride, uint32_t* pairs) {
        const __m512i both = round_both(first, second);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows), _mm512_castsi512_si256(both));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows + stride), _mm512_extracti64x4_epi64(both, 1));
        if (pairs) _mm512_storeu_si512(pairs, interleave(both));
    }
    static void store_pair(Vector first, Vector second, uint32_t* pairs, int64_t) {
        _mm512_storeu_si512(pairs, interleave(round_both(first, second)));
    }
    static void pack_row(const uint16_t* row, int64_t dim, uint32_t* out) { std::memcpy(out, row, 2 * dim); }
    static void pack_columns(const uint16_t* rows, int64_t stride, int64_t count, int64_t padded, int64_t dim,
                             uint32_t* out) {
        for (int64_t m = 0; m < padded; m += 16) {
            for (int64_t step = 0; step < dim / 2; step += 16) {
                const int64_t left = dim / 2 - step;
                const __mmask16 columns = left >= 16 ? 0xffff : static_cast<__mmask16>((1 << left) - 1);
                transpose_words(rows + m * stride + 2 * step, 2 * stride, count - m, columns,
                                out + step * kQueries + m, kQueries);
            }
        }
    }
    static void pack_pairs(const uint16_t* rows, int64_t stride, int64_t count, int64_t padded, int64_t dim,
                           int64_t width, uint32_t* out) {
        for (int64_t n = 0; n < padded; n += 2) {
            for (int64_t d = 0; d < width; d += 16, out += 16) {
                const __mmask16 mask = dim - d >= 16 ? 0xffff : static_cast<__mmask16>((1 << (dim - d)) - 1);
                const uint16_t* at = rows + n * stride + d;
                const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(n < count ? mask : 0, at));
                const __m512i high =
                    _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(n + 1 < count ? mask : 0, at + stride));
                _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
        }
    }
};
#endif

// ---- the product -------------------------------------------------------------------------------------------------

// c[row][v] (+)= sum over steps of a(row, step) * b[step][v]. a(row, step) is a[row * a_stride + step], or with kAcross
// a[row + step * a_stride]. Loops over rows and vectors are unrolled, those before and after the long loop too; with
// one left, GCC 12 keeps a copy of the sums in memory and stores to it at every step, which takes 1.8 times as long.
template <class Dot, bool kAcross, bool kAdd, int kRows, int kVectors>
void product_tile(const typename Dot::Element* a, int64_t a_stride, const typename Dot::Element* b, int64_t b_stride,
                  int64_t steps, float* c, int64_t c_stride) {
    Vector sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; v++) {
            sums[r][v] = kAdd ? load_vector(c + r * c_stride + v * kLanes) : Vector{};
        }
    }
    for (int64_t step = 0; step < steps; step++) {
        typename Dot::Operand operands[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; v++) operands[v] = Dot::load(b + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) {
            const auto element = Dot::broadcast(kAcross ? a[r] : a[r * a_stride]);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; v++) sums[r][v] = Dot::add(sums[r][v], element, operands[v]);
        }
        a += kAcross ? a_stride : 1;
        b += b_stride;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; v++) store_vector(c + r * c_stride + v * kLanes, sums[r][v]);
    }
}

template <class Dot, bool kAcross, bool kAdd, int kRows>
void product_rows(int64_t vectors, const typename Dot::Element* a, int64_t a_stride, const typename Dot::Element* b,
                  int64_t b_stride, int64_t steps, float* c, int64_t c_stride) {
    constexpr int kThree = std::min(3, kMaxVectors);
    while (vectors > 0) {
        const int64_t count = std::min<int64_t>(vectors, kMaxVectors);
        const auto run = count == 1   ? product_tile<Dot, kAcross, kAdd, kRows, 1>
                         : count == 2 ? product_tile<Dot, kAcross, kAdd, kRows, 2>
                         : count == 3 ? product_tile<Dot, kAcross, kAdd, kRows, kThree>
                                      : product_tile<Dot, kAcross, kAdd, kRows, kMaxVectors>;
        run(a, a_stride, b, b_stride, steps, c, c_stride);
        vectors -= count, b += count * kLanes, c += count * kLanes;
    }
}

template <class Dot, bool kAcross, bool kAdd, typename... Rest> void strip_product(int rows, Rest... rest) {
    switch (rows) {
        case 2: return product_rows<Dot, kAcross, kAdd, 2>(rest...);
        case 4: return product_rows<Dot, kAcross, kAdd, 4>(rest...);
        default: return product_rows<Dot, kAcross, kAdd, kMaxRows>(rest...);
    }
}

// f(row, rows) over strips of an even number of rows.
template <typename F> void for_strips(int64_t rows, F f) {
    for (int64_t row = 0; row < rows; row += kMaxRows) {
        f(row, static_cast<int>(std::min<int64_t>(kMaxRows, rows - row)));
    }
}

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// ---- what a task works on ----------------------------------------------------------------------------------------

struct Problem {
    const void* qkv;
    const int32_t* cu_seqlens;
    int64_t num_rows, num_docs, num_heads, num_kv_heads, head_dim;
    float scale;
    int64_t window;
    void *out, *grad, *dqkv;
    float *lse, *partial;
    int64_t threads;

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t stride() const { return (num_heads + 2 * num_kv_heads) * head_dim; }  // of qkv and dqkv
    int64_t out_stride() const { return num_heads * head_dim; }
    int64_t key_column(int64_t kv_head) const { return (num_heads + kv_head) * head_dim; }
    int64_t value_column(int64_t kv_head) const { return (num_heads + num_kv_heads + kv_head) * head_dim; }
};

// Rows begin .. begin + count of a document of `length` rows that starts at row `first` of the pack.
struct Item {
    int64_t first, length, kv_head, begin, count, cost;
};

// Memory of one task, reused by the thread's next one. Room for each buffer is asked for in the same order twice: once
// to count, once to take.
class Scratch {
  public:
    template <typename F> void lay_out(F f) {
        at_ = nullptr, size_ = 0;
        f(*this);
        if (bytes_.size() < size_ + 64) bytes_.resize(size_ + 64);
        at_ = bytes_.data() + (64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64), size_ = 0;
        f(*this);
    }
    template <typename E> void room(E*& pointer, int64_t count) {
        pointer = at_ ? reinterpret_cast<E*>(at_ + size_) : nullptr;
        size_ += round_up(count * sizeof(E), 64);
    }

  private:
    std::vector<char> bytes_;
    char* at_ = nullptr;
    size_t size_ = 0;
};

// What forward and backward share: a tile of queries against blocks of keys. `offset` is the first key of a block minus
// the first query of the tile; lane m sees key n of the block where 0 <= m - n - offset < window.
template <class Dot> struct Tile {
    using Element = typename Dot::Element;
    // Vectors before the first one computed that a strip of queries may still reach into.
    static constexpr int kFill = (kMaxRows - 1 + kLanes - 1) / kLanes;

    const Problem& p;
    const int64_t steps = p.head_dim / Dot::kPair, width = round_up(p.head_dim, kLanes), width_vectors = width / kLanes;
    const float factor = p.scale * kLog2E;  // scores are powers of 2
    int64_t first_query, queries, vectors;  // of the tile
    int64_t keys, offset;                   // of the block; keys is even, the last may be padding
    bool masked;

    explicit Tile(const Problem& problem) : p(problem) {}

    void place_queries(int64_t first, int64_t length) {
        first_query = first;
        queries = std::min<int64_t>(kQueries, length - first);
        vectors = (queries + kLanes - 1) / kLanes;
    }
    // A block of at most `limit` keys; those behind the last query are left out.
    void place_keys(int64_t first_key, int64_t limit) {
        offset = first_key - first_query;
        keys = round_up(std::min(limit, queries - offset), 2);
        masked = offset + keys - 1 > 0 || offset <= queries - 1 - p.window;
    }
    // The first vector with a query that sees key n.
    int64_t first_vector(int64_t n) const { return std::max<int64_t>(0, offset + n) / kLanes; }
    // Keys of the block that one of the queries before `end` sees, causally.
    int64_t seen_keys(int64_t end) const {
        return std::clamp<int64_t>(round_up(std::max<int64_t>(0, end - offset), 2), 0, keys);
    }
    // All bits set in the lanes of vector v that see key n.
    auto seen(int64_t v, int64_t n) const {
        Ints lane;
        for (int i = 0; i < kLanes; i++) lane[i] = i;
        const Words distance = (Words)(lane + static_cast<int32_t>(v * kLanes - n - offset));
        return distance < static_cast<uint32_t>(std::min<int64_t>(p.window, 1 << 30));
    }
};

}  // namespace
