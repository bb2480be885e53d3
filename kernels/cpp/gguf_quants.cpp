// GGUF's blocks of codes: quantize and dequantize. Values, bytes and the search for a grid: kernels/gguf_quants.py, whose
// reference has the same functions and gives the same bytes.
//
// The order of every sum is fixed, one weight of a group after the other, so a vector holds the same place of kWidth
// blocks: a lane is a block. Nothing is reduced across lanes, and a result does not depend on the vectors' width.
#include <cmath>
#include <vector>

#include "row_vectors.h"

namespace {

using lowbit::Args;
using lowbit::parallel_for;

constexpr int64_t kSerialWork = 1 << 14;  // fewer weights than this are not worth a second thread
constexpr float kTiny = 1e-15f;           // a group whose largest number is below is a group of zeros

typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));

inline Floats floats(Ints v) { return __builtin_convertvector(v, Floats); }
inline Floats all(float value) { return Floats{} + value; }
inline Ints all(int value) { return Ints{} + value; }
inline Floats size_of(Floats v) { return floats_of(bits_of(v) & 0x7fffffff); }
inline Ints smaller(Ints v, int bound) { return v < bound ? v : all(bound); }
inline Ints clamp(Ints v, int low, int high) { return smaller(v > low ? v : all(low), high); }

// Half to even. Numbers beyond 2^22, inf and nan give what ggml's trick with the mantissa gives.
inline Ints nearest(Floats v) { return (Ints)(bits_of(v + 12582912.0f) & 0x007fffff) - 0x00400000; }

// A scale so small that its inverse is infinite gives codes 0.
inline Ints truncated(Floats v) { return __builtin_convertvector(size_of(v) < 256.0f ? v : Floats{}, Ints); }

inline Floats inverse_of(Floats d) { return d != 0.0f ? 1.0f / d : Floats{}; }

inline Floats square_root(Floats v) {
#if defined(__AVX512F__)
    return _mm512_sqrt_ps(v);
#else
    for (int lane = 0; lane < kWidth; lane++) v[lane] = std::sqrt(v[lane]);
    return v;
#endif
}

