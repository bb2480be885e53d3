// The products of a LoRA update in bfloat16, forward and backward. Formulas and roundings: kernels/lora_products.py.
//
// One side of each product is a rank, some 16: too thin for a general matrix product, which packs both sides. Here the
// factor alone is packed, once a call, into pairs of neighbours along the summed dimension, because that is what the
// processor's dot product adds; the tall matrix is read where it lies. Three tiles of sums in registers:
//
//     thin   [rows, ranks]    sums over features: pairs of x are neighbours in a row; a pair times a vector of ranks
//     wide   [rows, columns]  sums over ranks, on top of what is there; a pair of ranks times a vector of columns
//     tall   [ranks, columns] sums over rows: two rows are interleaved first; a pair of rows times a vector of columns
//
// Every sum runs in one order, whatever the tile and the number of threads.

#include <vector>

#include "elementwise.h"

namespace {

// ---- pairs of bfloat16 ---------------------------------------------------------------------------------------------

#if defined(__AVX512BF16__)
constexpr bool kFast = true;
constexpr int kThinRows[] = {12, 12, 8, 6};  // by the number of vectors of ranks: 12 to 24 sums in registers
constexpr int kWideRows = 6, kWideVectors = 4;
constexpr int kTallRanks = 12, kTallVectors = 2;

inline Floats dot(Floats sum, Words a, Words b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
// This instruction and the dot product take subnormal numbers for zero.
inline void store_rounded(uint16_t* p, Floats v) {
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
}
#else
#if defined(__AVX2__)
constexpr bool kFast = true;
#else
constexpr bool kFast = false;
#endif
constexpr int kThinRows[] = {8, 4, 2, 2};
constexpr int kWideRows = 4, kWideVectors = 2;
constexpr int kTallRanks = 4, kTallVectors = 2;

inline Floats dot(Floats sum, Words a, Words b) {
    sum += floats_of(a << 16) * floats_of(b << 16);
    return sum + floats_of(a & 0xffff0000) * floats_of(b & 0xffff0000);
}
inline void store_rounded(uint16_t* p, Floats v) { store(p, Full{}, v); }
#endif

constexpr int kThinVectors = 4;
constexpr int kWideColumns = kWideVectors * kWidth, kTallColumns = kTallVectors * kWidth;
constexpr int64_t kRowBlock = 24;    // rows of one piece of work: full tiles of any kind
constexpr int64_t kTallRows = 128;   // rows that are interleaved at a time, and
constexpr int64_t kTallChunk = 96;   // columns: together 24 KB, which stay in the first cache
static_assert(kTallChunk % kTallColumns == 0);

inline Words broadcast(uint32_t word) { return Words{} + word; }
inline Words load_words(const uint32_t* p) {
    Words words;
    std::memcpy(&words, p, sizeof words);
    return words;
}
inline uint32_t word_at(const uint16_t* p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}
inline uint32_t pair(float low, float high) {
    return lowbit::to_bfloat16(low) | static_cast<uint32_t>(lowbit::to_bfloat16(high)) << 16;
}
// Into the second cache what this core will read next: these matrices are larger, and a tile's rows are more streams
// than the processor foresees. A cache line has 64 bytes.
constexpr int64_t kLine = 32;
inline void fetch(const uint16_t* p) { __builtin_prefetch(p, 0, 2); }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory of one thread for one purpose, kept from call to call.
class Scratch {
  public:
    template <typename T> T* take(int64_t count) {
        const size_t bytes = count * sizeof(T) + 64;
        if (memory_.size() < bytes) memory_.resize(bytes);
        return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) / 64 * 64);
    }

  private:
    std::vector<char> memory_;
};

// ---- the projections -----------------------------------------------------------------------------------------------

// A projection: columns [begin, end) of y and ranks [first, first + rank) of h A^T. Without an adapter the rank is 0.
struct Part {
    const float* factor;  // A [rank, in_features] or B [size, rank]
    float* gradient;      // of the factor
    int64_t rank, size;
    float scaling;
    int64_t first, begin;
    uint32_t* packed;  // s B in pairs, where a kernel asked for it by `place`
};

