// RMS norm, rotary embedding, SwiGLU and the row gather of kernels/{rms_norm,rope,swiglu,embedding}.py: what lies
// between the matrix products of a decoder layer.
//
// Vectors are the compiler's own (GCC and clang lower them to AVX512, AVX2, SSE2 or NEON). A result depends neither on
// their width nor on the rest of the call: every element is computed alone by correctly rounded operations, and a sum
// over a row runs in kLanes partial sums that are folded in one fixed order.

#include <cmath>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "lowbit.h"

namespace {

using lowbit::Args;

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kLanes = 32;  // partial sums of a row, on every processor
constexpr int kVectors = kLanes / kWidth;
// So many elements are 5 us of RMS norm or 13 us of SwiGLU on one Zen 4 core; fewer are not worth waking a thread for.
constexpr int64_t kSerialWork = 1 << 14;

// f(row) for every row.
template <typename F> inline void for_rows(int64_t rows, int64_t work, int threads, F f) {
    lowbit::parallel_for(rows, work > kSerialWork ? threads : 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) f(row);
    });
}

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));

// ---- vectors of kWidth values, or of the last `count` of a row and zeros -------------------------------------------

inline Words bits_of(Floats v) { return reinterpret_cast<Words>(v); }
inline Floats floats_of(Words w) { return reinterpret_cast<Floats>(w); }

inline Floats widen(Floats v) { return v; }
#if defined(__AVX512F__)  // GCC 12 takes five instructions for these two
inline Floats widen(Halves h) { return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16); }
#else
inline Floats widen(Halves h) { return floats_of(__builtin_convertvector(h, Words) << 16); }
#endif

// Rounded to bfloat16 in the upper half of each word: nearest, ties to even. A nan here comes from arithmetic or from a
// bfloat16, so the lower half of its word is 0 and the addition leaves it a nan. (AVX512-BF16's instruction is not used:
// it flushes subnormal numbers to zero.)
inline Words rounded_bits(Floats v) {
    const Words bits = bits_of(v);
    return bits + 0x7fff + (bits >> 16 & 1);
}

inline Floats round_as(const float*, Floats v) { return v; }
inline Floats round_as(const uint16_t*, Floats v) { return floats_of(rounded_bits(v) & 0xffff0000); }

inline Floats narrow(const float*, Floats v) { return v; }
inline Halves narrow(const uint16_t*, Floats v) { return __builtin_convertvector(rounded_bits(v) >> 16, Halves); }

inline Floats vector_of(const float*) { return Floats{}; }
inline Halves vector_of(const uint16_t*) { return Halves{}; }

// Counts are Full where a whole vector is there, so that the branch and the partial copy compile away.
using Full = std::integral_constant<int64_t, kWidth>;

template <typename T, typename Count> inline Floats load(const T* p, Count count) {
    auto v = vector_of(p);
    std::memcpy(&v, p, count * sizeof(T));
    return widen(v);
}

template <typename T, typename Count> inline void store(T* p, Count count, Floats value) {
    const auto v = narrow(p, value);
    std::memcpy(p, &v, count * sizeof(T));
}

// f(i, count) for the vectors of a row.
template <typename F> inline void for_vectors(int64_t size, F f) {
    int64_t i = 0;
    for (; i + kWidth <= size; i += kWidth) f(i, Full{});
    if (i < size) f(i, size - i);
}

// ---- sums over a row ------------------------------------------------------------------------------------------------