// ---- float16 -----------------------------------------------------------------------------------------------------

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Nearest, ties to even; inf above the largest.
inline uint16_t to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // subnormal: multiples of 2^-24, the last places of 0.5..1
        const float places = float_of(magnitude) + 0.5f;
        uint32_t rounded;
        std::memcpy(&rounded, &places, 4);
        return static_cast<uint16_t>(sign | (rounded - 0x3f000000));
    }
    return static_cast<uint16_t>(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

inline float from_half(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fff;
    if (magnitude < 0x400) return float_of(sign | 0x3f800000) * (static_cast<float>(magnitude) * 0x1p-24f);
    return float_of(sign | ((magnitude << 13) + (magnitude >= 0x7c00 ? 0x70000000 : 0x38000000)));
}

inline float load_half(const uint8_t* bytes) { return from_half(static_cast<uint16_t>(bytes[0] | bytes[1] << 8)); }

// ---- types -------------------------------------------------------------------------------------------------------

enum Type : int64_t { kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14 };

// Where things lie in a block of `size` weights and `bytes` bytes.
template <Type kType> struct Layout {
    static constexpr bool big = kType >= kQ4_K, offset = kType % 2 && !big;  // d q + m
    static constexpr int bits = kType <= kQ4_1 || kType == kQ4_K ? 4 : kType == kQ8_0 ? 8 : kType == kQ6_K ? 6 : 5;
    static constexpr int size = big ? 256 : 32;
    static constexpr int bytes = 2 + size / 8 * bits + (kType == kQ6_K ? 16 : big ? 14 : offset ? 2 : 0);
    static constexpr int levels = 1 << (bits - 1), most = (1 << bits) - 1;
    static constexpr int d = kType == kQ6_K ? 208 : 0, m = 2, scales = kType == kQ6_K ? 192 : 4;
    static constexpr int nibbles_distance = kType == kQ6_K ? 64 : big ? 32 : 16;
    static constexpr int high_distance = big ? 32 : 1;
    static constexpr int high = kType == kQ6_K ? 128 : big ? 16 : offset ? 4 : 2;
    static constexpr int nibbles = kType == kQ6_K ? 0 : high + (bits == 5 ? size / 8 : 0);
};

// kWidth blocks, place by place, and their bytes.
template <Type kType> struct Tile {
    using L = Layout<kType>;
    Floats x[L::size], weights[L::size];
    Ints codes[L::size];
    uint8_t out[kWidth][L::bytes];

    void put(int place, Ints byte) {
        for (int lane = 0; lane < kWidth; lane++) out[lane][place] = static_cast<uint8_t>(byte[lane]);
    }
    Floats put_half(int place, Floats value) {
        for (int lane = 0; lane < kWidth; lane++) {
            const uint16_t half = to_half(value[lane]);
            out[lane][place] = half & 255, out[lane][place + 1] = half >> 8, value[lane] = from_half(half);
        }
        return value;
    }
    // Each byte joins codes that are `distance` apart, `bits` of each.
    template <int bits, int distance> void pack(int place, int shift) {
        constexpr int together = 8 / bits;
        for (int run = 0; run < L::size; run += together * distance) {
            for (int j = 0; j < distance; j++) {
                Ints byte{};
                for (int part = 0; part < together; part++) {
                    byte |= (codes[run + part * distance + j] >> shift & ((1 << bits) - 1)) << bits * part;
                }
                put(place++, byte);
            }
        }
    }
    void put_codes() {
        pack<4, L::nibbles_distance>(L::nibbles, 0);
        if constexpr (L::bits > 4) pack<L::bits - 4, L::high_distance>(L::high, 4);
    }
};

// ---- search for a grid -------------------------------------------------------------------------------------------

// max |x|, and the first number of that size with its sign
template <int n> Floats largest(const Floats* x, Floats* extreme) {
    Floats size{};
    *extreme = Floats{};
    for (int i = 0; i < n; i++) {
        const Ints above = size_of(x[i]) > size;
        size = above ? size_of(x[i]) : size, *extreme = above ? x[i] : *extreme;
    }
    return size;
}

template <int n> void extremes(const Floats* x, Floats* low, Floats* top) {
    *low = *top = x[0];
    for (int i = 1; i < n; i++) *low = x[i] < *low ? x[i] : *low, *top = x[i] > *top ? x[i] : *top;
}

// scale of scale * (code - levels), codes in 0..2 levels - 1
template <int n, int levels> Floats fit_symmetric(const Floats* x, const Floats* weights, Ints* codes) {
    Floats extreme, sum_xl, sum_ll;
    const Ints zeros = largest<n>(x, &extreme) < kTiny;
    const auto fit = [&](Floats inverse) {
        sum_xl = sum_ll = Floats{};
        for (int i = 0; i < n; i++) {
            const Floats code = floats(clamp(nearest(inverse * x[i]), -levels, levels - 1));
            sum_xl += weights[i] * x[i] * code, sum_ll += weights[i] * code * code;
        }
    };
    Floats inverse = -static_cast<float>(levels) / extreme;
    fit(inverse);
    Floats scale = sum_ll != 0.0f ? sum_xl / sum_ll : Floats{}, best = scale * sum_xl;
    for (int step = -9; step <= 9; step++) {
        if (step == 0) continue;
        const Floats trial = -(levels + 0.1f * step) / extreme;
        fit(trial);
        const Ints better = (sum_ll > 0.0f) & (sum_xl * sum_xl > best * sum_ll);
        inverse = better ? trial : inverse, scale = better ? sum_xl / sum_ll : scale;
        best = better ? scale * sum_xl : best;
    }
    for (int i = 0; i < n; i++) {
        const Ints code = clamp(nearest(inverse * x[i]), -levels, levels - 1) + levels;
        codes[i] = zeros ? Ints{} : code;
    }
    return zeros ? Floats{} : scale;
}

struct Grids {
    float first, step;
    int count;
};
constexpr Grids kWithImportance = {-0.9f, 0.05f, 36};

// scale and offset `low` <= 0 of scale * code + low, codes in 0..most of 32 weights
template <int most> Floats fit_affine(const Floats* x, const Floats* weights, Grids grids, Floats* lows, Ints* codes) {
    constexpr int n = 32;
    Floats low, top, trial[n], sum_w = weights[0], sum_x = weights[0] * x[0];
    extremes<n>(x, &low, &top);
    for (int i = 1; i < n; i++) sum_w += weights[i], sum_x += weights[i] * x[i];
    low = low > 0.0f ? Floats{} : low;
    const Ints flat = top == low;
    const Floats floor = low;
    const auto error_of = [&](Floats scale, Floats low) {
        Floats sum{};
        for (int i = 0; i < n; i++) {
            const Floats difference = scale * trial[i] + low - x[i];
            sum += weights[i] * (difference * difference);
        }
        return sum;
    };
    const auto code_of = [&](int i, Floats inverse, Floats low) {
        return clamp(nearest(inverse * (x[i] - low)), 0, most);
    };
    Floats inverse = static_cast<float>(most) / (top - low), scale = 1.0f / inverse;
    for (int i = 0; i < n; i++) trial[i] = floats(code_of(i, inverse, low));
    Floats best = error_of(scale, low), chosen_inverse = inverse, chosen_low = low;
    for (int s = 0; s <= grids.count; s++) {
        inverse = (grids.first + grids.step * s + most) / (top - low);
        Floats sum_l{}, sum_ll{}, sum_xl{};
        for (int i = 0; i < n; i++) {
            const Floats code = trial[i] = floats(code_of(i, inverse, low)), weighted = weights[i] * code;
            sum_l += weighted, sum_ll += weighted * code, sum_xl += weighted * x[i];
        }
        const Floats determinant = sum_w * sum_ll - sum_l * sum_l;
        Floats trial_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
        Floats trial_low = (sum_ll * sum_x - sum_l * sum_xl) / determinant;
        const Ints above = trial_low > 0.0f;
        trial_scale = above ? sum_xl / sum_ll : trial_scale, trial_low = above ? Floats{} : trial_low;
        const Floats error = error_of(trial_scale, trial_low);
        const Ints better = (determinant > 0.0f) & (error < best);
        chosen_inverse = better ? inverse : chosen_inverse, chosen_low = better ? low : chosen_low;
        best = better ? error : best, scale = better ? trial_scale : scale, low = better ? trial_low : low;
    }
    for (int i = 0; i < n; i++) codes[i] = flat ? Ints{} : code_of(i, chosen_inverse, chosen_low);
    *lows = flat ? floor : low;
    return flat ? Floats{} : scale;
}

// scale and codes in 0..63 of 8 numbers >= 0
Floats fit_positive(const Floats* x, const Floats* weights, Ints* codes) {
    constexpr int n = 8, most = 63;
    Floats top{};
    for (int i = 0; i < n; i++) top = top > x[i] ? top : x[i];
    const auto error_of = [&](Floats inverse, auto code_of) {
        const Floats scale = 1.0f / inverse;
        Floats sum{};
        for (int i = 0; i < n; i++) {
            const Floats difference = x[i] - scale * floats(code_of(nearest(inverse * x[i])));
            sum += weights[i] * difference * difference;
        }
        return sum;
    };
    Floats inverse = static_cast<float>(most) / top;
    Floats best = error_of(inverse, [](Ints code) { return code & 255; });
    for (int step = -4; step <= 4; step++) {
        if (step == 0) continue;
        const Floats trial = (0.1f * step + most) / top;
        const Floats error = error_of(trial, [](Ints code) { return smaller(code, most); });
        const Ints better = error < best;
        best = better ? error : best, inverse = better ? trial : inverse;
    }
    Floats sum_xl{}, sum_ll{};
    for (int i = 0; i < n; i++) {
        const Ints code = smaller(nearest(inverse * x[i]), most);
        sum_xl += weights[i] * x[i] * floats(code), sum_ll += weights[i] * floats(code) * floats(code);
        codes[i] = code & 255;
    }
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < n; i++) {
            const Floats code = floats(codes[i]), weighted = weights[i] * x[i];
            const Floats rest_xl = sum_xl - weighted * code, rest_ll = sum_ll - weights[i] * code * code;
            const Ints moved = smaller(nearest(x[i] * rest_ll / rest_xl), most);
            const Floats xl = rest_xl + weighted * floats(moved);
            const Floats ll = rest_ll + weights[i] * floats(moved) * floats(moved);
            const Ints usable = (rest_xl > 0.0f) & (rest_ll > 0.0f) & (moved != codes[i]);
            const Ints better = usable & (xl * xl * sum_ll > sum_xl * sum_xl * ll);
            codes[i] = better ? moved & 255 : codes[i], sum_xl = better ? xl : sum_xl, sum_ll = better ? ll : sum_ll;
        }
    }
    const Ints zeros = top < kTiny;
    for (int i = 0; i < n; i++) codes[i] = zeros ? Ints{} : codes[i];
    return zeros | ~(sum_ll > 0.0f) ? Floats{} : sum_xl / sum_ll;
}