class Parts {
  public:
    // num_parts, then (factor, gradient, rank, size, scaling) of each.
    explicit Parts(Args& args) : parts_(args.integer()) {
        for (Part& part : parts_) {
            part.factor = args.pointer<const float>();
            part.gradient = args.pointer<float>();
            part.rank = args.integer();
            part.size = args.integer();
            part.scaling = args.real();
            part.first = ranks_;
            part.begin = columns_;
            ranks_ += part.rank;
            columns_ += part.size;
        }
    }
    auto begin() const { return parts_.begin(); }
    auto end() const { return parts_.end(); }
    int64_t ranks() const { return ranks_; }
    int64_t columns() const { return columns_; }

    // Memory of words(part) for the packed factor of each.
    template <typename Words> void place(Scratch& scratch, Words words) {
        int64_t total = 0;
        for (const Part& part : parts_) total += words(part);
        uint32_t* next = scratch.take<uint32_t>(total);
        for (Part& part : parts_) {
            part.packed = next;
            next += words(part);
        }
    }

    // f(part, begin, end) for runs of units of `unit` columns of the parts with an adapter, all in one piece of work.
    template <typename F> void for_units(int64_t unit, int64_t threads, int64_t parts_per_thread, F f) const {
        const auto units = [=](const Part& part) { return part.rank ? ceil_div(part.size, unit) : 0; };
        int64_t total = 0;
        for (const Part& part : parts_) total += units(part);
        lowbit::parallel_for(total, threads, [&](int64_t begin, int64_t end) {
            int64_t first = 0;
            for (const Part& part : parts_) {
                const int64_t from = std::max<int64_t>(begin - first, 0), to = std::min(end - first, units(part));
                if (from < to) f(part, from, to);
                first += units(part);
            }
        }, parts_per_thread);
    }

  private:
    std::vector<Part> parts_;
    int64_t ranks_ = 0, columns_ = 0;
};

// ---- thin: out [rows, ranks] = x [rows, features] times packed [features / 2, padded ranks] ------------------------

inline int64_t padded(int64_t ranks) { return ceil_div(ranks, kWidth) * kWidth; }

template <int R, int V>
void thin_tile(const uint16_t* x, int64_t x_stride, int64_t features, const uint32_t* packed, int64_t packed_stride,
               uint16_t* out, int64_t out_stride, int64_t ranks) {
    Floats sums[R][V] = {};
    const auto add = [&](int64_t p, auto word) {
        Words factor[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) factor[v] = load_words(packed + p * packed_stride + v * kWidth);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const Words a = broadcast(word(x + r * x_stride + 2 * p));
#pragma GCC unroll 16
            for (int v = 0; v < V; v++) sums[r][v] = dot(sums[r][v], a, factor[v]);
        }
    };
    for (int64_t p = 0; p < features / 2;) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) fetch(x + (r + R) * x_stride + 2 * p);
        for (const int64_t end = std::min(p + kLine / 2, features / 2); p < end; p++) add(p, word_at);
    }
    if (features % 2) add(features / 2, [](const uint16_t* last) { return static_cast<uint32_t>(*last); });
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) {
            uint16_t* at = out + r * out_stride + v * kWidth;
            if (const int64_t left = ranks - v * kWidth; left >= kWidth) {
                store_rounded(at, sums[r][v]);
            } else {
                uint16_t halves[kWidth];
                store_rounded(halves, sums[r][v]);
                std::memcpy(at, halves, 2 * left);
            }
        }
    }
}

template <int V>
void thin_rows(const uint16_t* x, int64_t x_stride, int64_t rows, int64_t features, const uint32_t* packed,
               int64_t packed_stride, uint16_t* out, int64_t out_stride, int64_t ranks) {
    constexpr int R = kThinRows[V - 1];
    int64_t row = 0;
    const auto tile = [&](auto count) {
        constexpr int kRows = decltype(count)::value;
        thin_tile<kRows, V>(x + row * x_stride, x_stride, features, packed, packed_stride, out + row * out_stride,
                            out_stride, ranks);
        row += kRows;
    };
    while (row + R <= rows) tile(std::integral_constant<int, R>{});
    while (row + R / 2 <= rows) tile(std::integral_constant<int, R / 2>{});
    while (row < rows) tile(std::integral_constant<int, 1>{});
}

