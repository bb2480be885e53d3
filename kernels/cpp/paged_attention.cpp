// Paged KV cache on CPUs: storing keys and values, and attention over them. Formula, layouts and the contract of batch
// invariance are in kernels/paged_attention.py.
//
// A tile is the query heads of one KV head for some tokens of one sequence; a row is one head of one token. A tile
// walks the keys in chunks of kChunk, and inside a chunk goes through its rows in strips of at most kMaxRows, whose
// sums stay in registers: scores (keys in lanes), softmax, values (dimensions in lanes). A row's sums run over
// dimensions, or keys, in ascending order, each in a lane of its own. So strips, tiles and threads decide when a row is
// computed, never how, and a masked key is either left out or adds an exact zero.
//
// One source for all processors: vectors are the compiler's, as wide as the machine's; only the bfloat16 dot product is
// special. Where it is missing, keys are widened to float32 once for all rows of a tile.
#include "attention_vectors.h"

#include <algorithm>
#include <vector>

namespace {

using lowbit::Args;

constexpr int kGroup = 16;       // keys that lie side by side in a block; block_size is a multiple
constexpr int kChunk = 64;       // keys between two rescalings of the sums, at multiples of it from position 0
constexpr int kTileRows = 48;    // rows that share a pass over the keys
constexpr int kMaxHeadDim = 256;
constexpr int kMaxGroups = kChunk / kGroup;
// Fewer multiply-adds than this are done before a second thread wakes up.
[[maybe_unused]] constexpr int64_t kSerialWork = 1 << 18;

typedef int8_t Bytes __attribute__((vector_size(kLanes)));

Vector load_vector(const int8_t* p) {
#if defined(__AVX512F__)
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(p)));
#elif defined(__AVX2__)
    return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    return __builtin_convertvector(__builtin_convertvector(load_as<Bytes>(p), Ints), Vector);
#endif
}
float largest(Vector v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float result = v[0];
    for (int i = 1; i < kLanes; i++) result = std::max(result, v[i]);
    return result;
#endif
}

// 2^x for x <= 0, within 1.2 ulp; exactly 1 for 0, exactly 0 below 2^-125; nan stays nan. 2^fraction is a polynomial
// that is minimax in relative error (3e-9) on [-0.5, 0.5].
Vector exp2(Vector x) {
    const Vector floor = splat(-125.0f);
    const auto tiny = x < floor;
    const Vector clamped = tiny ? floor : x;
    const Vector shifted = clamped + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are x, rounded to an integer
    const Vector r = clamped - (shifted - 12582912.0f);
    Vector p = splat(0.00015353362f);
    p = multiply_add(p, r, splat(0.0013398874f));
    p = multiply_add(p, r, splat(0.009618437f));
    p = multiply_add(p, r, splat(0.055503324f));
    p = multiply_add(p, r, splat(0.24022648f));
    p = multiply_add(p, r, splat(0.6931472f));
    p = multiply_add(p, r, splat(1.0f));
    const Vector power = (Vector)(((Ints)shifted << 23) + (127 << 23));
    return tiny ? Vector{} : p * power;
}

// ---- dot products over head_dim: an element is 4 bytes, one dimension in float32 or a pair in bfloat16 -----------

struct FloatDot {
    using Element = float;
    using Sum = Vector;
    static constexpr int kPair = 1;
    static Sum add(Sum sum, const Element* keys, Element q) { return multiply_add(splat(q), load_vector(keys), sum); }
};

#if defined(__AVX512BF16__)
#define LOWBIT_PAIR_DOT
struct PairDot {
    using Element = uint32_t;
    using Sum = Vector;
    static constexpr int kPair = 2;
    static Sum add(Sum sum, const Element* keys, Element q) {
        return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(keys),
                                        (__m512bh)_mm512_set1_epi32(static_cast<int>(q)));
    }
};
#endif

// All loops over rows and vectors are unrolled, those before and after the long loop too: with one left, GCC 12 keeps a
// copy of the sums in memory and stores to it at every step, which takes 1.8 times as long.

