// The likeliest token of each row: argmax_i x . w_i over the output head, exactly as packed_linear's logits give it, at
// half the reading. The formula, its bounds and the layout: kernels/greedy_head.py.
//
// Integers are summed in any order, so the vectors' lanes run along the features: no sum across lanes, and the codes
// are read from the first byte to the last, which is what memory does best.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "lowbit.h"

namespace {

constexpr int kPanel = 64;           // features whose codes lie together: [K / 4, 64, 4] bytes
constexpr int kRows = 3;             // rows whose sums stay in registers: 3 x 2 digits x 4 vectors
constexpr int kPartsPerThread = 4;
constexpr int64_t kMaxCandidates = 1024;  // of a row in a part; beyond, every logit of the row is computed
constexpr int kScan = 256;                // logits that are computed at a time then
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kUnit = 0x1p-24;  // half a unit in the last place of float32, relative
// A float32 x below or above this is not screened: the products of scales and sums could leave the range of float32.
constexpr float kSmallest = 1e-15f, kLargest = 1e15f;

using Linear = void (*)(const int64_t*);

struct Head {
    const char* x;
    int64_t num_rows;
    const char* weight;  // [V, K] of dtype
    int64_t V, K;
    int64_t dtype;
    const uint8_t* codes;  // [ceil(V / 64), K4, 64, 4], each code plus 128
    const float* scales;   // [ceil(V / 64) * 64]
    const float* errors;   // |w - scale codes| of each feature, or more
    const float* norms;    // |w| and |scale codes| of each feature, or more
    Linear linear;         // packed_linear's kernel
    int64_t K4;            // K / 4, rounded up

    int64_t element_bytes() const { return dtype == lowbit::kBFloat16 ? 2 : 4; }
};

// A row of x in two digits: x = unit (256 high + low) + rest.
struct Digits {
    bool screened;
    float unit;
    float a, b;  // | logit - estimate | <= a errors + b norms
    int32_t offset_high, offset_low;  // what the 128 in each code adds to the sums
    const int8_t* high;               // [K4, 4]
    const int8_t* low;
};

struct Candidate {
    int32_t feature;
    float upper;
};

// What a part finds for a row: every feature whose upper bound reaches `lower`, the best lower bound so far.
struct Found {
    float lower;
    bool overflow;
    std::vector<Candidate> candidates;

    void reset(float known) { lower = known, overflow = false, candidates.clear(); }
    void add(int64_t feature, float upper) {
        if (overflow) return;
        if ((int64_t)candidates.size() == kMaxCandidates) {
            const auto hopeless = [this](const Candidate& c) { return c.upper < lower; };
            candidates.erase(std::remove_if(candidates.begin(), candidates.end(), hopeless), candidates.end());
            if ((int64_t)candidates.size() == kMaxCandidates) {
                overflow = true;
                return;
            }
        }
        candidates.push_back({(int32_t)feature, upper});
    }
};

float element(const Head& h, int64_t row, int64_t k) {
    if (h.dtype == lowbit::kBFloat16) return lowbit::from_bfloat16(((const uint16_t*)h.x)[row * h.K + k]);
    return ((const float*)h.x)[row * h.K + k];
}

Digits split(const Head& h, int64_t row, int8_t* high, int8_t* low, float* x) {
    float largest = 0;
    for (int64_t k = 0; k < h.K; k++) x[k] = element(h, row, k);
    for (int64_t k = 0; k < h.K; k++) {
        const float value = std::fabs(x[k]);
        largest = value <= largest ? largest : value;  // nan stays
    }
    Digits d{};
    d.screened = largest > kSmallest && largest < kLargest;
    if (!d.screened) return d;
    d.unit = largest / (127 * 256);
    d.high = high, d.low = low;
    double norm = 0, rest = 0;
    int64_t norm_high = 0, norm_low = 0;
    for (int64_t k = 0; k < h.K; k++) {
        const int32_t whole = (int32_t)(x[k] / d.unit + (x[k] < 0 ? -0.5f : 0.5f)), upper = (whole + 128) >> 8;
        const int32_t lower = whole - 256 * upper;
        high[k] = (int8_t)upper, low[k] = (int8_t)lower;
        d.offset_high += 128 * upper, d.offset_low += 128 * lower;
        norm_high += upper * upper, norm_low += lower * lower;
        const double left = (double)x[k] - (double)d.unit * whole;
        norm += (double)x[k] * x[k], rest += left * left;
    }
    for (int64_t k = h.K; k < 4 * h.K4; k++) high[k] = low[k] = 0;
    norm = std::sqrt(norm), rest = std::sqrt(rest);
    const double digits = d.unit * (256 * std::sqrt((double)norm_high) + std::sqrt((double)norm_low));
    // The logit itself is rounded: K products, K - 1 sums, and what bfloat16 units flush to zero. Then the estimate:
    // some 10 roundings relative to the digits' norm. Twice of all is for these lines' own roundings.
    d.a = (float)(norm * (1 + 64 * kUnit));
    d.b = (float)(rest * (1 + 64 * kUnit) + 2 * kUnit * ((h.K + 8) * norm + 16 * digits) + 1e-30);
    return d;
}

// ---- estimates of a panel of features ----------------------------------------------------------------------------

// upper[r][f] and lower[r][f] of R rows and 64 features.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
// As _mm512_dpbusd_epi32, around which gcc copies the sums.
inline __m512i multiply_add(__m512i sum, __m512i codes, __m512i digits) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(digits));
    return sum;
}