void thin(const uint16_t* x, int64_t x_stride, int64_t rows, int64_t features, const uint32_t* packed, uint16_t* out,
          int64_t out_stride, int64_t ranks) {
    const int64_t stride = padded(ranks);
    for (int64_t rank = 0; rank < ranks;) {
        const int64_t vectors = ceil_div(ranks - rank, kWidth), tiles = ceil_div(vectors, kThinVectors);
        const int64_t now = ceil_div(vectors, tiles), count = std::min(ranks - rank, now * kWidth);
        const auto run = now == 1 ? thin_rows<1> : now == 2 ? thin_rows<2> : now == 3 ? thin_rows<3> : thin_rows<4>;
        run(x, x_stride, rows, features, packed + rank, stride, out + rank, out_stride, count);
        rank += count;
    }
}

// Pairs [begin, end) of the rows of s B [size, rank] side by side.
void pack_thin_B(const Part& part, int64_t begin, int64_t end) {
    const int64_t rank = part.rank, stride = padded(rank);
    for (int64_t p = begin; p < end; p++) {
        const float* low = part.factor + 2 * p * rank;
        const float* high = low + rank;
        uint32_t* out = part.packed + p * stride;
        const float s = part.scaling;
        if (2 * p + 1 < part.size)
            for (int64_t j = 0; j < rank; j++) out[j] = pair(s * low[j], s * high[j]);
        else
            for (int64_t j = 0; j < rank; j++) out[j] = pair(s * low[j], 0.0f);
        std::fill(out + rank, out + stride, 0);
    }
}

// Pairs [begin, end) along the rows of all A [rank, features], one below the other, each row a column of `packed`.
void pack_thin_A(const Parts& parts, int64_t features, uint32_t* packed, int64_t begin, int64_t end) {
    const int64_t stride = padded(parts.ranks());
    for (int64_t p = begin; p < end; p++) std::fill(packed + p * stride + parts.ranks(), packed + (p + 1) * stride, 0);
    for (const Part& part : parts) {
        for (int64_t j = 0; j < part.rank; j++) {
            const float* row = part.factor + j * features;
            uint32_t* out = packed + part.first + j;
            const int64_t full = std::min(end, features / 2);
            for (int64_t p = begin; p < full; p++) out[p * stride] = pair(row[2 * p], row[2 * p + 1]);
            if (full < end) out[full * stride] = pair(row[2 * full], 0.0f);
        }
    }
}

// ---- wide: y [rows, columns] += x [rows, ranks] times packed [columns / kWideColumns, ranks / 2, kWideColumns] -----