// out[row][vector] = q . k over `steps` elements. q [steps][kRows]; keys: a pointer for each vector, `stride` elements
// from one step to the next.
template <class Dot, int kRows, int kVectors>
void strip_scores(const typename Dot::Element* q, const typename Dot::Element* const* keys, int64_t stride,
                  int64_t steps, float* out) {
    Vector sums[kRows][kVectors] = {};
    const typename Dot::Element* at[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) at[v] = keys[v];
    for (int64_t step = 0; step < steps; step++) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; v++) {
#pragma GCC unroll 8
            for (int r = 0; r < kRows; r++) {
                sums[r][v] = Dot::add(sums[r][v], at[v] + step * stride, q[step * kRows + r]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; v++) store_vector(out + r * kChunk + v * kLanes, sums[r][v]);
    }
}

// out[row][...] = out * rescale[row] + weights[row] . v over keys begin .. end of a chunk, for kVectors vectors of
// dimensions. weights [kRows][kChunk]; values: a pointer for each group of keys, `width` from one key to the next.
template <typename Value, int kRows, int kVectors>
void strip_values(const float* weights, const float* rescale, const Value* const* values, int64_t column, int64_t width,
                  int begin, int end, float* out) {
    Vector sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; v++) {
            sums[r][v] = load_vector(out + r * width + column + v * kLanes) * splat(rescale[r]);
        }
    }
    for (int key = begin; key < end;) {
        const int stop = std::min(end, (key / kGroup + 1) * kGroup);
        const Value* at = values[key / kGroup] + key % kGroup * width + column;
        for (; key < stop; key++, at += width) {
            Vector value[kVectors];
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; v++) value[v] = load_vector(at + v * kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; r++) {
                const Vector weight = splat(weights[r * kChunk + key]);
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; v++) sums[r][v] = multiply_add(weight, value[v], sums[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; v++) store_vector(out + r * width + column + v * kLanes, sums[r][v]);
    }
}

template <class Dot, int kRows>
void row_scores(const typename Dot::Element* q, const typename Dot::Element* const* keys, int64_t stride, int64_t steps,
                int num_vectors, float* out) {
    for (; num_vectors > 0; num_vectors -= kMaxVectors, keys += kMaxVectors, out += kMaxVectors * kLanes) {
        if constexpr (kMaxVectors == 4) {
            if (num_vectors == 3) strip_scores<Dot, kRows, 3>(q, keys, stride, steps, out);
            if (num_vectors >= 4) strip_scores<Dot, kRows, 4>(q, keys, stride, steps, out);
        } else if (num_vectors > 2) {
            strip_scores<Dot, kRows, 2>(q, keys, stride, steps, out);
        }
        if (num_vectors == 1) strip_scores<Dot, kRows, 1>(q, keys, stride, steps, out);
        if (num_vectors == 2) strip_scores<Dot, kRows, 2>(q, keys, stride, steps, out);
    }
}

template <typename Value, int kRows>
void row_values(const float* weights, const float* rescale, const Value* const* values, int64_t width, int begin,
                int end, float* out) {
    for (int64_t column = 0; column < width;) {
        const int64_t left = (width - column) / kLanes;
        const int vectors = static_cast<int>(std::min<int64_t>(left, kMaxVectors));
        const auto run = vectors >= 4   ? strip_values<Value, kRows, kMaxVectors>
                         : vectors == 3 ? strip_values<Value, kRows, std::min(3, kMaxVectors)>
                         : vectors == 2 ? strip_values<Value, kRows, 2>
                                        : strip_values<Value, kRows, 1>;
        run(weights, rescale, values, column, width, begin, end, out);
        column += vectors * kLanes;
    }
}

template <class Dot, typename... Rest> void scores(int rows, const typename Dot::Element* q, Rest... rest) {
    switch (rows) {
        case 1: return row_scores<Dot, 1>(q, rest...);
        case 2: return row_scores<Dot, 2>(q, rest...);
        case 3: return row_scores<Dot, 3>(q, rest...);
        case 4: return row_scores<Dot, 4>(q, rest...);
        case 5: return row_scores<Dot, std::min(5, kMaxRows)>(q, rest...);
        default: return row_scores<Dot, kMaxRows>(q, rest...);
    }
}

