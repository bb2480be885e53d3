// Adds to each row of y the LoRA update of that row's own adapter. Formula, layouts, roundings: kernels/lora_rows.py.
//
// Two phases with a barrier between: x A^T for all blocks of rows, then the update of all columns of y. A block is a
// run of rows that share a slot, so that factors are read once for up to kRowBlock rows. A row's sums run over k, and
// then over the rank, in an order that the block does not change.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "lowbit.h"

namespace {

using lowbit::from_bfloat16;
using lowbit::to_bfloat16;

constexpr int kRowBlock = 32;      // rows of one slot that are served together
constexpr int kFewRowBlock = 8;    // the same while there are too few rows to occupy all threads
constexpr int kColumnChunk = 512;  // columns of y of one piece of work
[[maybe_unused]] constexpr int64_t kSerialWork = 1 << 16;  // fewer products than this are not worth a second thread

struct Factors { int64_t A, B, rank; };  // addresses, as the pointer table holds them

struct Block { int64_t row; int rows; int64_t slot; };

struct Problem {
    void* y;
    const void* x;
    const int32_t* adapter_ids;
    const Factors* table;  // [num_slots, num_parts]
    const int64_t* offsets;  // [num_parts + 1] columns of y
    int64_t num_rows, in_features, num_parts, num_slots;
    int threads;
    int64_t columns() const { return offsets[num_parts]; }
};

// ---- float32, and bfloat16 on processors without its dot product --------------------------------------------------

constexpr int kLanes = 16;

template <typename T> float lanes_dot(const T* x, const T* a, int64_t K) {
    float lane[kLanes] = {};
    const int64_t full = K / kLanes * kLanes;
    for (int64_t k = 0; k < full; k += kLanes) {
#pragma omp simd
        for (int i = 0; i < kLanes; i++) lane[i] += lowbit::load(x + k + i) * lowbit::load(a + k + i);
    }
    for (int64_t k = full; k < K; k++) lane[k - full] += lowbit::load(x + k) * lowbit::load(a + k);
    for (int half = kLanes / 2; half; half /= 2) {
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    }
    return lane[0];
}

template <typename T>
void shrink(const T* x, int64_t x_stride, int rows, const T* A, int64_t rank, int64_t K, T* x_A, int64_t x_A_stride) {
    for (int64_t j = 0; j < rank; j++) {
        for (int r = 0; r < rows; r++) {
            lowbit::store(x_A + r * x_A_stride + j, lanes_dot(x + r * x_stride, A + j * K, K));
        }
    }
}

// B of float32 is [rank, N]; of bfloat16 [rank / 2, N, 2].
inline float factor(const float* B, int64_t N, int64_t j, int64_t n) { return B[j * N + n]; }
inline float factor(const uint16_t* B, int64_t N, int64_t j, int64_t n) {
    return from_bfloat16(B[(j / 2 * N + n) * 2 + j % 2]);
}

template <typename T>
void expand(T* y, int64_t y_stride, int rows, const T* x_A, int64_t x_A_stride, int64_t rank, const T* B, int64_t N,
            int64_t begin, int64_t end) {
    for (int r = 0; r < rows; r++) {
        for (int64_t n = begin; n < end; n += 64) {
            const int64_t count = std::min<int64_t>(64, end - n);
            float sums[64] = {};
            for (int64_t j = 0; j < rank; j++) {
                const float a = lowbit::load(x_A + r * x_A_stride + j);
#pragma omp simd
                for (int64_t i = 0; i < count; i++) sums[i] += a * factor(B, N, j, n + i);
            }
            T* out = y + r * y_stride + n;
#pragma omp simd
            for (int64_t i = 0; i < count; i++) lowbit::store(out + i, lowbit::load(out + i) + sums[i]);
        }
    }
}

// ---- bfloat16 dot products ---------------------------------------------------------------------------------------

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
// Lane i sums pairs i, i + 16, ... of k, then the lanes are added: for every tile the same order.
template <int R, int F>
void shrink_tile(const uint16_t* x, int64_t x_stride, const uint16_t* A, int64_t K, uint16_t* x_A, int64_t x_A_stride) {
    __m512 acc[R][F];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int f = 0; f < F; f++) acc[r][f] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < K; k += 32) {
        const __mmask32 mask = K - k < 32 ? (1u << (K - k)) - 1 : 0xffffffff;
        __m512bh rows[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) rows[r] = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + r * x_stride + k);