template <int R>
void wide_tile(uint16_t* y, int64_t y_stride, const uint16_t* residual, int64_t residual_stride, const uint32_t* x,
               int64_t pairs, const uint32_t* packed) {
    Floats sums[R][kWideVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        for (int64_t i = 0; i < kWideColumns; i += kLine) fetch(y + (r + R) * y_stride + i);
#pragma GCC unroll 16
        for (int v = 0; v < kWideVectors; v++) sums[r][v] = load(y + r * y_stride + v * kWidth, Full{});
    }
    for (int64_t p = 0; p < pairs; p++) {
        Words factor[kWideVectors];
#pragma GCC unroll 16
        for (int v = 0; v < kWideVectors; v++) factor[v] = load_words(packed + p * kWideColumns + v * kWidth);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const Words a = broadcast(x[r * pairs + p]);
#pragma GCC unroll 16
            for (int v = 0; v < kWideVectors; v++) sums[r][v] = dot(sums[r][v], a, factor[v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < kWideVectors; v++) {
            uint16_t* out = y + r * y_stride + v * kWidth;
            store_rounded(out, sums[r][v]);
            if (residual) {
                const Floats sum = load(out, Full{}) + load(residual + r * residual_stride + v * kWidth, Full{});
                store(out, Full{}, sum);
            }
        }
}

// Up to kWideRows rows.
void wide_rows(int64_t rows, uint16_t* y, int64_t y_stride, const uint16_t* residual, int64_t residual_stride,
               const uint32_t* x, int64_t pairs, const uint32_t* packed) {
    if (rows == kWideRows) return wide_tile<kWideRows>(y, y_stride, residual, residual_stride, x, pairs, packed);
    for (int64_t r = 0; r < rows; r++) {
        const uint16_t* of_row = residual ? residual + r * residual_stride : nullptr;
        wide_tile<1>(y + r * y_stride, y_stride, of_row, residual_stride, x + r * pairs, pairs, packed);
    }
}

// The last columns, fewer than a tile has: through a copy.
void wide_rest(int64_t rows, int64_t columns, uint16_t* y, int64_t y_stride, const uint16_t* residual,
               int64_t residual_stride, const uint32_t* x, int64_t pairs, const uint32_t* packed) {
    uint16_t copy[kWideRows * kWideColumns] = {}, residual_copy[kWideRows * kWideColumns] = {};
    for (int64_t r = 0; r < rows; r++) {
        std::memcpy(copy + r * kWideColumns, y + r * y_stride, 2 * columns);
        if (residual) std::memcpy(residual_copy + r * kWideColumns, residual + r * residual_stride, 2 * columns);
    }
    wide_rows(rows, copy, kWideColumns, residual ? residual_copy : nullptr, kWideColumns, x, pairs, packed);
    for (int64_t r = 0; r < rows; r++) std::memcpy(y + r * y_stride, copy + r * kWideColumns, 2 * columns);
}

void wide(int64_t rows, int64_t columns, uint16_t* y, int64_t y_stride, const uint16_t* residual,
          int64_t residual_stride, const uint16_t* x, int64_t x_stride, int64_t ranks, const uint32_t* packed) {
    static thread_local Scratch of_x;
    const int64_t pairs = ceil_div(ranks, 2);
    uint32_t* x_pairs = of_x.take<uint32_t>(kWideRows * pairs);
    for (int64_t row = 0; row < rows; row += kWideRows) {
        const int64_t now = std::min<int64_t>(kWideRows, rows - row);
        for (int64_t r = 0; r < now && pairs; r++) {
            x_pairs[r * pairs + pairs - 1] = 0;  // a pair's second half, where the rank is odd
            std::memcpy(x_pairs + r * pairs, x + (row + r) * x_stride, 2 * ranks);
        }
        for (int64_t column = 0; column < columns; column += kWideColumns) {
            const int64_t left = columns - column;
            uint16_t* out = y + row * y_stride + column;
            const uint16_t* add = residual ? residual + row * residual_stride + column : nullptr;
            const uint32_t* factor = packed + column * pairs;
            if (left >= kWideColumns) wide_rows(now, out, y_stride, add, residual_stride, x_pairs, pairs, factor);
            else wide_rest(now, left, out, y_stride, add, residual_stride, x_pairs, pairs, factor);
        }
    }
}

inline int64_t wide_words(int64_t columns, int64_t ranks) {
    return ceil_div(columns, kWideColumns) * kWideColumns * ceil_div(ranks, 2);
}

// Tiles [begin, end) of columns; s B [size, rank] transposed.
void pack_wide_B(const Part& part, int64_t begin, int64_t end) {
    const int64_t rank = part.rank, pairs = ceil_div(rank, 2);
    const float s = part.scaling;
    uint32_t* packed = part.packed;
    std::fill(packed + begin * kWideColumns * pairs, packed + end * kWideColumns * pairs, 0);
    for (int64_t n = begin * kWideColumns; n < std::min(end * kWideColumns, part.size); n++) {
        const float* row = part.factor + n * rank;
        uint32_t* out = packed + n / kWideColumns * kWideColumns * pairs + n % kWideColumns;
        for (int64_t p = 0; p < rank / 2; p++) out[p * kWideColumns] = pair(s * row[2 * p], s * row[2 * p + 1]);
        if (rank % 2) out[rank / 2 * kWideColumns] = pair(s * row[rank - 1], 0.0f);
    }
}

// Tiles [begin, end) of columns; rows [rank, features] of all A, one below the other.
void pack_wide_A(const Parts& parts, int64_t features, uint32_t* packed, int64_t begin, int64_t end) {
    const int64_t pairs = ceil_div(parts.ranks(), 2);
    std::fill(packed + begin * kWideColumns * pairs, packed + end * kWideColumns * pairs, 0);
    uint16_t* halves = reinterpret_cast<uint16_t*>(packed);
    for (const Part& part : parts) {
        for (int64_t j = 0; j < part.rank; j++) {
            const int64_t rank = part.first + j;
            for (int64_t tile = begin; tile < end; tile++) {
                const float* row = part.factor + j * features + tile * kWideColumns;
                uint16_t* out = halves + (tile * pairs + rank / 2) * 2 * kWideColumns + rank % 2;
                const int64_t count = std::min<int64_t>(kWideColumns, features - tile * kWideColumns);
                for (int64_t i = 0; i < count; i++) out[2 * i] = lowbit::to_bfloat16(row[i]);
            }
        }
    }
}

// ---- tall: out [ranks, columns] = x [rows, ranks] transposed times g [rows, columns] -------------------------------

template <int J>
void tall_tile(const uint32_t* g, const uint32_t* x, int64_t x_stride, int64_t pairs, float* out) {
    Floats sums[J][kTallVectors];
#pragma GCC unroll 16
    for (int j = 0; j < J; j++)
#pragma GCC unroll 16
        for (int v = 0; v < kTallVectors; v++) sums[j][v] = load(out + j * kTallChunk + v * kWidth, Full{});
    for (int64_t p = 0; p < pairs; p++) {
        Words columns[kTallVectors];
#pragma GCC unroll 16
        for (int v = 0; v < kTallVectors; v++) columns[v] = load_words(g + p * kTallChunk + v * kWidth);
#pragma GCC unroll 16
        for (int j = 0; j < J; j++) {
            const Words a = broadcast(x[p * x_stride + j]);
#pragma GCC unroll 16
            for (int v = 0; v < kTallVectors; v++) sums[j][v] = dot(sums[j][v], a, columns[v]);
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < J; j++)
#pragma GCC unroll 16
        for (int v = 0; v < kTallVectors; v++) store(out + j * kTallChunk + v * kWidth, Full{}, sums[j][v]);
}

template <int J = kTallRanks>
void tall_ranks(int64_t ranks, const uint32_t* g, const uint32_t* x, int64_t x_stride, int64_t pairs, float* out) {
    if constexpr (J > 1)
        if (ranks < J) return tall_ranks<J - 1>(ranks, g, x, x_stride, pairs, out);
    tall_tile<J>(g, x, x_stride, pairs, out);
}

// Two rows, side by side; `high` is null after the last row.
void interleave(const uint16_t* low, const uint16_t* high, int64_t columns, uint32_t* out) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; high && i + 16 <= columns; i += 16) {
        const auto wide = [i](const uint16_t* row) {
            return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + i)));
        };
        _mm512_storeu_si512(out + i, _mm512_or_si512(wide(low), _mm512_slli_epi32(wide(high), 16)));
    }