template <typename Value, typename... Rest> void values(int rows, const float* weights, Rest... rest) {
    switch (rows) {
        case 1: return row_values<Value, 1>(weights, rest...);
        case 2: return row_values<Value, 2>(weights, rest...);
        case 3: return row_values<Value, 3>(weights, rest...);
        case 4: return row_values<Value, 4>(weights, rest...);
        case 5: return row_values<Value, std::min(5, kMaxRows)>(weights, rest...);
        default: return row_values<Value, kMaxRows>(weights, rest...);
    }
}

// ---- the cache ---------------------------------------------------------------------------------------------------

// A KVLayer's descriptor: num_kv_heads x head_dim / pair x block_size x pair keys a block, values padded to `width`.
struct Layer {
    void *k, *v;
    float *k_scale, *v_scale;
    int64_t num_kv_heads, head_dim, block_size, dtype, width;

    explicit Layer(const int64_t* descriptor) {
        Args args(descriptor);
        k = args.pointer<void>(), v = args.pointer<void>();
        k_scale = args.pointer<float>(), v_scale = args.pointer<float>();
        num_kv_heads = args.integer(), head_dim = args.integer(), block_size = args.integer(), dtype = args.integer();
        width = (head_dim + kGroup - 1) / kGroup * kGroup;
    }
    // Slots before the block's part of one KV head.
    int64_t base(int64_t block, int64_t head) const { return (block * num_kv_heads + head) * block_size; }
};

template <typename C> constexpr int kPairOf = sizeof(C) == 4 ? 1 : 2;

// codes = x / scale, rounded half to even; returns scale = absmax / 127. Zeros have scale 0 and codes 0.
template <typename T> float quantize(const T* x, int64_t n, int8_t* codes) {
    uint32_t largest = 0;  // the order of positive floats is that of their bits, with inf and nan on top
    for (int64_t i = 0; i < n; i++) {
        const float value = lowbit::load(x + i);
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        largest = std::max(largest, bits & 0x7fffffff);
    }
    float scale;
    std::memcpy(&scale, &largest, 4);
    scale /= 127.0f;
    const float divisor = scale > 0 ? scale : 1.0f;
    for (int64_t i = 0; i < n; i++) {
        const float code = std::min(127.0f, std::max(-127.0f, lowbit::load(x + i) / divisor));
        codes[i] = static_cast<int8_t>(static_cast<int32_t>(code + 12582912.0f - 12582912.0f));
    }
    return scale;
}

template <typename T, typename C>
void store_token(const Layer& layer, int64_t slot, int64_t head, const T* key, const T* value) {
    constexpr int pair = kPairOf<C>;
    const int64_t offset = slot % layer.block_size, base = layer.base(slot / layer.block_size, head);
    C* k = static_cast<C*>(layer.k) + base * layer.head_dim + offset * pair;
    C* v = static_cast<C*>(layer.v) + (base + offset) * layer.width;
    if constexpr (sizeof(C) == 1) {
        int8_t codes[kMaxHeadDim];
        layer.k_scale[base + offset] = quantize(key, layer.head_dim, codes);
        layer.v_scale[base + offset] = quantize(value, layer.head_dim, v);
        for (int64_t d = 0; d < layer.head_dim; d += pair) std::memcpy(k + d * layer.block_size, codes + d, pair);
    } else {
        for (int64_t d = 0; d < layer.head_dim; d += pair) std::memcpy(k + d * layer.block_size, key + d, 4);
        std::memcpy(v, value, layer.head_dim * sizeof(C));
    }
}

template <typename T, typename C> void write_kv_as(const int64_t* raw) {
    Args args(raw);
    const T* qkv = args.pointer<T>();
    const int64_t stride = args.integer();
    args.integer();  // the dtype, which chose T
    const int64_t* slots = args.pointer<int64_t>();
    const int64_t num_tokens = args.integer(), num_heads = args.integer();
    const Layer layer(args.pointer<int64_t>());
    const int64_t threads = args.integer(), work = num_tokens * layer.num_kv_heads * layer.head_dim;
    lowbit::parallel_for(num_tokens, work > kSerialWork / 8 ? threads : 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            if (slots[t] < 0) continue;
            const T* k = qkv + t * stride + num_heads * layer.head_dim;
            const T* v = k + layer.num_kv_heads * layer.head_dim;
            for (int64_t head = 0; head < layer.num_kv_heads; head++) {
                store_token<T, C>(layer, slots[t], head, k + head * layer.head_dim, v + head * layer.head_dim);
            }
        }
    });
}