inline float fold(const Floats* sums) {
    float lanes[kLanes];
    std::memcpy(lanes, sums, sizeof lanes);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// 1 / sqrt(mean(x^2) + eps). With `residual`, x + residual (rounded) takes the place of x and is written to `sum`.
template <typename T> float inverse_rms(const T* x, const T* residual, T* sum, int64_t size, float eps) {
    Floats sums[kVectors] = {};
    const auto add = [&](int j, int64_t i, auto count) {
        Floats v = load(x + i, count);
        if (residual) {
            v = round_as(x, v + load(residual + i, count));
            store(sum + i, count, v);
        }
        sums[j] += v * v;
    };
    int64_t start = 0;
    for (; start + kLanes <= size; start += kLanes)
        for (int j = 0; j < kVectors; j++) add(j, start + j * kWidth, Full{});
    for_vectors(size - start, [&](int64_t i, auto count) { add(static_cast<int>(i / kWidth), start + i, count); });
    return 1.0f / std::sqrt(fold(sums) / static_cast<float>(size) + eps);
}

template <typename T>
void rms_norm(const T* x, const T* residual, const T* weight, T* out, T* sum, int64_t rows, int64_t size, float eps,
              int threads) {
    for_rows(rows, rows * size, threads, [=](int64_t row) {
        const int64_t first = row * size;
        T* total = residual ? sum + first : nullptr;
        const float scale = inverse_rms(x + first, residual ? residual + first : nullptr, total, size, eps);
        const T* normed = residual ? total : x + first;
        for_vectors(size, [&](int64_t i, auto count) {
            store(out + first + i, count, round_as(x, load(normed + i, count) * scale) * load(weight + i, count));
        });
    });
}

// ---- rotary embedding -----------------------------------------------------------------------------------------------

// One head: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), after its RMS norm where there is a weight.
template <typename T> void rotate_head(T* x, const T* cos, const T* sin, const T* weight, int64_t half, float eps) {
    const float scale = weight ? inverse_rms<T>(x, nullptr, nullptr, 2 * half, eps) : 0.0f;
    for_vectors(half, [&](int64_t i, auto count) {
        Floats x1 = load(x + i, count), x2 = load(x + half + i, count);
        if (weight) {
            x1 = round_as(x, round_as(x, x1 * scale) * load(weight + i, count));
            x2 = round_as(x, round_as(x, x2 * scale) * load(weight + half + i, count));
        }
        const Floats c = load(cos + i, count), s = load(sin + i, count);
        store(x + i, count, round_as(x, x1 * c) - round_as(x, x2 * s));
        store(x + half + i, count, round_as(x, x2 * c) + round_as(x, x1 * s));
    });
}

template <typename T>
void rope(T* qkv, const int64_t* positions, const T* cos_sin, const T* q_norm, const T* k_norm, int64_t tokens,
          int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t max_positions, float eps, int threads) {
    const int64_t rotated = heads + kv_heads, stride = (heads + 2 * kv_heads) * head_dim, half = head_dim / 2;
    for_rows(tokens, tokens * stride, threads, [=](int64_t token) {
        T* x = qkv + token * stride;
        const int64_t position = positions[token];
        if (position < 0 || position >= max_positions) {
            std::memset(x, 0xff, rotated * head_dim * sizeof(T));  // nan
            return;
        }
        const T* cos = cos_sin + position * head_dim;
        for (int64_t head = 0; head < rotated; head++)
            rotate_head(x + head * head_dim, cos, cos + half, head < heads ? q_norm : k_norm, half, eps);
    });
}

// ---- SwiGLU ---------------------------------------------------------------------------------------------------------

// 1 + e^x. x = n ln 2 + r with |r| <= ln 2 / 2, and e^r is its Taylor series to r^7, whose rest is below 0.1 ulp. 2^n is
// applied as 2^(n-1) and 2, which reaches inf where e^x does. nan compares false and stays. ln 2 is split as in Cephes'
// expf.
inline Floats one_plus_exp(Floats x) {
    x = x > 89.0f ? Floats{} + 89.0f : x;   // e^x is inf
    x = x < -87.0f ? Floats{} - 87.0f : x;  // 1 + e^x is 1
    const float magic = 12582912.0f;        // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits
    const Floats shifted = x * 1.44269504f + magic;
    const Floats n = shifted - magic;
    const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts; the first product is exact
    Floats p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    const Floats half = p * floats_of((bits_of(shifted) - (0x4b400000 - 126)) << 23);  // 0x4b400000: the bits of magic
    return 1.0f + (half + half);
}

template <typename T> void swiglu(const T* gate_up, T* out, int64_t rows, int64_t size, int threads) {
    for_rows(rows, rows * size, threads, [=](int64_t row) {
        const T *gate = gate_up + 2 * row * size, *up = gate + size;
        for_vectors(size, [&](int64_t i, auto count) {
            const Floats g = load(gate + i, count);
            const Floats silu = round_as(gate, g / one_plus_exp(-g));
            store(out + row * size + i, count, silu * load(up + i, count));
        });
    });
}

// ---- boxed ----------------------------------------------------------------------------------------------------------

template <typename T> void rms_norm_boxed(Args& args) {
    const T *x = args.pointer<T>(), *residual = args.pointer<T>(), *weight = args.pointer<T>();
    T *out = args.pointer<T>(), *sum = args.pointer<T>();
    const int64_t rows = args.integer(), size = args.integer();
    const float eps = args.real();
    rms_norm(x, residual, weight, out, sum, rows, size, eps, static_cast<int>(args.integer()));
}

template <typename T> void rope_boxed(Args& args) {
    T* qkv = args.pointer<T>();
    const int64_t* positions = args.pointer<int64_t>();
    const T *cos_sin = args.pointer<T>(), *q_norm = args.pointer<T>(), *k_norm = args.pointer<T>();
    const int64_t tokens = args.integer(), heads = args.integer(), kv_heads = args.integer();
    const int64_t head_dim = args.integer(), max_positions = args.integer();
    const float eps = args.real();
    const int threads = static_cast<int>(args.integer());
    rope(qkv, positions, cos_sin, q_norm, k_norm, tokens, heads, kv_heads, head_dim, max_positions, eps, threads);
}

template <typename T> void swiglu_boxed(Args& args) {
    const T* gate_up = args.pointer<T>();
    T* out = args.pointer<T>();
    const int64_t rows = args.integer(), size = args.integer();
    swiglu(gate_up, out, rows, size, static_cast<int>(args.integer()));
}

template <void (*Float32)(Args&), void (*BFloat16)(Args&)> void by_dtype(const int64_t* args) {
    Args rest(args);
    if (rest.integer() == lowbit::kBFloat16)
        BFloat16(rest);
    else
        Float32(rest);
}

}  // namespace