#endif
    for (; i < columns; i++) out[i] = low[i] | (high ? static_cast<uint32_t>(high[i]) << 16 : 0);
}

// All rows of up to kTallChunk columns. x_pairs [rows / 2, x_stride]; returns sums [ranks, kTallChunk].
const float* tall(const uint16_t* g, int64_t g_stride, int64_t rows, int64_t columns, const uint32_t* x_pairs,
                  int64_t x_stride, int64_t ranks) {
    static thread_local Scratch of_g, of_sums;
    uint32_t* g_pairs = of_g.take<uint32_t>(kTallRows / 2 * kTallChunk);
    float* sums = of_sums.take<float>(ranks * kTallChunk);
    std::fill(sums, sums + ranks * kTallChunk, 0.0f);
    std::fill(g_pairs, g_pairs + kTallRows / 2 * kTallChunk, 0);
    const int64_t tiles = ceil_div(ranks, kTallRanks);
    for (int64_t row = 0; row < rows; row += kTallRows) {
        const int64_t end = std::min(rows, row + kTallRows), pairs = ceil_div(end - row, 2);
        for (int64_t p = 0; p < pairs; p++) {
            const uint16_t* low = g + (row + 2 * p) * g_stride;
            for (int64_t i = 0; i < columns; i += kLine) {
                fetch(low + kTallRows * g_stride + i);
                fetch(low + (kTallRows + 1) * g_stride + i);
            }
            interleave(low, row + 2 * p + 1 < end ? low + g_stride : nullptr, columns, g_pairs + p * kTallChunk);
        }
        for (int64_t column = 0; column < columns; column += kTallColumns) {
            for (int64_t tile = 0; tile < tiles; tile++) {
                const int64_t rank = ranks * tile / tiles, next = ranks * (tile + 1) / tiles;
                const uint32_t* x = x_pairs + row / 2 * x_stride + rank;
                tall_ranks(next - rank, g_pairs + column, x, x_stride, pairs, sums + rank * kTallChunk + column);
            }
        }
    }
    return sums;
}