// ---- attention ---------------------------------------------------------------------------------------------------

struct Problem {
    const void* qkv;
    void* out;
    int64_t qkv_stride, num_rows, num_heads;
    Layer layer;
    const int32_t *cu_seqlens, *seq_lens, *block_tables;
    int64_t num_seqs, max_blocks;
    float scale;
    int64_t window;  // 0: none
    int threads;
};

struct Item {  // tokens `token` .. `token + count` of a sequence's rows in this call
    int32_t seq, token, count, keys;
};

struct Range {  // of keys, half open
    int64_t begin, end;
};

// What a thread keeps between calls, so that a decode step allocates nothing.
struct Scratch {
    std::vector<uint32_t> q, keys;
    std::vector<float> sums, peaks, norms, out;
    std::vector<Range> ranges;
};

template <typename T> T* room(std::vector<T>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
    return buffer.data();
}

// An element of q.
[[maybe_unused]] void pack_q(const uint16_t* row, int64_t step, uint32_t* out) { std::memcpy(out, row + 2 * step, 4); }
template <typename T> void pack_q(const T* row, int64_t step, float* out) { *out = lowbit::load(row + step); }

// 16 keys of a block in the layout of the cache -> elements [steps][kChunk] of the dot product.
template <typename C> void widen_keys(const C* keys, int64_t block_size, int64_t head_dim, float* out) {
    for (int64_t d = 0; d < head_dim; d += 2) {
        for (int i = 0; i < kGroup; i++) {
            const C* pair = keys + d * block_size + 2 * i;
            if constexpr (sizeof(C) == 1) {
                out[d * kChunk + i] = pair[0], out[(d + 1) * kChunk + i] = pair[1];
            } else {
                out[d * kChunk + i] = lowbit::load(pair), out[(d + 1) * kChunk + i] = lowbit::load(pair + 1);
            }
        }
    }
}

#if defined(LOWBIT_PAIR_DOT)
// Codes have 7 bits: bfloat16 holds them exactly.
void widen_keys(const int8_t* keys, int64_t block_size, int64_t head_dim, uint32_t* out) {
    for (int64_t d = 0; d < head_dim; d += 2) {
        const __m512i low = _mm512_castps_si512(
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(keys + d * block_size)))));
        const __m512i high = _mm512_castps_si512(
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(keys + d * block_size + 16)))));
        const __m256i first = _mm512_cvtepi32_epi16(_mm512_srli_epi32(low, 16));
        const __m256i second = _mm512_cvtepi32_epi16(_mm512_srli_epi32(high, 16));
        _mm512_storeu_si512(out + d / 2 * kChunk, _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
    }
}
#endif