// dtype, x, residual or null, weight, out, sum or null, rows, size, eps, threads
extern "C" void rms_norm(const int64_t* args) { by_dtype<rms_norm_boxed<float>, rms_norm_boxed<uint16_t>>(args); }

// dtype, qkv, positions, cos_sin, q_norm or null, k_norm or null, tokens, heads, kv_heads, head_dim, max_positions, eps,
// threads
extern "C" void rope(const int64_t* args) { by_dtype<rope_boxed<float>, rope_boxed<uint16_t>>(args); }

// dtype, gate_up, out, rows, size, threads
extern "C" void swiglu(const int64_t* args) { by_dtype<swiglu_boxed<float>, swiglu_boxed<uint16_t>>(args); }

// rows, number of rows, bytes of a row, row ids, number of ids, out, threads. An id that is no row gives a row of nan
// (all bits set, in every float type).
extern "C" void gather_rows(const int64_t* boxed) {
    Args args(boxed);
    const char* rows = args.pointer<char>();
    const int64_t num_rows = args.integer(), row_bytes = args.integer();
    const int64_t* ids = args.pointer<int64_t>();
    const int64_t num_ids = args.integer();
    char* out = args.pointer<char>();
    const int threads = static_cast<int>(args.integer());
    for_rows(num_ids, num_ids * row_bytes / 4, threads, [=](int64_t i) {
        if (ids[i] < 0 || ids[i] >= num_rows)
            std::memset(out + i * row_bytes, 0xff, row_bytes);
        else
            std::memcpy(out + i * row_bytes, rows + ids[i] * row_bytes, row_bytes);
    });
}