// ---- encode ------------------------------------------------------------------------------------------------------

template <Type kType> void encode_plain(Tile<kType>& tile) {
    using L = Layout<kType>;
    Floats low, top, extreme;
    if constexpr (kType == kQ8_0) {
        const Floats d = largest<32>(tile.x, &extreme) / 127.0f, inverse = inverse_of(d);
        tile.put_half(L::d, d);
        for (int i = 0; i < 32; i++) {
            const Floats scaled = tile.x[i] * inverse;
            const Ints whole = truncated(scaled);  // half away from zero
            tile.put(2 + i, whole + truncated(2.0f * (scaled - floats(whole))));
        }
    } else if constexpr (L::offset) {
        extremes<32>(tile.x, &low, &top);
        const Floats d = (top - low) / static_cast<float>(L::most), inverse = inverse_of(d);
        tile.put_half(L::d, d), tile.put_half(L::m, low);
        for (int i = 0; i < 32; i++) {
            tile.codes[i] = smaller(truncated((tile.x[i] - low) * inverse + 0.5f), L::most);
        }
    } else {
        largest<32>(tile.x, &extreme);
        const Floats d = extreme / -static_cast<float>(L::levels), inverse = inverse_of(d);
        tile.put_half(L::d, d);
        for (int i = 0; i < 32; i++) {
            tile.codes[i] = smaller(truncated(tile.x[i] * inverse + (L::levels + 0.5f)), L::most);
        }
    }
}