#pragma GCC unroll 4
        for (int f = 0; f < F; f++) {
            const __m512bh a = (__m512bh)_mm512_maskz_loadu_epi16(mask, A + f * K + k);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) acc[r][f] = _mm512_dpbf16_ps(acc[r][f], a, rows[r]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int f = 0; f < F; f++) x_A[r * x_A_stride + f] = to_bfloat16(_mm512_reduce_add_ps(acc[r][f]));
    }
}

template <int R>
void shrink_rows(const uint16_t* x, int64_t x_stride, const uint16_t* A, int64_t rank, int64_t K, uint16_t* x_A,
                 int64_t x_A_stride) {
    int64_t j = 0;
    for (; j + 4 <= rank; j += 4) shrink_tile<R, 4>(x, x_stride, A + j * K, K, x_A + j, x_A_stride);
    for (; j < rank; j++) shrink_tile<R, 1>(x, x_stride, A + j * K, K, x_A + j, x_A_stride);
}

void shrink(const uint16_t* x, int64_t x_stride, int rows, const uint16_t* A, int64_t rank, int64_t K, uint16_t* x_A,
            int64_t x_A_stride) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) {
        shrink_rows<4>(x + r * x_stride, x_stride, A, rank, K, x_A + r * x_A_stride, x_A_stride);
    }
    for (; r < rows; r++) shrink_rows<1>(x + r * x_stride, x_stride, A, rank, K, x_A + r * x_A_stride, x_A_stride);
}

// R rows of 16 V columns, of which the last vector has those in `last`.
template <int R, int V>
void expand_tile(uint16_t* y, int64_t y_stride, const uint16_t* x_A, int64_t x_A_stride, int64_t rank,
                 const uint16_t* B, int64_t N, __mmask16 last) {
    __m512 acc[R][V];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) acc[r][v] = _mm512_setzero_ps();
    }
    for (int64_t j = 0; j < rank; j += 2) {  // x_A and B are padded with zeros to even ranks
        __m512bh b[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            b[v] = (__m512bh)_mm512_maskz_loadu_epi32(v + 1 < V ? 0xffff : last, B + j * N + 32 * v);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, x_A + r * x_A_stride + j, 4);
            const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], b[v], a);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            uint16_t* out = y + r * y_stride + 16 * v;
            const __mmask16 mask = v + 1 < V ? 0xffff : last;
            const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, out));
            const __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)), acc[r][v]);
            _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(sum));
        }
    }
}

template <int R>
void expand_rows(uint16_t* y, int64_t y_stride, const uint16_t* x_A, int64_t x_A_stride, int64_t rank,
                 const uint16_t* B, int64_t N, int64_t begin, int64_t end) {
    int64_t n = begin;
    for (; n + 64 <= end; n += 64) {
        expand_tile<R, 4>(y + n, y_stride, x_A, x_A_stride, rank, B + 2 * n, N, 0xffff);
    }
    for (; n < end; n += 16) {
        const __mmask16 last = end - n < 16 ? (1u << (end - n)) - 1 : 0xffff;
        expand_tile<R, 1>(y + n, y_stride, x_A, x_A_stride, rank, B + 2 * n, N, last);
    }
}

void expand(uint16_t* y, int64_t y_stride, int rows, const uint16_t* x_A, int64_t x_A_stride, int64_t rank,
            const uint16_t* B, int64_t N, int64_t begin, int64_t end) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) {
        expand_rows<4>(y + r * y_stride, y_stride, x_A + r * x_A_stride, x_A_stride, rank, B, N, begin, end);
    }
    for (; r < rows; r++) {
        expand_rows<1>(y + r * y_stride, y_stride, x_A + r * x_A_stride, x_A_stride, rank, B, N, begin, end);
    }
}
#endif