template <int R> void bounds(const Head& h, int64_t panel, const Digits* rows, float* upper, float* lower) {
    __m512i sums[R * 8];  // [row][vector][digit]: one flat array, so that gcc keeps it in registers
#pragma GCC unroll 32
    for (int i = 0; i < R * 8; i++) sums[i] = _mm512_setzero_si512();
    const uint8_t* codes = h.codes + panel * h.K4 * 4 * kPanel;
    const int64_t K4 = h.K4;
    const int8_t* digits[R * 2];
    for (int r = 0; r < R; r++) digits[2 * r] = rows[r].high, digits[2 * r + 1] = rows[r].low;
    for (int64_t k = 0; k < K4; k++, codes += 4 * kPanel) {
        __m512i x[R * 2];
#pragma GCC unroll 8
        for (int r = 0; r < R * 2; r++) {
            int32_t four;
            std::memcpy(&four, digits[r] + 4 * k, 4);
            x[r] = _mm512_set1_epi32(four);
        }
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            const __m512i w = _mm512_loadu_si512(codes + 64 * v);
#pragma GCC unroll 8
            for (int r = 0; r < R * 2; r++) {
                const int i = (r / 2 * 4 + v) * 2 + r % 2;
                sums[i] = multiply_add(sums[i], w, x[r]);
            }
        }
    }
    alignas(64) int32_t stored[R * 8 * 16];
#pragma GCC unroll 32
    for (int i = 0; i < R * 8; i++) _mm512_store_si512(stored + 16 * i, sums[i]);
    for (int r = 0; r < R; r++) {
        const __m512i offset_high = _mm512_set1_epi32(rows[r].offset_high);
        const __m512i offset_low = _mm512_set1_epi32(rows[r].offset_low);
        for (int v = 0; v < 4; v++) {
            const int64_t at = panel * kPanel + 16 * v;
            const __m512i high = _mm512_load_si512(stored + 32 * (4 * r + v));
            const __m512i low = _mm512_load_si512(stored + 32 * (4 * r + v) + 16);
            const __m512 top = _mm512_cvtepi32_ps(_mm512_sub_epi32(high, offset_high));
            const __m512 bottom = _mm512_cvtepi32_ps(_mm512_sub_epi32(low, offset_low));
            const __m512 sum = _mm512_add_ps(_mm512_mul_ps(top, _mm512_set1_ps(256)), bottom);
            const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(h.scales + at), _mm512_set1_ps(rows[r].unit));
            const __m512 estimate = _mm512_mul_ps(sum, scale);
            const __m512 from_weight = _mm512_mul_ps(_mm512_loadu_ps(h.errors + at), _mm512_set1_ps(rows[r].a));
            const __m512 from_x = _mm512_mul_ps(_mm512_loadu_ps(h.norms + at), _mm512_set1_ps(rows[r].b));
            const __m512 bound = _mm512_add_ps(from_weight, from_x);
            _mm512_storeu_ps(upper + r * kPanel + 16 * v, _mm512_add_ps(estimate, bound));
            _mm512_storeu_ps(lower + r * kPanel + 16 * v, _mm512_sub_ps(estimate, bound));
        }
    }
}
#else
template <int R> void bounds(const Head& h, int64_t panel, const Digits* rows, float* upper, float* lower) {
    for (int r = 0; r < R; r++) {
        const Digits& d = rows[r];
        const uint8_t* codes = h.codes + panel * h.K4 * 4 * kPanel;
        int32_t high[kPanel] = {}, low[kPanel] = {};
        for (int64_t k = 0; k < h.K4; k++, codes += 4 * kPanel) {
            int32_t x_high[4], x_low[4];
            for (int i = 0; i < 4; i++) x_high[i] = d.high[4 * k + i], x_low[i] = d.low[4 * k + i];
            for (int f = 0; f < kPanel; f++) {
                const uint8_t* w = codes + 4 * f;
                high[f] += w[0] * x_high[0] + w[1] * x_high[1] + w[2] * x_high[2] + w[3] * x_high[3];
                low[f] += w[0] * x_low[0] + w[1] * x_low[1] + w[2] * x_low[2] + w[3] * x_low[3];
            }
        }
        for (int f = 0; f < kPanel; f++) {
            const int64_t at = panel * kPanel + f;
            const float sum = (float)(high[f] - d.offset_high) * 256 + (float)(low[f] - d.offset_low);
            const float estimate = sum * (h.scales[at] * d.unit), bound = h.errors[at] * d.a + h.norms[at] * d.b;
            upper[r * kPanel + f] = estimate + bound, lower[r * kPanel + f] = estimate - bound;
        }
    }
}
#endif