// tile.weights: importance; mean_square: that of the row
template <Type kType> void encode_searched(Tile<kType>& tile, Floats mean_square) {
    using L = Layout<kType>;
    for (int i = 0; i < 32; i++) tile.weights[i] *= square_root(mean_square + tile.x[i] * tile.x[i]);
    if constexpr (L::offset) {
        Floats low;
        tile.put_half(L::d, fit_affine<L::most>(tile.x, tile.weights, kWithImportance, &low, tile.codes));
        tile.put_half(L::m, low);
    } else {
        tile.put_half(L::d, fit_symmetric<32, L::levels>(tile.x, tile.weights, tile.codes));
    }
}

// The shifts act on bytes, as in ggml, where a number of more than 6 bits came in.
void pack_scales(Ints* s, Ints* t, Ints* packed) {
    for (int i = 0; i < 4; i++) {
        packed[i] = (s[i] | s[i + 4] >> 4 << 6) & 255, packed[i + 4] = (t[i] | t[i + 4] >> 4 << 6) & 255;
        packed[i + 8] = (s[i + 4] & 15) | (t[i + 4] & 15) << 4;
    }
    for (int i = 0; i < 4; i++) {
        s[i] = packed[i] & 63, t[i] = packed[i + 4] & 63;
        s[i + 4] = (packed[i + 8] & 15) | packed[i] >> 6 << 4, t[i + 4] = packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4;
    }
}

Floats scales_by_largest(const Floats* v, Ints* codes) {
    Floats top{};
    for (int i = 0; i < 8; i++) top = v[i] > top ? v[i] : top;
    const Floats inverse = top > 0.0f ? 63.0f / top : Floats{};
    for (int i = 0; i < 8; i++) codes[i] = smaller(nearest(inverse * v[i]) & 255, 63);
    return top / 63.0f;
}

template <Type kType> void encode_affine_k(Tile<kType>& tile, bool importance) {
    using L = Layout<kType>;
    constexpr Grids plain = kType == kQ4_K ? Grids{-1.0f, 0.1f, 20} : Grids{-0.5f, 0.1f, 15};
    Floats scales[8], lows[8], sums[8], block_square{};
    Ints s[8], t[8], packed[12];
    for (int i = 0; i < 256; i++) block_square += tile.x[i] * tile.x[i];
    const Floats mean_square = 2.0f * block_square / 256.0f;
    for (int group = 0; group < 8; group++) {
        const Floats* x = tile.x + 32 * group;
        Floats* weights = tile.weights + 32 * group;
        Floats group_square{}, sum{};
        for (int i = 0; i < 32; i++) group_square += x[i] * x[i];
        const Floats rms = square_root(group_square / 32.0f);
        for (int i = 0; i < 32; i++) {
            weights[i] = importance ? weights[i] * square_root(mean_square + x[i] * x[i]) : rms + size_of(x[i]);
            sum += weights[i];
        }
        const Grids grids = importance ? kWithImportance : plain;
        scales[group] = fit_affine<L::most>(x, weights, grids, &lows[group], tile.codes + 32 * group);
        lows[group] = -lows[group], sums[group] = sum;
    }
    Floats d = importance ? fit_positive(scales, sums, s) : scales_by_largest(scales, s);
    Floats m = importance ? fit_positive(lows, sums, t) : scales_by_largest(lows, t);
    if (kType == kQ5_K) {
        for (int i = 0; i < 8; i++) s[i] = smaller(s[i], 63), t[i] = smaller(t[i], 63);
    }
    pack_scales(s, t, packed);
    for (int i = 0; i < 12; i++) tile.put(L::scales + i, packed[i]);
    d = tile.put_half(L::d, d), m = tile.put_half(L::m, m);
    for (int i = 0; i < 256; i++) {
        const Floats scale = d * floats(s[i / 32]);
        const Ints stored = clamp(nearest((tile.x[i] + m * floats(t[i / 32])) / scale), 0, L::most);
        tile.codes[i] = scale != 0.0f ? stored : tile.codes[i];
    }
}

