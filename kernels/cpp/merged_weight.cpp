// W + s B A in float32, rows of it: kernels/merged_weight.py.
//
// A row is made kTile columns at a time: their sums stay in registers over all ranks, and A's rows, which every row of W
// reads, in the first-level cache. The compiler makes vectors of the loops over columns; an element's sum runs over the
// ranks in ascending order in any case, and contraction is off (kernels/_cpp.py), so bits do not depend on the vectors.

#include "lowbit.h"

namespace {

using lowbit::Args;

constexpr int64_t kTile = 64;              // columns: four AVX512 registers of sums
constexpr int64_t kPanel = 256;            // columns whose part of A, 16 KB at rank 16, is used by many rows
constexpr int64_t kSerialWork = 1 << 12;   // terms; some 1 us on one Zen 4 core

template <typename T, typename Size>
void merge_tile(const T* weight, const float* a, const float* b, float* out, int64_t in_features, int64_t rank,
                Size size) {
    float sums[kTile] = {};
    for (int64_t r = 0; r < rank; r++) {
        const float* from = a + r * in_features;
        const float factor = b[r];
#pragma omp simd
        for (int64_t i = 0; i < size; i++) sums[i] += factor * from[i];
    }
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = lowbit::load(weight + i) + sums[i];
}

template <typename T>
void merge(const T* weight, const float* a, const float* b, float* out, int64_t num_rows, int64_t in_features,
           int64_t rank, int64_t threads) {
    const int64_t workers = num_rows * in_features * (rank + 1) > kSerialWork ? threads : 1;
    lowbit::parallel_for(num_rows, workers, [=](int64_t first, int64_t last) {
        for (int64_t panel = 0; panel < in_features; panel += kPanel) {
            const int64_t end = std::min(panel + kPanel, in_features);
            for (int64_t row = first; row < last; row++) {
                const int64_t at = row * in_features;
                int64_t i = panel;
                for (; i + kTile <= end; i += kTile) {
                    merge_tile(weight + at + i, a + i, b + row * rank, out + at + i, in_features, rank,
                               std::integral_constant<int64_t, kTile>{});
                }
                if (i < end) merge_tile(weight + at + i, a + i, b + row * rank, out + at + i, in_features, rank, end - i);
            }
        }
    });
}

}  // namespace

// weight [num_rows, in_features] of dtype, a [rank, in_features], b [num_rows, rank] -> out [num_rows, in_features]
extern "C" void merge_rows(const int64_t* args) {
    Args a(args);
    const int64_t dtype = a.integer();
    const void* weight = a.pointer<void>();
    const float *lora_a = a.pointer<float>(), *scaled_b = a.pointer<float>();
    float* out = a.pointer<float>();
    const int64_t num_rows = a.integer(), in_features = a.integer(), rank = a.integer(), threads = a.integer();
    if (dtype == lowbit::kFloat32) {
        merge(static_cast<const float*>(weight), lora_a, scaled_b, out, num_rows, in_features, rank, threads);
    } else {
        merge(static_cast<const uint16_t*>(weight), lora_a, scaled_b, out, num_rows, in_features, rank, threads);
    }
}