// x [rows, ranks] -> [rows / 2, ranks] pairs of rows
const uint32_t* row_pairs(const uint16_t* x, int64_t rows, int64_t ranks, int64_t threads) {
    static thread_local Scratch of_x;
    uint32_t* pairs = of_x.take<uint32_t>(ceil_div(rows, 2) * ranks);
    lowbit::parallel_for(ceil_div(rows, 2), threads, [=](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; p++) {
            const uint16_t* low = x + 2 * p * ranks;
            interleave(low, 2 * p + 1 < rows ? low + ranks : nullptr, ranks, pairs + p * ranks);
        }
    }, 1);
    return pairs;
}

// f(begin, end) for blocks of rows.
template <typename F> void for_row_blocks(int64_t rows, int64_t threads, F f) {
    lowbit::parallel_for(ceil_div(rows, kRowBlock), threads, [&](int64_t begin, int64_t end) {
        f(begin * kRowBlock, std::min(rows, end * kRowBlock));
    });
}

}  // namespace

// Whether these products are faster than torch's on the processor that this was compiled for.
extern "C" int64_t is_fast() { return kFast; }

extern "C" void thin_A(const int64_t* raw) {
    Args args(raw);
    const auto* h = args.pointer<const uint16_t>();
    auto* out = args.pointer<uint16_t>();
    const int64_t rows = args.integer(), features = args.integer();
    const Parts parts(args);
    const int64_t threads = args.integer(), ranks = parts.ranks();
    static thread_local Scratch of_A;
    uint32_t* packed = of_A.take<uint32_t>(ceil_div(features, 2) * padded(ranks));
    lowbit::parallel_for(ceil_div(features, 2), threads, [&](int64_t begin, int64_t end) {
        pack_thin_A(parts, features, packed, begin, end);
    }, 1);
    for_row_blocks(rows, threads, [&](int64_t begin, int64_t end) {
        thin(h + begin * features, features, end - begin, features, packed, out + begin * ranks, ranks, ranks);
    });
}

extern "C" void wide_B(const int64_t* raw) {
    Args args(raw);
    auto* y = args.pointer<uint16_t>();
    const auto* residual = args.pointer<const uint16_t>();
    const auto* h_A = args.pointer<const uint16_t>();
    const int64_t rows = args.integer();
    Parts parts(args);
    const int64_t threads = args.integer(), ranks = parts.ranks(), stride = parts.columns();
    static thread_local Scratch of_B;
    parts.place(of_B, [](const Part& part) { return wide_words(part.size, part.rank); });
    parts.for_units(kWideColumns, threads, 1, pack_wide_B);
    for_row_blocks(rows, threads, [&](int64_t begin, int64_t end) {
        for (; begin < end; begin += kRowBlock) {
            const int64_t now = std::min(kRowBlock, end - begin);
            for (const Part& part : parts) {
                const int64_t at = begin * stride + part.begin;
                if (part.rank || residual)
                    wide(now, part.size, y + at, stride, residual ? residual + at : nullptr, stride,
                         h_A + begin * ranks + part.first, ranks, part.rank, part.packed);
            }
        }
    });
}