void encode_q6_k(Tile<kQ6_K>& tile, bool importance) {
    using L = Layout<kQ6_K>;
    Floats scales[16], size{}, extreme{};
    for (int i = 0; i < 256 && !importance; i++) tile.weights[i] = tile.x[i] * tile.x[i];
    for (int group = 0; group < 16; group++) {
        const int first = 16 * group;
        scales[group] = fit_symmetric<16, 32>(tile.x + first, tile.weights + first, tile.codes + first);
    }
    size = largest<16>(scales, &extreme);
    const Ints zeros = size < kTiny;
    const Floats inverse = -128.0f / extreme;
    const Floats d = tile.put_half(L::d, zeros ? Floats{} : 1.0f / inverse);
    for (int i = 0; i < 16; i++) {
        const Ints s = zeros ? Ints{} : smaller(nearest(inverse * scales[i]), 127) << 24 >> 24;
        tile.put(L::scales + i, s);
        const Floats scale = d * floats(s);
        for (int j = 16 * i; j < 16 * i + 16; j++) {
            const Ints stored = clamp(nearest(tile.x[j] / scale), -32, 31) + 32;
            tile.codes[j] = zeros ? Ints{} : scale != 0.0f ? stored : tile.codes[j];
        }
    }
}

template <Type kType> void encode(Tile<kType>& tile, bool importance, Floats mean_square) {
    if constexpr (kType == kQ6_K) encode_q6_k(tile, importance);
    else if constexpr (Layout<kType>::big) encode_affine_k(tile, importance);
    else if (importance && kType != kQ8_0) encode_searched(tile, mean_square);
    else encode_plain(tile);
    if constexpr (kType != kQ8_0) tile.put_codes();
}

float mean_square_of(const float* row, int64_t cols) {
    float sum = 0;
    for (int64_t i = 0; i < cols; i++) sum += row[i] * row[i];
    return sum / static_cast<float>(cols);
}

template <Type kType>
void quantize(const float* weights, const float* importance, int64_t rows, int64_t cols, uint8_t* out, int64_t threads) {
    using L = Layout<kType>;
    const int64_t blocks_per_row = cols / L::size, blocks = rows * blocks_per_row;
    std::vector<float> mean_squares(importance && !L::big ? rows : 0);
    threads = rows * cols > kSerialWork ? threads : 1;
    parallel_for(static_cast<int64_t>(mean_squares.size()), threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) mean_squares[row] = mean_square_of(weights + row * cols, cols);
    });
    parallel_for((blocks + kWidth - 1) / kWidth, threads, [&](int64_t begin, int64_t end) {
        thread_local Tile<kType> tile;
        for (int64_t first = begin * kWidth; first < std::min(end * kWidth, blocks); first += kWidth) {
            Floats mean_square{};
            for (int lane = 0; lane < kWidth; lane++) {
                const int64_t block = std::min(first + lane, blocks - 1);  // lanes past the end repeat the last block
                const float* source = weights + block * L::size;
                for (int i = 0; i < L::size; i++) tile.x[i][lane] = source[i];
                if (!importance) continue;
                source = importance + block % blocks_per_row * L::size;
                for (int i = 0; i < L::size; i++) tile.weights[i][lane] = source[i];
                if (!L::big) mean_square[lane] = mean_squares[block / blocks_per_row];
            }
            encode(tile, importance != nullptr, mean_square);
            std::memcpy(out + first * L::bytes, tile.out, std::min<int64_t>(kWidth, blocks - first) * L::bytes);
        }
    });
}

// ---- decode ------------------------------------------------------------------------------------------------------

