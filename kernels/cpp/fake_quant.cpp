// Quantize and dequantize in one pass, and the gradient through it: kernels/fake_quant.py.
//
// A tensor is num_groups rows of group_size values, each row with a scale and a range of codes of its own. Groups are
// short (32 values are two AVX512 vectors), so a group is read from memory once and from the L1 cache afterwards. Loops
// are plain and of fixed length where the length is a usual one: GCC and clang make vectors of them on any processor.
// Every element is computed alone by correctly rounded operations, and sums run in kLanes partial sums that are folded in
// one order, so the bits depend neither on the width of vectors nor on the number of threads.

#include "lowbit.h"

namespace {

using lowbit::Args;

constexpr int64_t kSerialWork = 1 << 14;  // some 5 us on one Zen 4 core; less is not worth waking a thread for
constexpr int kLanes = 16;                // partial sums of a group
constexpr float kRounding = 12582912;     // 1.5 * 2^23: adding it rounds to an integer, ties to even, below 2^22

struct Grid {  // w' = clamp(round(w / scale), lowest, highest) * scale; a zero point is in the bounds
    float scale, lowest, highest;
};

inline int32_t bits_of(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float float_of(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// As lowbit::store, for a value whose nan has the lower half of its bits clear: without a branch, so that it vectorizes.
inline void put(float* p, float value) { *p = value; }
inline void put(uint16_t* p, float value) {
    const uint32_t bits = bits_of(value);
    *p = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Nearest float16, ties to even, infinity from 65520 on.
inline float round_float16(float value) {  // value >= 0
    if (value < 6.103515625e-05f) return (value + 0.75f) - 0.75f;  // subnormal: steps of 2^-24, which is 0.75's
    const int32_t bits = bits_of(value);
    const float rounded = float_of((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fff);
    return rounded > 65504.0f ? float_of(0x7f800000) : rounded;
}

inline float round_scale(float scale, int64_t dtype) {
    if (dtype == lowbit::kBFloat16) return lowbit::from_bfloat16(lowbit::to_bfloat16(scale));
    return dtype == lowbit::kFloat16 ? round_float16(scale) : scale;
}

inline float clamp(float value, float lowest, float highest) {
    value = value < lowest ? lowest : value;
    return value > highest ? highest : value;
}

// The unclamped code, or one step outside of the bounds.
inline float code_of(float ratio, Grid grid) {
    return (clamp(ratio, grid.lowest - 1, grid.highest + 1) + kRounding) - kRounding;
}

// The scale from what the group holds. nan if it holds inf or nan.
struct FromRange {
    bool symmetric;
    float quant_min, quant_max, divisor;
    int64_t scale_dtype;

    template <typename T> Grid operator()(const T* x, int64_t, int64_t size) const {
        int32_t largest = 0;  // |x| as bits, which sort like the numbers, with inf and nan on top
        float low = 0, high = 0;
        if (symmetric) {
#pragma omp simd reduction(max : largest)
            for (int64_t i = 0; i < size; i++) {
                const int32_t bits = bits_of(lowbit::load(x + i)) & 0x7fffffff;
                largest = bits > largest ? bits : largest;
            }
            high = float_of(largest);
        } else {
#pragma omp simd reduction(max : largest, high) reduction(min : low)
            for (int64_t i = 0; i < size; i++) {
                const float value = lowbit::load(x + i);
                const int32_t bits = bits_of(value) & 0x7fffffff;
                largest = bits > largest ? bits : largest;
                low = value < low ? value : low;
                high = value > high ? value : high;
            }
        }
        if (largest >= 0x7f800000) return {float_of(0x7fc00000), quant_min, quant_max};
        const float scale = scale_of(low, high);
        if (symmetric) return {scale, quant_min, quant_max};
        const float zero = clamp((clamp(-low / scale, -1, 16) + kRounding) - kRounding, quant_min, quant_max);
        return {scale, quant_min - zero, quant_max - zero};
    }

    float scale_of(float low, float high) const {
        const float scale = round_scale((high - low) / divisor, scale_dtype);
        return scale > 0 ? scale : 1.0f;
    }
};

// The scale is a parameter.
struct FromScales {
    const float* scales;
    const uint8_t* zeros;
    float quant_min, quant_max;

    template <typename T> Grid operator()(const T*, int64_t group, int64_t) const {
        const float zero = zeros ? zeros[group] : 0, scale = scales[group];
        return {scale > 0 ? scale : float_of(0x7fc00000), quant_min - zero, quant_max - zero};
    }
};

// body(group, grid, size) for every group; `size` is a constant where it is a usual one.
template <typename T, typename Source, typename Body>
void for_groups(const T* x, int64_t num_groups, int64_t group_size, const Source& source, int64_t threads, Body body) {
    const auto sized = [&](auto size) {
        const int64_t workers = num_groups * group_size > kSerialWork ? threads : 1;
        lowbit::parallel_for(num_groups, workers, [&](int64_t begin, int64_t end) {
            for (int64_t group = begin; group < end; group++) body(group, source(x + group * size, group, size), size);
        });
    };
    if (group_size == 32) sized(std::integral_constant<int64_t, 32>{});
    else if (group_size == 64) sized(std::integral_constant<int64_t, 64>{});
    else if (group_size == 128) sized(std::integral_constant<int64_t, 128>{});
    else sized(group_size);
}

template <typename T, typename Source>
void forward(const T* x, T* out, int64_t num_groups, int64_t group_size, const Source& source, int64_t threads) {
    for_groups(x, num_groups, group_size, source, threads, [=](int64_t group, Grid grid, auto size) {
        const T* from = x + group * size;
        T* to = out + group * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            const float value = lowbit::load(from + i);
            const float code = (clamp(value / grid.scale, grid.lowest, grid.highest) + kRounding) - kRounding;
            put(to + i, code * grid.scale + (value - value));  // clamping would hide an infinity
        }
    });
}

// grad_x is grad where the code was not clamped and 0 elsewhere; it may be grad itself.
template <typename T, typename Source>
void backward(const T* x, const T* grad, T* grad_x, int64_t num_groups, int64_t group_size, const Source& source,
              int64_t threads) {
    for_groups(x, num_groups, group_size, source, threads, [=](int64_t group, Grid grid, auto size) {
        const int64_t first = group * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            const float code = code_of(lowbit::load(x + first + i) / grid.scale, grid);
            const T g = grad[first + i];
            grad_x[first + i] = code < grid.lowest || code > grid.highest ? T{0} : g;
        }
    });
}

template <typename T>
void learned_backward(const T* x, const T* grad, T* grad_x, float* grad_scales, int64_t num_groups, int64_t group_size,
                      float factor, const FromScales& source, int64_t threads) {
    for_groups(x, num_groups, group_size, source, threads, [=](int64_t group, Grid grid, auto size) {
        const int64_t first = group * size;
        float sums[kLanes] = {};
        const auto add = [&](int64_t i, int lane) {
            const float ratio = lowbit::load(x + first + i) / grid.scale, g = lowbit::load(grad + first + i);
            const float code = code_of(ratio, grid);
            const bool clamped = code < grid.lowest || code > grid.highest;
            sums[lane] += g * (clamped ? clamp(code, grid.lowest, grid.highest) : code - ratio);
            grad_x[first + i] = clamped ? T{0} : grad[first + i];
        };
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) {
#pragma omp simd
            for (int lane = 0; lane < kLanes; lane++) add(i + lane, lane);
        }
        for (int lane = 0; lane < size - i; lane++) add(i + lane, lane);
        for (int width = kLanes / 2; width > 0; width /= 2) {
            for (int lane = 0; lane < width; lane++) sums[lane] += sums[lane + width];
        }
        grad_scales[group] = sums[0] * factor;
    });
}

FromRange range_of(Args& a) {
    FromRange source;
    source.symmetric = a.integer();
    source.quant_min = static_cast<float>(a.integer());
    source.quant_max = static_cast<float>(a.integer());
    source.divisor = a.real();
    source.scale_dtype = a.integer();
    return source;
}

FromScales scales_of(Args& a) {
    FromScales source;
    source.scales = a.pointer<float>();
    source.zeros = a.pointer<uint8_t>();
    source.quant_min = static_cast<float>(a.integer());
    source.quant_max = static_cast<float>(a.integer());
    return source;
}

// f(p) with p a null pointer to the element type.
template <typename F> void with_type(int64_t dtype, F f) {
    if (dtype == lowbit::kFloat32) f(static_cast<float*>(nullptr));
    else f(static_cast<uint16_t*>(nullptr));
}

template <typename Source> void run_forward(Args& a, Source (*read)(Args&)) {
    const int64_t dtype = a.integer(), num_groups = a.integer(), group_size = a.integer();
    void *x = a.pointer<void>(), *out = a.pointer<void>();
    const Source source = read(a);
    const int64_t threads = a.integer();
    with_type(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        forward(static_cast<const T*>(x), static_cast<T*>(out), num_groups, group_size, source, threads);
    });
}

}  // namespace