template <class Dot, typename T, typename C> class Tile {
    using Element = typename Dot::Element;
    static constexpr bool kWiden = Dot::kPair != kPairOf<C> || sizeof(C) == 1;
    static constexpr int kVectorsOfGroup = kGroup / kLanes;

  public:
    Tile(const Problem& p, const Item& item, int64_t head, Scratch& scratch)
        : p_(p), layer_(p.layer), head_(head), group_(p.num_heads / p.layer.num_kv_heads),
          steps_(p.layer.head_dim / Dot::kPair), width_(p.layer.width), rows_(item.count * group_),
          first_row_(p.cu_seqlens[item.seq] + item.token),
          table_(p.block_tables + item.seq * p.max_blocks),
          q_(reinterpret_cast<Element*>(room(scratch.q, rows_ * steps_))),
          widened_(reinterpret_cast<Element*>(kWiden ? room(scratch.keys, steps_ * kChunk) : nullptr)),
          sums_(room(scratch.sums, rows_ * width_)), peaks_(room(scratch.peaks, rows_)),
          norms_(room(scratch.norms, rows_ * kLanes)), ranges_(room(scratch.ranges, rows_)) {
        const int64_t rows = p.cu_seqlens[item.seq + 1] - p.cu_seqlens[item.seq];
        const int64_t position = p.seq_lens[item.seq] - rows + item.token;
        for (int64_t r = 0; r < rows_; r++) {
            const int64_t end = position + r / group_ + 1;
            ranges_[r] = {p.window > 0 ? std::max<int64_t>(0, end - p.window) : 0, std::max<int64_t>(0, end)};
        }
        std::fill_n(sums_, rows_ * width_, 0.0f);
        std::fill_n(peaks_, rows_, -kInfinity);
        std::fill_n(norms_, rows_ * kLanes, 0.0f);
        const int64_t num_strips = (rows_ + kMaxRows - 1) / kMaxRows;
        strip_rows_ = rows_ / num_strips, longer_strips_ = rows_ % num_strips;
    }

    void run() {
        for_strips([&](int64_t row, int rows) { pack(row, rows); });
        const int64_t begin = ranges_[0].begin / kChunk * kChunk, end = ranges_[rows_ - 1].end;
        for (int64_t chunk = begin; chunk < end; chunk += kChunk) {
            locate(chunk, std::min(end, chunk + kChunk));
            for_strips([&](int64_t row, int rows) { strip(chunk, row, rows); });
        }
        for (int64_t r = 0; r < rows_; r++) finish(r);
    }

  private:
    // Rows in strips of nearly equal size.
    template <typename F> void for_strips(F f) {
        for (int64_t row = 0, i = 0; row < rows_; i++) {
            const int rows = static_cast<int>(strip_rows_ + (i < longer_strips_));
            f(row, rows);
            row += rows;
        }
    }

    void pack(int64_t row, int rows) {
        for (int r = 0; r < rows; r++) {
            const int64_t head = head_ * group_ + (row + r) % group_;
            const T* q = static_cast<const T*>(p_.qkv) + (first_row_ + (row + r) / group_) * p_.qkv_stride +
                         head * layer_.head_dim;
            Element* out = q_ + row * steps_ + r;
            for (int64_t step = 0; step < steps_; step++) pack_q(q, step, out + step * rows);
        }
    }

    // Where each group of 16 keys of the chunk lies.
    void locate(int64_t chunk, int64_t end) {
        for (int g = 0; chunk + g * kGroup < end; g++) {
            const int64_t position = chunk + g * kGroup, offset = position % layer_.block_size;
            const int64_t base = layer_.base(table_[position / layer_.block_size], head_);
            const C* keys = static_cast<const C*>(layer_.k) + base * layer_.head_dim + offset * kPairOf<C>;
            const Element* elements = reinterpret_cast<const Element*>(keys);
            if constexpr (kWiden) {
                widen_keys(keys, layer_.block_size, layer_.head_dim, widened_ + g * kGroup);
                elements = widened_ + g * kGroup;
            }
            for (int v = 0; v < kVectorsOfGroup; v++) keys_[g * kVectorsOfGroup + v] = elements + v * kLanes;
            values_[g] = static_cast<const C*>(layer_.v) + (base + offset) * width_;
            if constexpr (sizeof(C) == 1) {
                k_scales_[g] = layer_.k_scale + base + offset;
                v_scales_[g] = layer_.v_scale + base + offset;
            }
        }
        key_stride_ = kWiden ? kChunk : layer_.block_size;
    }

    void strip(int64_t chunk, int64_t row, int rows) {
        // The keys of each row in this chunk; tokens ascend with rows, and so do both ends.
        int begin[kMaxRows], end[kMaxRows];
        for (int r = 0; r < rows; r++) {
            begin[r] = static_cast<int>(std::clamp<int64_t>(ranges_[row + r].begin - chunk, 0, kChunk));
            end[r] = static_cast<int>(std::clamp<int64_t>(ranges_[row + r].end - chunk, 0, kChunk));
        }
        if (end[rows - 1] <= begin[0]) return;
        const int first = begin[0] / kGroup, last = (end[rows - 1] + kGroup - 1) / kGroup;
        float* weights = weights_ + first * kGroup;
        scores<Dot>(rows, q_ + row * steps_, keys_ + first * kVectorsOfGroup, key_stride_, steps_,
                    (last - first) * kVectorsOfGroup, weights);
        float rescale[kMaxRows];
        for (int r = 0; r < rows; r++) {
            rescale[r] = softmax(row + r, weights_ + r * kChunk, first, last, begin[r], end[r]);
        }
        // Keys that all rows of the strip see are added together; those that only some see, one row at a time: a key
        // that a row does not see may hold inf or nan, which a weight of zero would not hide.
        const int common_begin = begin[rows - 1], common_end = std::max(common_begin, end[0]);
        for (int r = 0; r < rows && begin[r] < common_begin; r++) {
            add_values(row, r, 1, rescale, begin[r], std::min(end[r], common_begin));
            rescale[r] = 1;
        }
        add_values(row, 0, rows, rescale, common_begin, common_end);
        for (int r = 0; r < rows; r++) {
            const float one = 1;
            if (end[r] > common_end) {
                values<C>(1, weights_ + r * kChunk, &one, values_, width_, common_end, end[r],
                          sums_ + (row + r) * width_);
            }
        }
    }

    void add_values(int64_t row, int r, int rows, const float* rescale, int begin, int end) {
        values<C>(rows, weights_ + r * kChunk, rescale + r, values_, width_, begin, end, sums_ + (row + r) * width_);
    }

    // Scores of groups first .. last -> weights 2^(score - peak), zero outside begin .. end; returns the factor that
    // brings the row's earlier sums to the new peak.
    float softmax(int64_t row, float* s, int first, int last, int begin, int end) {
        const bool masked = begin > first * kGroup || end < last * kGroup;
        Vector peak = splat(-kInfinity);
        for (int i = first * kGroup; i < last * kGroup; i += kLanes) {
            Vector score = load_vector(s + i) * splat(scale_);
            if constexpr (sizeof(C) == 1) score *= load_vector(k_scales_[i / kGroup] + i % kGroup);
            if (masked) {
                Ints key;
                for (int lane = 0; lane < kLanes; lane++) key[lane] = i + lane;
                score = ((key >= begin) & (key < end)) ? score : splat(-kInfinity);
            }
            peak = score > peak ? score : peak;
            store_vector(s + i, score);
        }
        const float old_peak = peaks_[row], new_peak = std::max(old_peak, largest(peak));
        const float shift = new_peak == -kInfinity ? 0.0f : new_peak;  // -inf - -inf would be nan
        const float rescale = exp2(splat(old_peak - shift))[0];
        Vector norm = load_vector(norms_ + row * kLanes) * splat(rescale);
        for (int i = first * kGroup; i < last * kGroup; i += kLanes) {
            Vector weight = exp2(load_vector(s + i) - splat(shift));
            norm += weight;
            if constexpr (sizeof(C) == 1) weight *= load_vector(v_scales_[i / kGroup] + i % kGroup);
            store_vector(s + i, weight);
        }
        store_vector(norms_ + row * kLanes, norm);
        peaks_[row] = new_peak;
        return rescale;
    }

    void finish(int64_t r) {
        const int64_t head = head_ * group_ + r % group_, dim = layer_.head_dim;
        T* out = static_cast<T*>(p_.out) + ((first_row_ + r / group_) * p_.num_heads + head) * dim;
        const Vector norm = splat(ranges_[r].end > ranges_[r].begin ? total(load_vector(norms_ + r * kLanes)) : 1.0f);
        int64_t d = 0;
        for (; d + kLanes <= dim; d += kLanes) store_vector(out + d, load_vector(sums_ + r * width_ + d) / norm);
        for (; d < dim; d++) lowbit::store(out + d, sums_[r * width_ + d] / norm[0]);
    }

    const Problem& p_;
    const Layer& layer_;
    const int64_t head_, group_, steps_, width_, rows_, first_row_;
    const int32_t* table_;
    Element *q_, *widened_;
    float *sums_, *peaks_, *norms_;  // [rows][width], [rows], [rows][kLanes]
    Range* ranges_;
    const float scale_ = p_.scale * 1.44269504f;  // log2(e): the softmax runs on powers of 2
    int64_t strip_rows_, longer_strips_, key_stride_;
    const Element* keys_[kMaxGroups * kVectorsOfGroup];
    const C* values_[kMaxGroups];
    const float *k_scales_[kMaxGroups], *v_scales_[kMaxGroups];
    alignas(64) float weights_[kMaxRows * kChunk];
};