// Parts of codes that lie as Tile::pack puts them.
template <int bits, int distance, int size> void unpack(const uint8_t* bytes, int shift, uint8_t* codes) {
    constexpr int together = 8 / bits;
    for (int run = 0; run < size; run += together * distance, bytes += distance) {
        for (int part = 0; part < together; part++) {
            for (int j = 0; j < distance; j++) {
                codes[run + part * distance + j] |= (bytes[j] >> bits * part & ((1 << bits) - 1)) << shift;
            }
        }
    }
}

template <Type kType> void decode_group(const uint8_t* block, const uint8_t* codes, int group, float* out) {
    using L = Layout<kType>;
    constexpr int n = kType == kQ6_K ? 16 : 32;
    float scale = load_half(block + L::d), low = 0;
    if constexpr (L::offset) low = load_half(block + L::m);
    if constexpr (kType == kQ6_K) scale *= static_cast<int8_t>(block[L::scales + group]);
    if constexpr (kType == kQ4_K || kType == kQ5_K) {
        const uint8_t *first = block + L::scales + group % 4, *second = first + 4, *last = first + 8;
        const int s = group < 4 ? *first & 63 : (*last & 15) | *first >> 6 << 4;
        const int t = group < 4 ? *second & 63 : *last >> 4 | *second >> 6 << 4;
        scale *= s, low = -(load_half(block + L::m) * t);
    }
    constexpr bool affine = L::offset || kType == kQ4_K || kType == kQ5_K;
    for (int i = 0; i < n; i++) {
        if constexpr (affine) out[i] = scale * codes[i] + low;
        else out[i] = scale * (codes[i] - L::levels);
    }
}

template <Type kType> void dequantize(const uint8_t* data, int64_t blocks, float* out, int64_t threads) {
    using L = Layout<kType>;
    constexpr int n = kType == kQ6_K ? 16 : 32;
    parallel_for(blocks, blocks * L::size > kSerialWork ? threads : 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const uint8_t* block = data + i * L::bytes;
            uint8_t codes[L::size] = {};
            if constexpr (kType == kQ8_0) {
                for (int j = 0; j < 32; j++) codes[j] = block[2 + j] ^ 128;  // as 0..255, like the others' codes
            } else {
                unpack<4, L::nibbles_distance, L::size>(block + L::nibbles, 0, codes);
                if constexpr (L::bits > 4) unpack<L::bits - 4, L::high_distance, L::size>(block + L::high, 4, codes);
            }
            for (int g = 0; g < L::size / n; g++) decode_group<kType>(block, codes + g * n, g, out + i * L::size + g * n);
        }
    });
}

template <typename F> void with_type(int64_t type, F f) {
    switch (type) {
        case kQ4_0: return f(std::integral_constant<Type, kQ4_0>{});
        case kQ4_1: return f(std::integral_constant<Type, kQ4_1>{});
        case kQ5_0: return f(std::integral_constant<Type, kQ5_0>{});
        case kQ5_1: return f(std::integral_constant<Type, kQ5_1>{});
        case kQ8_0: return f(std::integral_constant<Type, kQ8_0>{});
        case kQ4_K: return f(std::integral_constant<Type, kQ4_K>{});
        case kQ5_K: return f(std::integral_constant<Type, kQ5_K>{});
        case kQ6_K: return f(std::integral_constant<Type, kQ6_K>{});
    }
}

}  // namespace

// weights [rows, cols] float32, importance [cols] float32 or 0, rows, cols, ggml's number of the type, out, threads
extern "C" void gguf_quantize(const int64_t* boxed) {
    Args args(boxed);
    const float *weights = args.pointer<const float>(), *importance = args.pointer<const float>();
    const int64_t rows = args.integer(), cols = args.integer(), type = args.integer();
    uint8_t* out = args.pointer<uint8_t>();
    const int64_t threads = args.integer();
    with_type(type, [&](auto kind) { quantize<decltype(kind)::value>(weights, importance, rows, cols, out, threads); });
}

// data, number of blocks, ggml's number of the type, out float32, threads
extern "C" void gguf_dequantize(const int64_t* boxed) {
    Args args(boxed);
    const uint8_t* data = args.pointer<const uint8_t>();
    const int64_t blocks = args.integer(), type = args.integer();
    float* out = args.pointer<float>();
    const int64_t threads = args.integer();
    with_type(type, [&](auto kind) { dequantize<decltype(kind)::value>(data, blocks, out, threads); });
}
