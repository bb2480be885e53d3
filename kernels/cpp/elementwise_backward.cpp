// The gradients of kernels/{rms_norm,rope,swiglu}.py: computed in float32 from the tensors that forward read, rounded
// once. elementwise.h says how.
//
// The gradient of a norm's weight is a sum over rows. Rows are cut into chunks whose size the caller derives from the
// number of rows alone; a chunk sums its rows in order and the chunks are added in order, so that no bit depends on the
// number of threads. Results do not depend on the processor either, but for one: the gradient of SwiGLU in bfloat16,
// where AVX512 has a faster sigmoid.

#include <limits>

#include "elementwise.h"

namespace {

// f(begin, end, partial) for the rows of every chunk, with the chunk's zeroed sums [width]; without `partial`, for rows
// shared out evenly.
template <typename F>
void for_chunks(float* partial, int64_t width, int64_t rows, int64_t chunk_rows, int64_t work, int threads, F f) {
    if (work <= kSerialWork) threads = 1;
    if (!partial) {
        lowbit::parallel_for(rows, threads, [&](int64_t begin, int64_t end) { f(begin, end, nullptr); });
        return;
    }
    lowbit::parallel_for((rows + chunk_rows - 1) / chunk_rows, threads, [&](int64_t begin, int64_t end) {
        for (int64_t chunk = begin; chunk < end; chunk++) {
            float* sums = partial + chunk * width;
            std::memset(sums, 0, width * sizeof(float));
            f(chunk * chunk_rows, std::min(rows, (chunk + 1) * chunk_rows), sums);
        }
    });
}

// out = the sum of partial [chunks, width] over the chunks, from the first to the last. `segment` as the sums were
// made: for_vectors may have left a pair of vectors where it found it, elements 0, 2, 4.. before 1, 3, 5..
template <typename T>
void add_chunks(const float* partial, T* out, int64_t chunks, int64_t width, int64_t segment) {
    for (int64_t first = 0; first < width; first += segment) {
        for_vectors(segment, [=](int64_t i, auto count) {
            auto total = load(partial + first + i, count);
            for (int64_t chunk = 1; chunk < chunks; chunk++)
                total = total + load(partial + chunk * width + first + i, count);
            store(out + first + i, count, total);
        });
    }
}

template <typename Count, typename V> inline void add_to(float* sums, Count count, V value) {
    store(sums, count, load(sums, count) + value);
}

// ---- RMS norm ------------------------------------------------------------------------------------------------------

// grad_x = scale * (g - n mean(g n)) + add, with g = grad * weight and n = x * scale. `sums` += grad n, if any.
template <typename T>
void rms_norm_row(const T* grad, const T* x, const T* weight, const T* add, T* grad_x, float* sums, int64_t size,
                  float eps) {
    Floats squares[kVectors] = {}, products[kVectors] = {};
    for_lanes<T>(size, [&](int j, int64_t i, auto count) {
        const auto v = load(x + i, count);
        accumulate(squares, j, v * v);  // as inverse_rms does: forward's scale
        accumulate(products, j, load(grad + i, count) * load(weight + i, count) * v);
    });
    const float scale = 1.0f / std::sqrt(fold(squares) / static_cast<float>(size) + eps);
    const float mean = fold(products) * scale / static_cast<float>(size);
    for_vectors(size, [&](int64_t i, auto count) {
        const auto g = load(grad + i, count), normed = load(x + i, count) * scale;
        auto result = (g * load(weight + i, count) - normed * mean) * scale;
        if (add) result = result + load(add + i, count);
        store(grad_x + i, count, result);
        if (sums) add_to(sums + i, count, g * normed);
    });
}

template <typename T> void rms_norm_backward(Args& args) {
    const T *grad = args.pointer<T>(), *x = args.pointer<T>(), *weight = args.pointer<T>(), *add = args.pointer<T>();
    T *grad_x = args.pointer<T>(), *grad_weight = args.pointer<T>();
    float* partial = args.pointer<float>();
    const int64_t rows = args.integer(), size = args.integer(), chunk_rows = args.integer();
    const float eps = args.real();
    const int threads = static_cast<int>(args.integer());
    for_chunks(partial, size, rows, chunk_rows, rows * size, threads, [=](int64_t begin, int64_t end, float* sums) {
        for (int64_t first = begin * size; first < end * size; first += size)
            rms_norm_row(grad + first, x + first, weight, add ? add + first : nullptr, grad_x + first, sums, size, eps);
    });
    if (grad_weight) add_chunks(partial, grad_weight, (rows + chunk_rows - 1) / chunk_rows, size, size);
}

// ---- rotary embedding ----------------------------------------------------------------------------------------------

template <typename V> struct TwoHalves {
    V first, second;
};

// The gradient before the rotation: a rotation by minus the angle.
template <typename T, typename Count>
inline auto rotated_back(const T* grad, const T* cos, const T* sin, int64_t half, int64_t i, Count count) {
    const auto g1 = load(grad + i, count), g2 = load(grad + half + i, count);
    const auto c = load(cos + i, count), s = load(sin + i, count);
    return TwoHalves<decltype(g1 * c)>{g1 * c + g2 * s, g2 * c - g1 * s};
}

template <typename T> void rope_head(const T* grad, const T* cos, const T* sin, T* grad_x, int64_t half) {
    for_vectors(half, [=](int64_t i, auto count) {
        const auto g = rotated_back(grad, cos, sin, half, i, count);
        store(grad_x + i, count, g.first);
        store(grad_x + half + i, count, g.second);
    });
}

// The same, and through the norm before the rotation.
template <typename T>
void normed_rope_head(const T* grad, const T* cos, const T* sin, const T* x, const T* weight, T* grad_x, float* sums,
                      int64_t half, float eps) {
    const float scale = inverse_rms<T>(x, nullptr, nullptr, 2 * half, eps);
    Floats products[kVectors] = {};
    for_lanes<T>(half, [&](int j, int64_t i, auto count) {
        const auto g = rotated_back(grad, cos, sin, half, i, count);
        accumulate(products, j, g.first * load(weight + i, count) * load(x + i, count));
        accumulate(products, j, g.second * load(weight + half + i, count) * load(x + half + i, count));
    });
    const float mean = fold(products) * scale / static_cast<float>(2 * half);
    const auto finish = [&](auto g, int64_t i, auto count) {
        const auto normed = load(x + i, count) * scale;
        store(grad_x + i, count, (g * load(weight + i, count) - normed * mean) * scale);
        if (sums) add_to(sums + i, count, g * normed);
    };
    for_vectors(half, [&](int64_t i, auto count) {
        const auto g = rotated_back(grad, cos, sin, half, i, count);
        finish(g.first, i, count);
        finish(g.second, half + i, count);
    });
}

template <typename T> void rope_backward(Args& args) {
    const T* grad = args.pointer<T>();
    const int64_t* positions = args.pointer<int64_t>();
    const T *cos_sin = args.pointer<T>(), *qkv = args.pointer<T>(), *q_norm = args.pointer<T>();
    const T* k_norm = args.pointer<T>();
    T *grad_qkv = args.pointer<T>(), *grad_norms = args.pointer<T>();
    float* partial = args.pointer<float>();
    const int64_t tokens = args.integer(), heads = args.integer(), kv_heads = args.integer();
    const int64_t head_dim = args.integer(), max_positions = args.integer(), chunk_tokens = args.integer();
    const float eps = args.real();
    const int threads = static_cast<int>(args.integer());
    const int64_t rotated = heads + kv_heads, stride = (heads + 2 * kv_heads) * head_dim, half = head_dim / 2;
    const auto token_backward = [=](int64_t token, float* sums) {
        const T* g = grad + token * stride;
        T* out = grad_qkv + token * stride;
        std::memcpy(out + rotated * head_dim, g + rotated * head_dim, kv_heads * head_dim * sizeof(T));
        const int64_t position = positions[token];
        if (position < 0 || position >= max_positions) {  // nan, as forward
            std::memset(out, 0xff, rotated * head_dim * sizeof(T));
            if (sums) std::fill_n(sums, 2 * head_dim, std::numeric_limits<float>::quiet_NaN());
            return;
        }
        const T *cos = cos_sin + position * head_dim, *sin = cos + half;
        for (int64_t head = 0; head < rotated; head++) {
            const int64_t first = head * head_dim;
            if (!qkv) {
                rope_head(g + first, cos, sin, out + first, half);
                continue;
            }
            const bool is_q = head < heads;
            normed_rope_head(g + first, cos, sin, qkv + token * stride + first, is_q ? q_norm : k_norm, out + first,
                             sums && !is_q ? sums + head_dim : sums, half, eps);
        }
    };
    const int64_t width = 2 * head_dim;  // q's weight, k's weight
    for_chunks(partial, width, tokens, chunk_tokens, tokens * stride, threads,
               [=](int64_t begin, int64_t end, float* sums) {
                   for (int64_t token = begin; token < end; token++) token_backward(token, sums);
               });
    if (grad_norms) add_chunks(partial, grad_norms, (tokens + chunk_tokens - 1) / chunk_tokens, width, half);
}

// ---- SwiGLU --------------------------------------------------------------------------------------------------------

template <typename T> void swiglu_backward(Args& args) {
    const T *grad = args.pointer<T>(), *gate_up = args.pointer<T>();
    T *grad_gate_up = args.pointer<T>(), *out = args.pointer<T>();
    const int64_t rows = args.integer(), size = args.integer();
    for_rows(rows, rows * size, static_cast<int>(args.integer()), [=](int64_t row) {
        const T *g = grad + row * size, *gate = gate_up + 2 * row * size, *up = gate + size;
        T *grad_gate = grad_gate_up + 2 * row * size, *grad_up = grad_gate + size, *y = out + row * size;
        for_vectors(size, [=](int64_t i, auto count) {
            const auto v = load(gate + i, count), u = load(up + i, count), dy = load(g + i, count);
            const auto s = sigmoid(gate, v), silu = v * s;
            store(grad_gate + i, count, dy * u * (s + silu * (1.0f - s)));
            store(grad_up + i, count, dy * silu);
            if (out) store(y + i, count, rounded_silu(gate, v, silu) * u);
        });
    });
}

}  // namespace

// dtype, grad, x, weight, add or null, grad_x, grad_weight or null, partial [chunks, size] or null, rows, size,
// chunk_rows, eps, threads
extern "C" void rms_norm_backward(const int64_t* args) {
    by_dtype<rms_norm_backward<float>, rms_norm_backward<uint16_t>>(args);
}

// dtype, grad, positions, cos_sin, qkv or null where there is no norm, q_norm, k_norm, grad_qkv, grad_norms
// [2, head_dim] or null, partial [chunks, 2, head_dim] or null, tokens, heads, kv_heads, head_dim, max_positions,
// chunk_tokens, eps, threads
extern "C" void rope_backward(const int64_t* args) { by_dtype<rope_backward<float>, rope_backward<uint16_t>>(args); }

// dtype, grad, gate_up, grad_gate_up, out or null, rows, size, threads
extern "C" void swiglu_backward(const int64_t* args) {
    by_dtype<swiglu_backward<float>, swiglu_backward<uint16_t>>(args);
}