// ---- both phases -------------------------------------------------------------------------------------------------

std::vector<Block> blocks_of(const Problem& p) {
    std::vector<Block> blocks;
    const int most = p.num_rows >= 4 * kRowBlock * p.threads ? kRowBlock : kFewRowBlock;
    for (int64_t row = 0; row < p.num_rows; row++) {
        const int64_t slot = p.adapter_ids[row];
        if (slot < 0 || slot >= p.num_slots) continue;
        Block* last = blocks.empty() ? nullptr : &blocks.back();
        if (last && last->slot == slot && last->row + last->rows == row && last->rows < most) last->rows++;
        else blocks.push_back({row, 1, slot});
    }
    return blocks;
}

template <typename T> void lora_rows(const Problem& p) {
    const std::vector<Block> blocks = blocks_of(p);
    int64_t max_rank = 0, max_columns = 0, work = 0;
    for (const Block& block : blocks) {
        for (int64_t part = 0; part < p.num_parts; part++) {
            const int64_t rank = p.table[block.slot * p.num_parts + part].rank;
            max_rank = std::max(max_rank, rank);
            work += block.rows * rank * (p.in_features + p.offsets[part + 1] - p.offsets[part]);
        }
    }
    if (!max_rank) return;
    for (int64_t part = 0; part < p.num_parts; part++) {
        max_columns = std::max(max_columns, p.offsets[part + 1] - p.offsets[part]);
    }
    const int64_t rank_stride = (max_rank + 1) / 2 * 2, row_stride = p.num_parts * rank_stride;
    std::vector<T> x_A(p.num_rows * row_stride);
    const int64_t num_items = blocks.size() * p.num_parts, chunks = (max_columns + kColumnChunk - 1) / kColumnChunk;
    const int64_t threads = work > kSerialWork ? p.threads : 1;
    lowbit::parallel_for(num_items, threads, [&](int64_t first, int64_t last) {
        for (int64_t item = first; item < last; item++) {
            const Block& block = blocks[item / p.num_parts];
            const int64_t part = item % p.num_parts;
            const Factors& factors = p.table[block.slot * p.num_parts + part];
            if (!factors.rank) continue;
            shrink((const T*)p.x + block.row * p.in_features, p.in_features, block.rows, (const T*)factors.A,
                   factors.rank, p.in_features, x_A.data() + block.row * row_stride + part * rank_stride, row_stride);
        }
    });
    lowbit::parallel_for(num_items * chunks, threads, [&](int64_t first, int64_t last) {
        for (int64_t item = first; item < last; item++) {
            const Block& block = blocks[item / chunks / p.num_parts];
            const int64_t part = item / chunks % p.num_parts, N = p.offsets[part + 1] - p.offsets[part];
            const Factors& factors = p.table[block.slot * p.num_parts + part];
            const int64_t begin = item % chunks * kColumnChunk, end = std::min(N, begin + kColumnChunk);
            if (!factors.rank || begin >= end) continue;
            expand((T*)p.y + block.row * p.columns() + p.offsets[part], p.columns(), block.rows,
                   x_A.data() + block.row * row_stride + part * rank_stride, row_stride, factors.rank,
                   (const T*)factors.B, N, begin, end);
        }
    });
}

}  // namespace

// y, x, adapter_ids, table, offsets, num_rows, in_features, num_parts, num_slots, dtype of x and y, threads
extern "C" void lora_rows(const int64_t* boxed) {
    lowbit::Args args(boxed);
    Problem p;
    p.y = args.pointer<void>(), p.x = args.pointer<const void>(), p.adapter_ids = args.pointer<const int32_t>();
    p.table = args.pointer<const Factors>(), p.offsets = args.pointer<const int64_t>();
    p.num_rows = args.integer(), p.in_features = args.integer(), p.num_parts = args.integer();
    p.num_slots = args.integer();
    const int64_t dtype = args.integer();
    p.threads = args.integer();
    if (dtype == lowbit::kFloat32) lora_rows<float>(p);
    else lora_rows<uint16_t>(p);
}