extern "C" void grad_B(const int64_t* raw) {
    Args args(raw);
    const auto* grad = args.pointer<const uint16_t>();
    const auto* h_A = args.pointer<const uint16_t>();
    auto* grad_h_A = args.pointer<uint16_t>();
    const int64_t rows = args.integer();
    Parts parts(args);
    const int64_t threads = args.integer(), ranks = parts.ranks(), stride = parts.columns();
    static thread_local Scratch of_B;
    parts.place(of_B, [](const Part& part) { return ceil_div(part.size, 2) * padded(part.rank); });
    parts.for_units(2, threads, 1, pack_thin_B);
    for_row_blocks(rows, threads, [&](int64_t begin, int64_t end) {
        for (const Part& part : parts)
            thin(grad + begin * stride + part.begin, stride, end - begin, part.size, part.packed,
                 grad_h_A + begin * ranks + part.first, ranks, part.rank);
    });
    const uint32_t* pairs = row_pairs(h_A, rows, ranks, threads);
    parts.for_units(kTallColumns, threads, 2, [&](const Part& part, int64_t first, int64_t last) {
        const int64_t end = std::min(part.size, last * kTallColumns), rank = part.rank;
        for (int64_t column = first * kTallColumns; column < end; column += kTallChunk) {
            const int64_t count = std::min(kTallChunk, end - column);
            const float* sums = tall(grad + part.begin + column, stride, rows, count, pairs + part.first, ranks, rank);
            float* out = part.gradient + column * rank;
            for (int64_t i = 0; i < count; i++)
                for (int64_t j = 0; j < rank; j++) out[i * rank + j] = part.scaling * sums[j * kTallChunk + i];
        }
    });
}

extern "C" void wide_A(const int64_t* raw) {
    Args args(raw);
    auto* grad_h = args.pointer<uint16_t>();
    const auto* grad_h_A = args.pointer<const uint16_t>();
    const int64_t rows = args.integer(), features = args.integer();
    const Parts parts(args);
    const int64_t threads = args.integer(), ranks = parts.ranks();
    static thread_local Scratch of_A;
    uint32_t* packed = of_A.take<uint32_t>(wide_words(features, ranks));
    lowbit::parallel_for(ceil_div(features, kWideColumns), threads, [&](int64_t begin, int64_t end) {
        pack_wide_A(parts, features, packed, begin, end);
    }, 1);
    for_row_blocks(rows, threads, [&](int64_t begin, int64_t end) {
        wide(end - begin, features, grad_h + begin * features, features, nullptr, 0, grad_h_A + begin * ranks, ranks,
             ranks, packed);
    });
}

extern "C" void grad_A(const int64_t* raw) {
    Args args(raw);
    const auto* h = args.pointer<const uint16_t>();
    const auto* grad_h_A = args.pointer<const uint16_t>();
    const int64_t rows = args.integer(), features = args.integer();
    const Parts parts(args);
    const int64_t threads = args.integer(), ranks = parts.ranks();
    const uint32_t* pairs = row_pairs(grad_h_A, rows, ranks, threads);
    lowbit::parallel_for(ceil_div(features, kTallColumns), threads, [&](int64_t first, int64_t last) {
        const int64_t end = std::min(features, last * kTallColumns);
        for (int64_t column = first * kTallColumns; column < end; column += kTallChunk) {
            const int64_t count = std::min(kTallChunk, end - column);
            const float* sums = tall(h + column, features, rows, count, pairs, ranks, ranks);
            for (const Part& part : parts)
                for (int64_t j = 0; j < part.rank; j++)
                    std::memcpy(part.gradient + j * features + column, sums + (part.first + j) * kTallChunk, 4 * count);
        }
    }, 2);
}
