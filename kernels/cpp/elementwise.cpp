// RMS norm, rotary embedding, SwiGLU and the row gather of kernels/{rms_norm,rope,swiglu,embedding}.py: what lies
// between the matrix products of a decoder layer. elementwise.h says how; elementwise_backward.cpp has the gradients.

#include "elementwise.h"

namespace {

// ---- RMS norm ------------------------------------------------------------------------------------------------------

template <typename T>
void rms_norm(const T* x, const T* residual, const T* weight, T* out, T* sum, int64_t rows, int64_t size, float eps,
              int threads) {
    for_blocks(rows, rows * size, threads, [=](int64_t begin, int64_t end) {
        float scales[kBlock];
        for (int64_t row = begin; row < end; row++) {
            const int64_t first = row * size;
            T* total = residual ? sum + first : nullptr;
            scales[row - begin] = inverse_rms(x + first, residual ? residual + first : nullptr, total, size, eps);
        }
        for (int64_t row = begin; row < end; row++) {
            const T* normed = (residual ? sum : x) + row * size;
            T* y = out + row * size;
            const float scale = scales[row - begin];
            for_vectors(size, [=](int64_t i, auto count) {
                store(y + i, count, round_as(x, load(normed + i, count) * scale) * load(weight + i, count));
            });
        }
    });
}

// ---- rotary embedding ----------------------------------------------------------------------------------------------

// One head: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), times `scale` and `weight` first where there is a norm.
// `out` may be x.
template <typename T>
void rotate_head(const T* x, T* out, const T* cos, const T* sin, const T* weight, float scale, int64_t half) {
    for_vectors(half, [=](int64_t i, auto count) {
        auto x1 = load(x + i, count), x2 = load(x + half + i, count);
        if (weight) {
            x1 = round_as(x, round_as(x, x1 * scale) * load(weight + i, count));
            x2 = round_as(x, round_as(x, x2 * scale) * load(weight + half + i, count));
        }
        const auto c = load(cos + i, count), s = load(sin + i, count);
        store(out + i, count, round_as(x, x1 * c) - round_as(x, x2 * s));
        store(out + half + i, count, round_as(x, x2 * c) + round_as(x, x1 * s));
    });
}

template <typename T>
void rope(const T* qkv, T* rotated_qkv, const int64_t* positions, const T* cos_sin, const T* q_norm, const T* k_norm,
          int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t max_positions, float eps,
          int threads) {
    const int64_t rotated = heads + kv_heads, stride = (heads + 2 * kv_heads) * head_dim, half = head_dim / 2;
    for_rows(tokens, tokens * stride, threads, [=](int64_t token) {
        const T* x = qkv + token * stride;
        T* out = rotated_qkv + token * stride;
        if (out != x) std::memcpy(out + rotated * head_dim, x + rotated * head_dim, kv_heads * head_dim * sizeof(T));
        const int64_t position = positions[token];
        if (position < 0 || position >= max_positions) {
            std::memset(out, 0xff, rotated * head_dim * sizeof(T));  // nan
            return;
        }
        const T *cos = cos_sin + position * head_dim, *sin = cos + half;
        for (int64_t begin = 0; begin < rotated; begin += kBlock) {
            const int64_t end = std::min(rotated, begin + kBlock);
            float scales[kBlock] = {};
            for (int64_t head = begin; q_norm && head < end; head++)
                scales[head - begin] = inverse_rms<T>(x + head * head_dim, nullptr, nullptr, head_dim, eps);
            for (int64_t head = begin; head < end; head++) {
                const T* weight = head < heads ? q_norm : k_norm;
                const int64_t first = head * head_dim;
                rotate_head(x + first, out + first, cos, sin, weight, scales[head - begin], half);
            }
        }
    });
}

// ---- SwiGLU --------------------------------------------------------------------------------------------------------

template <typename T> void swiglu(const T* gate_up, T* out, int64_t rows, int64_t size, int threads) {
    for_rows(rows, rows * size, threads, [=](int64_t row) {
        const T *gate = gate_up + 2 * row * size, *up = gate + size;
        for_vectors(size, [&](int64_t i, auto count) {
            const auto g = load(gate + i, count);
            store(out + row * size + i, count, rounded_silu(gate, g, g * sigmoid(gate, g)) * load(up + i, count));
        });
    });
}

// ---- boxed ---------------------------------------------------------------------------------------------------------

template <typename T> void rms_norm_boxed(Args& args) {
    const T *x = args.pointer<T>(), *residual = args.pointer<T>(), *weight = args.pointer<T>();
    T *out = args.pointer<T>(), *sum = args.pointer<T>();
    const int64_t rows = args.integer(), size = args.integer();
    const float eps = args.real();
    rms_norm(x, residual, weight, out, sum, rows, size, eps, static_cast<int>(args.integer()));
}

template <typename T> void rope_boxed(Args& args) {
    const T* qkv = args.pointer<T>();
    T* out = args.pointer<T>();
    const int64_t* positions = args.pointer<int64_t>();
    const T *cos_sin = args.pointer<T>(), *q_norm = args.pointer<T>(), *k_norm = args.pointer<T>();
    const int64_t tokens = args.integer(), heads = args.integer(), kv_heads = args.integer();
    const int64_t head_dim = args.integer(), max_positions = args.integer();
    const float eps = args.real();
    const int threads = static_cast<int>(args.integer());
    rope(qkv, out, positions, cos_sin, q_norm, k_norm, tokens, heads, kv_heads, head_dim, max_positions, eps, threads);
}

template <typename T> void swiglu_boxed(Args& args) {
    const T* gate_up = args.pointer<T>();
    T* out = args.pointer<T>();
    const int64_t rows = args.integer(), size = args.integer();
    swiglu(gate_up, out, rows, size, static_cast<int>(args.integer()));
}

}  // namespace

// dtype, x, residual or null, weight, out, sum or null, rows, size, eps, threads
extern "C" void rms_norm(const int64_t* args) { by_dtype<rms_norm_boxed<float>, rms_norm_boxed<uint16_t>>(args); }

// dtype, qkv, out (may be qkv), positions, cos_sin, q_norm or null, k_norm or null, tokens, heads, kv_heads, head_dim,
// max_positions, eps, threads
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