void keep(const float* upper, const float* lower, int64_t first, int64_t count, Found& found) {
    float lanes[16];
    std::fill(lanes, lanes + 16, found.lower);
    for (int f = 0; f < kPanel; f += 16) {
        for (int i = 0; i < 16; i++) lanes[i] = lanes[i] < lower[f + i] ? lower[f + i] : lanes[i];
    }
    const float best = *std::max_element(lanes, lanes + 16);
    found.lower = best;
    int any = 0;
    for (int f = 0; f < kPanel; f++) any |= upper[f] >= best;
    if (!any) return;
    for (int64_t f = 0; f < count; f++) {
        if (upper[f] >= best) found.add(first + f, upper[f]);
    }
}

void screen(const Head& h, const Digits* digits, int64_t num_digits, int64_t begin, int64_t end, Found* const* found) {
    alignas(64) float upper[kRows * kPanel], lower[kRows * kPanel];
    for (int64_t panel = begin; panel < end; panel++) {
        const int64_t count = std::min<int64_t>(kPanel, h.V - panel * kPanel);
        for (int64_t row = 0; row < num_digits; row += kRows) {
            const int64_t rows = std::min<int64_t>(kRows, num_digits - row);
            switch (rows) {
                case 1: bounds<1>(h, panel, digits + row, upper, lower); break;
                case 2: bounds<2>(h, panel, digits + row, upper, lower); break;
                default: bounds<3>(h, panel, digits + row, upper, lower);
            }
            for (int64_t r = 0; r < rows; r++) {
                keep(upper + r * kPanel, lower + r * kPanel, panel * kPanel, count, *found[row + r]);
            }
        }
    }
}

// ---- exact logits ------------------------------------------------------------------------------------------------

// The best feature so far; nan beats all, as in numpy's argmax.
struct Best {
    int64_t feature = -1;
    float logit = -kInfinity;

    void offer(int64_t candidate, float value) {
        const bool better = value > logit || (value == logit && candidate < feature) || feature < 0;
        if (std::isnan(logit) || (!std::isnan(value) && !better)) return;
        feature = candidate, logit = value;
    }
};

// Logits of `count` features from `first` on, by packed_linear itself: the same bits.
void exact(const Head& h, int64_t row, int64_t first, int64_t count, float* logits) {
    const char* x = h.x + row * h.K * h.element_bytes();
    const char* weight = h.weight + first * h.K * h.element_bytes();
    const int64_t arguments[] = {(int64_t)x, 1,     (int64_t)weight, 0,  0,   0, 0, 0, (int64_t)logits, count,
                                 h.K,        h.dtype, lowbit::kFloat32, 1};
    h.linear(arguments);
}

Best scan(const Head& h, int64_t row, int64_t begin, int64_t end) {
    Best best;
    float logits[kScan];
    for (int64_t first = begin; first < end; first += kScan) {
        const int64_t count = std::min<int64_t>(kScan, end - first);
        exact(h, row, first, count, logits);
        for (int64_t i = 0; i < count; i++) best.offer(first + i, logits[i]);
    }
    return best;
}