// The tiles of a call, the costliest first; returns the number of multiply-adds.
int64_t list_items(const Problem& p, std::vector<Item>& items) {
    const int64_t group = p.num_heads / p.layer.num_kv_heads, tokens = std::max<int64_t>(1, kTileRows / group);
    int64_t work = 0;
    items.clear();
    for (int64_t b = 0; b < p.num_seqs; b++) {
        const int64_t rows = p.cu_seqlens[b + 1] - p.cu_seqlens[b];
        for (int64_t token = 0; token < rows; token += tokens) {
            const int64_t count = std::min(tokens, rows - token), end = p.seq_lens[b] - rows + token + count;
            const int64_t keys = std::max<int64_t>(0, p.window > 0 ? std::min(end, p.window + count) : end);
            items.push_back({static_cast<int32_t>(b), static_cast<int32_t>(token), static_cast<int32_t>(count),
                             static_cast<int32_t>(keys)});
            work += count * keys;
        }
    }
    return work * p.num_heads * p.layer.head_dim;
}

template <class Dot, typename T, typename C> void attend(const Problem& p) {
    static thread_local std::vector<Item> items;
    const int64_t work = list_items(p, items), heads = p.layer.num_kv_heads;
    const int64_t written = p.num_seqs > 0 ? p.cu_seqlens[p.num_seqs] : 0, row_size = p.num_heads * p.layer.head_dim;
    std::fill(static_cast<T*>(p.out) + written * row_size, static_cast<T*>(p.out) + p.num_rows * row_size, T(0));
    const bool parallel = work > kSerialWork && p.threads > 1;
    if (parallel) {
        std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
            return int64_t(a.keys) * a.count > int64_t(b.keys) * b.count;
        });
    }
    const Item* list = items.data();  // items is the calling thread's
    const int64_t num_tiles = static_cast<int64_t>(items.size()) * heads;
    const auto run_tiles = [&](int64_t begin, int64_t end) {
        static thread_local Scratch scratch;
        for (int64_t i = begin; i < end; i++) Tile<Dot, T, C>(p, list[i / heads], i % heads, scratch).run();
    };
    lowbit::parallel_for(num_tiles, parallel ? p.threads : 1, run_tiles, num_tiles);  // one by one: they differ in length
}

}  // namespace