extern "C" void fake_quant(const int64_t* args) {
    Args a(args);
    run_forward<FromRange>(a, range_of);
}

extern "C" void fake_quant_learned(const int64_t* args) {
    Args a(args);
    run_forward<FromScales>(a, scales_of);
}

extern "C" void fake_quant_backward(const int64_t* args) {
    Args a(args);
    const int64_t dtype = a.integer(), num_groups = a.integer(), group_size = a.integer();
    void *x = a.pointer<void>(), *grad = a.pointer<void>(), *grad_x = a.pointer<void>();
    const FromRange source = range_of(a);
    const int64_t threads = a.integer();
    with_type(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        backward(static_cast<const T*>(x), static_cast<const T*>(grad), static_cast<T*>(grad_x), num_groups, group_size,
                 source, threads);
    });
}

extern "C" void fake_quant_learned_backward(const int64_t* args) {
    Args a(args);
    const int64_t dtype = a.integer(), num_groups = a.integer(), group_size = a.integer();
    void *x = a.pointer<void>(), *grad = a.pointer<void>(), *grad_x = a.pointer<void>();
    float* grad_scales = a.pointer<float>();
    const FromScales source = scales_of(a);
    const float factor = a.real();
    const int64_t threads = a.integer();
    with_type(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        learned_backward(static_cast<const T*>(x), static_cast<const T*>(grad), static_cast<T*>(grad_x), grad_scales,
                         num_groups, group_size, factor, source, threads);
    });
}