Best scan_in_parallel(const Head& h, int64_t row, int64_t threads) {
    const int64_t num_scans = (h.V + kScan - 1) / kScan;
    std::vector<Best> bests(num_scans);
    lowbit::parallel_for(num_scans, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) bests[i] = scan(h, row, i * kScan, std::min(h.V, (i + 1) * kScan));
    });
    Best best;
    for (const Best& part : bests) best.offer(part.feature, part.logit);
    return best;
}

}  // namespace

// x, num_rows, weight, V, K, dtype, codes, scales, errors, norms, packed_linear's address, tokens [num_rows] int64 (-1:
// no finite maximum), counts [num_rows] int64 of logits that were computed, threads
extern "C" void greedy_head(const int64_t* boxed) {
    lowbit::Args args(boxed);
    Head h;
    h.x = args.pointer<const char>(), h.num_rows = args.integer(), h.weight = args.pointer<const char>();
    h.V = args.integer(), h.K = args.integer(), h.dtype = args.integer();
    h.codes = args.pointer<const uint8_t>(), h.scales = args.pointer<const float>();
    h.errors = args.pointer<const float>(), h.norms = args.pointer<const float>();
    h.linear = reinterpret_cast<Linear>(args.integer());
    int64_t* tokens = args.pointer<int64_t>();
    int64_t* counts = args.pointer<int64_t>();
    const int64_t threads = args.integer();
    h.K4 = (h.K + 3) / 4;

    static thread_local std::vector<int8_t> storage;
    static thread_local std::vector<Digits> digits;
    static thread_local std::vector<int64_t> rows;  // of x, that `digits` belong to
    static thread_local std::vector<Found> found;   // [part][row]; capacities stay from call to call
    static thread_local std::vector<float> x;
    storage.resize(h.num_rows * 8 * h.K4), x.resize(h.K);
    digits.clear(), rows.clear();
    for (int64_t row = 0; row < h.num_rows; row++) {
        int8_t* high = storage.data() + row * 8 * h.K4;
        const Digits d = split(h, row, high, high + 4 * h.K4, x.data());
        if (d.screened) digits.push_back(d), rows.push_back(row);
    }
    const int64_t num_digits = digits.size(), num_panels = (h.V + kPanel - 1) / kPanel;
    const int64_t num_parts = std::min(num_panels, lowbit::thread_count(threads) * kPartsPerThread);
    if ((int64_t)found.size() < num_parts * num_digits) found.resize(num_parts * num_digits);
    // What a part learns helps those that begin later; the answer does not depend on it.
    std::vector<std::atomic<float>> known(num_digits);
    for (auto& lower : known) lower.store(-kInfinity, std::memory_order_relaxed);
    Found* const all_found = found.data();
    const Digits* const all_digits = digits.data();
    lowbit::parallel_for(num_digits ? num_parts : 0, threads, [&](int64_t begin, int64_t end) {
        std::vector<Found*> mine(num_digits);
        for (int64_t part = begin; part < end; part++) {
            for (int64_t i = 0; i < num_digits; i++) {
                mine[i] = all_found + part * num_digits + i;
                mine[i]->reset(known[i].load(std::memory_order_relaxed));
            }
            screen(h, all_digits, num_digits, num_panels * part / num_parts, num_panels * (part + 1) / num_parts,
                   mine.data());
            for (int64_t i = 0; i < num_digits; i++) {
                float lower = known[i].load(std::memory_order_relaxed);
                while (lower < mine[i]->lower && !known[i].compare_exchange_weak(lower, mine[i]->lower)) {}
            }
        }
    });
    for (int64_t row = 0; row < h.num_rows; row++) counts[row] = -1;
    const int64_t* const all_rows = rows.data();
    lowbit::parallel_for(num_digits, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const float lower = known[i].load(std::memory_order_relaxed);
            Best best;
            int64_t count = 0;
            for (int64_t part = 0; part < num_parts && count >= 0; part++) {
                const Found& f = all_found[part * num_digits + i];
                if (f.overflow) count = -1;
                else for (const Candidate& c : f.candidates) {
                    if (c.upper < lower) continue;
                    float logit;
                    exact(h, all_rows[i], c.feature, 1, &logit);
                    best.offer(c.feature, logit), count++;
                }
            }
            counts[all_rows[i]] = count;
            tokens[all_rows[i]] = std::isfinite(best.logit) ? best.feature : -1;
        }
    });
    for (int64_t row = 0; row < h.num_rows; row++) {
        if (counts[row] >= 0) continue;
        const Best best = scan_in_parallel(h, row, threads);
        counts[row] = h.V, tokens[row] = std::isfinite(best.logit) ? best.feature : -1;
    }
}