// args: qkv, elements from row to row, dtype of qkv, slot_mapping, num_tokens, num_heads, layer descriptor
extern "C" void write_kv(const int64_t* args) {
    const bool wide = args[2] == lowbit::kFloat32;
    if (Layer(reinterpret_cast<const int64_t*>(args[6])).dtype == lowbit::kInt8) {
        return wide ? write_kv_as<float, int8_t>(args) : write_kv_as<uint16_t, int8_t>(args);
    }
    return wide ? write_kv_as<float, float>(args) : write_kv_as<uint16_t, uint16_t>(args);
}

// args: qkv, elements from row to row, dtype of qkv, num_rows, out, num_heads, layer descriptor, cu_seqlens, seq_lens,
// block_tables, num_seqs, max_blocks, scale, sliding_window or 0
extern "C" void paged_attention(const int64_t* raw) {
    Args args(raw);
    const void* qkv = args.pointer<void>();
    const int64_t stride = args.integer(), dtype = args.integer(), num_rows = args.integer();
    void* out = args.pointer<void>();
    const int64_t num_heads = args.integer();
    const Layer layer(args.pointer<int64_t>());
    const int32_t *cu_seqlens = args.pointer<int32_t>(), *seq_lens = args.pointer<int32_t>();
    const int32_t* block_tables = args.pointer<int32_t>();
    const int64_t num_seqs = args.integer(), max_blocks = args.integer();
    const float scale = args.real();
    const int64_t window = args.integer();
    const int threads = static_cast<int>(args.integer());
    const Problem p{qkv,          out,      stride, num_rows, num_heads, layer, cu_seqlens, seq_lens,
                    block_tables, num_seqs, max_blocks, scale, window, threads};
    const bool codes = layer.dtype == lowbit::kInt8;
    if (dtype == lowbit::kFloat32) {
        return codes ? attend<FloatDot, float, int8_t>(p) : attend<FloatDot, float, float>(p);
    }
#if defined(LOWBIT_PAIR_DOT)
    return codes ? attend<PairDot, uint16_t, int8_t>(p) : attend<PairDot, uint16_t, uint16_t>(p);
#else
    return codes ? attend<FloatDot, uint16_t, int8_t>(p) : attend<FloatDot, uint16_t, uint16_t>(p);
#endif
}
