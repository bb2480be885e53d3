// Attention for training on CPUs, forward and backward. Formula, layout and the contract of invariance are in
// kernels/attention.py.
//
// Scores are computed transposed: a register tile is some keys (rows, broadcast) by some queries (lanes). The softmax
// then runs down the lanes and never across them, and its result is in both shapes that the next products need: as rows
// of keys for dv and dk, and as pairs of keys by query for the output and dq. Only queries are transposed, once for
// all keys they meet.
#include "attention.h"

#include <cmath>

namespace {

// Keys whose gradients one task sums. Longer documents take kMaxChunks chunks, so that there are tasks for all threads.
// Their number must not depend on the threads, and memory for each chunk's part of dq grows with it. Measured, 2 x 512
// rows: chunks of 256 take 1.2 to 1.5 times as long, for the parts of dq.
constexpr int64_t kMinChunk = 512, kMaxChunks = 4;

// ---- forward -----------------------------------------------------------------------------------------------------

// The heads of one KV head for a tile of queries.
template <class Dot, typename T> class Forward : Tile<Dot> {
    using Base = Tile<Dot>;
    using typename Base::Element;
    using Base::p, Base::steps, Base::width, Base::queries, Base::vectors, Base::keys, Base::offset;

  public:
    Forward(const Problem& problem, const Item& item, Scratch& scratch) : Base(problem), item_(item) {
        const int64_t group = p.group();
        scratch.lay_out([&](Scratch& s) {
            s.room(k_, kKeys * steps), s.room(v_, kKeys / Dot::kPair * width);
            s.room(scores_, kKeys * kQueries), s.room(weights_, kKeys / Dot::kPair * kQueries);
            s.room(q_, group * steps * kQueries), s.room(sums_, group * kQueries * width);
            s.room(peaks_, group * kQueries), s.room(norms_, group * kQueries);
        });
    }

    void run() {
        this->place_queries(item_.begin, item_.length);
        const int64_t group = p.group(), stride = p.stride(), row = item_.first + item_.begin;
        const T* qkv = static_cast<const T*>(p.qkv);
        for (int64_t g = 0; g < group; g++) {
            Dot::pack_columns(qkv + row * stride + (item_.kv_head * group + g) * p.head_dim, stride, queries,
                              vectors * kLanes, p.head_dim, q_ + g * steps * kQueries);
        }
        std::fill_n(sums_, group * kQueries * width, 0.0f);
        std::fill_n(peaks_, group * kQueries, -kInfinity);
        std::fill_n(norms_, group * kQueries, 0.0f);
        const int64_t end = item_.begin + queries;
        for (int64_t key = std::max<int64_t>(0, item_.begin - p.window + 1) / kKeys * kKeys; key < end; key += kKeys) {
            this->place_keys(key, kKeys);
            pack_keys(qkv + (item_.first + key) * stride, std::min<int64_t>(kKeys, end - key));
            for (int64_t g = 0; g < group; g++) attend(g);
        }
        for (int64_t g = 0; g < group; g++) finish(g);
    }

  private:
    void pack_keys(const T* rows, int64_t count) {
        const T* k = rows + p.key_column(item_.kv_head);
        for (int64_t n = 0; n < count; n++) Dot::pack_row(k + n * p.stride(), p.head_dim, k_ + n * steps);
        std::fill(k_ + count * steps, k_ + keys * steps, Element(0));
        Dot::pack_pairs(rows + p.value_column(item_.kv_head), p.stride(), count, keys, p.head_dim, width, v_);
    }

    void attend(int64_t g) {
        const Element* q = q_ + g * steps * kQueries;
        for_strips(keys, [&](int64_t n, int rows) {
            const int64_t v = this->first_vector(n);
            strip_product<Dot, false, false>(rows, vectors - v, k_ + n * steps, steps, q + v * kLanes,
                                             int64_t{kQueries}, steps, scores_ + n * kQueries + v * kLanes,
                                             int64_t{kQueries});
        });
        alignas(64) float rescale[kQueries];
        for (int64_t v = 0; v < vectors; v++) {
            const Vector factor = this->masked ? softmax<true>(g, v) : softmax<false>(g, v);
            store_vector(rescale + v * kLanes, factor);
        }
        float* sums = sums_ + g * kQueries * width;
        for (int64_t m = 0; m < queries; m++) {
            if (rescale[m] == 1) continue;
            for (int64_t d = 0; d < width; d += kLanes) {
                store_vector(sums + m * width + d, load_vector(sums + m * width + d) * splat(rescale[m]));
            }
        }
        for_strips(round_up(queries, 2), [&](int64_t m, int rows) {
            strip_product<Dot, true, true>(rows, this->width_vectors, weights_ + m, int64_t{kQueries}, v_, width,
                                           this->seen_keys(m + rows) / Dot::kPair, sums + m * width, width);
        });
    }

    // Scores of 16 queries -> weights 2^(score - peak), zero where a query does not see a key; returns the factor that
    // brings the earlier sums to the new peak.
    template <bool kMasked> Vector softmax(int64_t g, int64_t v) {
        const int64_t count = this->seen_keys((v + 1) * kLanes);
        const float* scores = scores_ + v * kLanes;
        float *peaks = peaks_ + g * kQueries + v * kLanes, *norms = norms_ + g * kQueries + v * kLanes;
        const Vector factor = splat(this->factor), old_peak = load_vector(peaks);
        const auto score = [&](int64_t n) {
            const Vector value = load_vector(scores + n * kQueries) * factor;
            if constexpr (kMasked) return this->seen(v, n) ? value : splat(-kInfinity);
            return value;
        };
        Vector peak = old_peak, other = old_peak;
        for (int64_t n = 0; n < count; n += 2) peak = larger(score(n), peak), other = larger(score(n + 1), other);
        peak = larger(peak, other);
        const Vector shift = peak == -kInfinity ? Vector{} : peak;  // -inf - -inf would be nan
        const Vector rescale = exp2(old_peak - shift);
        Vector norm = load_vector(norms) * rescale, other_norm = {};
        Element* weights = weights_ + v * kLanes;
        int64_t n = 0;
        for (; n < count; n += 2) {
            const Vector first = exp2(score(n) - shift), second = exp2(score(n + 1) - shift);
            norm += first, other_norm += second;
            Dot::store_pair(first, second, weights + n / Dot::kPair * kQueries, kQueries);
        }
        // A strip of queries that begins in this vector reads keys up to its own last one.
        for (; n < std::min(keys, count + kMaxRows); n += 2) {
            Dot::store_pair(Vector{}, Vector{}, weights + n / Dot::kPair * kQueries, kQueries);
        }
        store_vector(norms, norm + other_norm);
        store_vector(peaks, peak);
        return rescale;
    }

    void finish(int64_t g) {
        const int64_t head = item_.kv_head * p.group() + g, row = item_.first + item_.begin;
        for (int64_t m = 0; m < queries; m++) {
            T* out = static_cast<T*>(p.out) + (row + m) * p.out_stride() + head * p.head_dim;
            const float *sums = sums_ + (g * kQueries + m) * width, norm = norms_[g * kQueries + m];
            int64_t d = 0;
            for (; d + kLanes <= p.head_dim; d += kLanes) store_vector(out + d, load_vector(sums + d) / splat(norm));
            for (; d < p.head_dim; d++) lowbit::store(out + d, sums[d] / norm);
            p.lse[head * p.num_rows + row + m] = peaks_[g * kQueries + m] * kLn2 + std::log(norm);
        }
    }

    const Item& item_;
    Element *k_, *v_, *q_, *weights_;  // [kKeys][steps], [kKeys / pair][width], [group][steps][kQueries], ...
    float *scores_, *sums_, *peaks_, *norms_;
};

// ---- backward ----------------------------------------------------------------------------------------------------

int64_t chunk_keys(int64_t length) {
    return std::max(kMinChunk, round_up((length + kMaxChunks - 1) / kMaxChunks, std::max(kQueries, kKeys)));
}

// dk and dv of a chunk of keys, and what the chunk adds to dq: all of it in a document of one chunk.
template <class Dot, typename T> class Backward : Tile<Dot> {
    using Base = Tile<Dot>;
    using typename Base::Element;
    using Base::p, Base::steps, Base::width, Base::queries, Base::vectors, Base::keys, Base::offset;

  public:
    Backward(const Problem& problem, const Item& item, Scratch& scratch)
        : Base(problem), item_(item), padded_(round_up(item.count, 2)) {
        scratch.lay_out([&](Scratch& s) {
            s.room(k_, padded_ * steps), s.room(v_, padded_ * steps), s.room(k_pairs_, padded_ / Dot::kPair * width);
            s.room(dk_, padded_ * width), s.room(dv_, padded_ * width), s.room(dq_, kQueries * width);
            s.room(q_, steps * kQueries), s.room(do_, steps * kQueries);
            s.room(q_pairs_, kQueries / Dot::kPair * width), s.room(do_pairs_, kQueries / Dot::kPair * width);
            s.room(p_rows_, kKeys * kQueries / Dot::kPair), s.room(ds_rows_, kKeys * kQueries / Dot::kPair);
            s.room(ds_pairs_, kKeys * kQueries / Dot::kPair);
            s.room(scores_, kMaxRows * kQueries), s.room(dp_, kMaxRows * kQueries);
            s.room(lse_, kQueries), s.room(delta_, kQueries);
        });
        if (Dot::kPair == 1) ds_pairs_ = ds_rows_;
    }

    void run() {
        pack_keys();
        const int64_t end = std::min(item_.length, item_.begin + item_.count - 1 + p.window);
        for (int64_t g = 0; g < p.group(); g++) {
            for (int64_t query = item_.begin / kQueries * kQueries; query < end; query += kQueries) {
                pack_queries(item_.kv_head * p.group() + g, query);
                const int64_t stop = std::min(item_.begin + item_.count, query + queries);
                const int64_t seen = std::max<int64_t>(0, query - p.window + 1) / kKeys * kKeys;
                for (int64_t key = std::max(item_.begin, seen); key < stop; key += kKeys) {
                    this->place_keys(key, std::min<int64_t>(kKeys, item_.begin + item_.count - key));
                    add_block(key - item_.begin);
                }
                store_dq(item_.kv_head * p.group() + g, query);
            }
        }
        T* rows = static_cast<T*>(p.dqkv) + (item_.first + item_.begin) * p.stride();
        for (int64_t n = 0; n < item_.count; n++, rows += p.stride()) {
            store_row(dk_ + n * width, p.scale, rows + p.key_column(item_.kv_head));
            store_row(dv_ + n * width, 1.0f, rows + p.value_column(item_.kv_head));
        }
    }

  private:
    void pack_keys() {
        const T* rows = static_cast<const T*>(p.qkv) + (item_.first + item_.begin) * p.stride();
        const T *k = rows + p.key_column(item_.kv_head), *v = rows + p.value_column(item_.kv_head);
        for (int64_t n = 0; n < item_.count; n++) {
            Dot::pack_row(k + n * p.stride(), p.head_dim, k_ + n * steps);
            Dot::pack_row(v + n * p.stride(), p.head_dim, v_ + n * steps);
        }
        std::fill(k_ + item_.count * steps, k_ + padded_ * steps, Element(0));
        std::fill(v_ + item_.count * steps, v_ + padded_ * steps, Element(0));
        Dot::pack_pairs(k, p.stride(), item_.count, padded_, p.head_dim, width, k_pairs_);
        std::fill_n(dk_, padded_ * width, 0.0f);
        std::fill_n(dv_, padded_ * width, 0.0f);
    }

    void pack_queries(int64_t head, int64_t query) {
        this->place_queries(query, item_.length);
        const int64_t row = item_.first + query, padded = vectors * kLanes, stride = p.out_stride();
        const T* q = static_cast<const T*>(p.qkv) + row * p.stride() + head * p.head_dim;
        const T* grad = static_cast<const T*>(p.grad) + row * stride + head * p.head_dim;
        const T* out = static_cast<const T*>(p.out) + row * stride + head * p.head_dim;
        Dot::pack_columns(q, p.stride(), queries, padded, p.head_dim, q_);
        Dot::pack_columns(grad, stride, queries, padded, p.head_dim, do_);
        Dot::pack_pairs(q, p.stride(), queries, padded, p.head_dim, width, q_pairs_);
        Dot::pack_pairs(grad, stride, queries, padded, p.head_dim, width, do_pairs_);
        for (int64_t m = 0; m < padded; m++) {  // 2^-inf: lanes behind the last query weigh nothing
            lse_[m] = m < queries ? p.lse[head * p.num_rows + row + m] * kLog2E : kInfinity;
            delta_[m] = m < queries ? dot(grad + m * stride, out + m * stride) : 0;
        }
        std::fill_n(dq_, kQueries * width, 0.0f);
    }

    float dot(const T* a, const T* b) const {
        Vector sum = {};
        int64_t d = 0;
        for (; d + kLanes <= p.head_dim; d += kLanes) sum = multiply_add(load_vector(a + d), load_vector(b + d), sum);
        float result = total(sum);
        for (; d < p.head_dim; d++) result += lowbit::load(a + d) * lowbit::load(b + d);
        return result;
    }

    // key: the block's first key in the chunk.
    void add_block(int64_t key) {
        constexpr int64_t kRow = kQueries / Dot::kPair;
        for_strips(keys, [&](int64_t n, int rows) {
            const int64_t v = this->first_vector(n), at = v * kLanes, stride = kQueries;
            strip_product<Dot, false, false>(rows, vectors - v, k_ + (key + n) * steps, steps, q_ + at, stride, steps,
                                             scores_ + at, stride);
            strip_product<Dot, false, false>(rows, vectors - v, v_ + (key + n) * steps, steps, do_ + at, stride, steps,
                                             dp_ + at, stride);
            if (this->masked) weigh<true>(n, rows, v);
            else weigh<false>(n, rows, v);
        });
        for_strips(keys, [&](int64_t n, int rows) {
            const int64_t start = std::max<int64_t>(0, offset + n) / Dot::kPair;
            const int64_t count = vectors * kLanes / Dot::kPair - start;
            strip_product<Dot, false, true>(rows, this->width_vectors, p_rows_ + n * kRow + start, kRow,
                                            do_pairs_ + start * width, width, count, dv_ + (key + n) * width, width);
            strip_product<Dot, false, true>(rows, this->width_vectors, ds_rows_ + n * kRow + start, kRow,
                                            q_pairs_ + start * width, width, count, dk_ + (key + n) * width, width);
        });
        for_strips(round_up(queries, 2), [&](int64_t m, int rows) {
            strip_product<Dot, true, true>(rows, this->width_vectors, ds_pairs_ + m, int64_t{kQueries},
                                           k_pairs_ + key / Dot::kPair * width, width,
                                           this->seen_keys(m + rows) / Dot::kPair, dq_ + m * width, width);
        });
    }

    // p and ds of a strip of keys, from its scores and dp, for the vectors from `from` on.
    template <bool kMasked> void weigh(int64_t n, int rows, int64_t from) {
        constexpr int64_t kRow = kQueries / Dot::kPair;
        const Vector factor = splat(this->factor);
        for (int64_t v = kMasked ? std::max<int64_t>(0, from - Base::kFill) : from; v < from; v++) {
            for (int r = 0; r < rows; r += Dot::kPair) {  // dq's strips may reach into these
                Element* pairs = ds_pairs_ + (n + r) / Dot::kPair * kQueries + v * kLanes;
                std::fill_n(pairs, kLanes, Element(0));
            }
        }
        for (int64_t v = from; v < vectors; v++) {
            const Vector lse = load_vector(lse_ + v * kLanes), delta = load_vector(delta_ + v * kLanes);
            for (int r = 0; r < rows; r += 2) {
                Vector p[2], ds[2];
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    const int64_t at = (r + i) * kQueries + v * kLanes;
                    // p is at most 1; a rounded lse of huge scores must not make it more.
                    p[i] = exp2(smaller(splat(0.0f), load_vector(scores_ + at) * factor - lse));
                    if constexpr (kMasked) p[i] = this->seen(v, n + r + i) ? p[i] : Vector{};
                    ds[i] = p[i] * (load_vector(dp_ + at) - delta);
                    if constexpr (kMasked) ds[i] = this->seen(v, n + r + i) ? ds[i] : Vector{};
                }
                const int64_t at = (n + r) * kRow + v * kLanes / Dot::kPair;
                Element* pairs = ds_pairs_ + (n + r) / Dot::kPair * kQueries + v * kLanes;
                Dot::store_rows(p[0], p[1], p_rows_ + at, kRow, nullptr);
                Dot::store_rows(ds[0], ds[1], ds_rows_ + at, kRow, pairs);
            }
        }
    }

    void store_dq(int64_t head, int64_t query) {
        const int64_t chunk = chunk_keys(item_.length);
        for (int64_t m = 0; m < queries; m++) {
            const int64_t row = item_.first + query + m;
            if (item_.length <= chunk) {
                store_row(dq_ + m * width, p.scale, static_cast<T*>(p.dqkv) + row * p.stride() + head * p.head_dim);
            } else {
                float* out = p.partial + (item_.begin / chunk * p.num_rows + row) * p.out_stride() + head * p.head_dim;
                std::copy_n(dq_ + m * width, p.head_dim, out);
            }
        }
    }

    void store_row(const float* sums, float factor, T* out) const {
        int64_t d = 0;
        for (; d + kLanes <= p.head_dim; d += kLanes) store_vector(out + d, load_vector(sums + d) * splat(factor));
        for (; d < p.head_dim; d++) lowbit::store(out + d, sums[d] * factor);
    }

    const Item& item_;
    const int64_t padded_;             // keys of the chunk, rounded up to even
    Element *k_, *v_, *k_pairs_;       // [padded][steps] twice, [padded / pair][width]
    Element *q_, *do_;                 // [steps][kQueries]
    Element *q_pairs_, *do_pairs_;     // [kQueries / pair][width]
    Element *p_rows_, *ds_rows_;       // [kKeys][kQueries / pair]
    Element* ds_pairs_;                // [kKeys / pair][kQueries]
    float *dk_, *dv_, *dq_;            // [padded][width] twice, [kQueries][width]
    float *scores_, *dp_;              // [kMaxRows][kQueries]
    float *lse_, *delta_;              // [kQueries]; lse of powers of 2
};

// dq of the rows of documents of several chunks: the chunks' parts in order.
template <typename T> void add_parts(const Problem& p, const Item& document) {
    const int64_t chunk = chunk_keys(document.length), size = p.out_stride(), part = p.num_rows * size;
    for (int64_t m = document.begin; m < document.begin + document.count; m++) {
        const int64_t tile = m / kQueries * kQueries, last = std::min<int64_t>(tile + kQueries, document.length) - 1;
        const int64_t begin = std::max<int64_t>(0, tile - p.window + 1) / kKeys * kKeys / chunk, end = last / chunk + 1;
        const float* parts = p.partial + (document.first + m) * size;
        T* out = static_cast<T*>(p.dqkv) + (document.first + m) * p.stride();
        for (int64_t d = 0; d < size; d++) {
            float sum = 0;
            for (int64_t c = begin; c < end; c++) sum += parts[c * part + d];
            lowbit::store(out + d, sum * p.scale);
        }
    }
}

// ---- tasks -------------------------------------------------------------------------------------------------------

// add(document's first row, its length) for all documents; f(item) on all items that this lists, the costliest first.
template <typename Add, typename F> void for_items(const Problem& p, Add add, F f) {
    static thread_local std::vector<Item> items;
    items.clear();
    for (int64_t b = 0; b < p.num_docs; b++) {
        const int64_t first = p.cu_seqlens[b], length = p.cu_seqlens[b + 1] - first;
        if (length > 0) add(items, first, length);
    }
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    const Item* list = items.data();  // items is the calling thread's
    const int64_t count = static_cast<int64_t>(items.size());
    lowbit::parallel_for(
        count, p.threads, [&](int64_t begin, int64_t end) { for (; begin < end; begin++) f(list[begin]); }, count);
}

template <class Dot, typename T> void forward(const Problem& p) {
    const auto add = [&](std::vector<Item>& items, int64_t first, int64_t length) {
        for (int64_t begin = 0; begin < length; begin += kQueries) {
            const int64_t count = std::min<int64_t>(kQueries, length - begin);
            const int64_t cost = count * std::min(begin + count, p.window + count);
            for (int64_t h = 0; h < p.num_kv_heads; h++) items.push_back({first, length, h, begin, count, cost});
        }
    };
    for_items(p, add, [&](const Item& item) {
        static thread_local Scratch scratch;
        Forward<Dot, T>(p, item, scratch).run();
    });
}

template <class Dot, typename T> void backward(const Problem& p) {
    const auto add_chunks = [&](std::vector<Item>& items, int64_t first, int64_t length) {
        const int64_t chunk = chunk_keys(length);
        for (int64_t begin = 0; begin < length; begin += chunk) {
            const int64_t count = std::min(chunk, length - begin);
            const int64_t cost = count * std::min(length - begin, p.window + count);
            for (int64_t h = 0; h < p.num_kv_heads; h++) items.push_back({first, length, h, begin, count, cost});
        }
    };
    for_items(p, add_chunks, [&](const Item& item) {
        static thread_local Scratch scratch;
        Backward<Dot, T>(p, item, scratch).run();
    });
    const auto add_tiles = [&](std::vector<Item>& items, int64_t first, int64_t length) {
        for (int64_t begin = 0; begin < length && length > chunk_keys(length); begin += kQueries) {
            items.push_back({first, length, 0, begin, std::min<int64_t>(kQueries, length - begin), 0});
        }
    };
    for_items(p, add_tiles, [&](const Item& item) { add_parts<T>(p, item); });
}

Problem read(Args& args) {
    Problem p{};
    p.qkv = args.pointer<void>(), p.cu_seqlens = args.pointer<int32_t>();
    p.num_rows = args.integer(), p.num_docs = args.integer();
    p.num_heads = args.integer(), p.num_kv_heads = args.integer(), p.head_dim = args.integer();
    p.scale = args.real(), p.window = args.integer();
    if (p.window == 0) p.window = int64_t{1} << 40;
    p.out = args.pointer<void>(), p.lse = args.pointer<float>();
    return p;
}

}  // namespace

// args: dtype of qkv, qkv, cu_seqlens, T, documents, num_heads, num_kv_heads, head_dim, scale, sliding_window or 0,
// out [T, num_heads * head_dim], lse [num_heads, T]
extern "C" void attention(const int64_t* raw) {
    Args args(raw);
    const int64_t dtype = args.integer();
    Problem p = read(args);
    p.threads = args.integer();
    if (dtype == lowbit::kFloat32) return forward<FloatDot, float>(p);
#if defined(LOWBIT_PAIR_DOT)
    return forward<PairDot, uint16_t>(p);
#else
    return forward<FloatDot, uint16_t>(p);
#endif
}

// args: as attention, then grad of out, dqkv of qkv's shape, float32 [4, T, num_heads * head_dim] that is used where a
// document has more than 512 rows
extern "C" void attention_backward(const int64_t* raw) {
    Args args(raw);
    const int64_t dtype = args.integer();
    Problem p = read(args);
    p.grad = args.pointer<void>(), p.dqkv = args.pointer<void>(), p.partial = args.pointer<float>();
    p.threads = args.integer();
    if (dtype == lowbit::kFloat32) return backward<FloatDot, float>(p);
#if defined(LOWBIT_PAIR_DOT)
    return backward<PairDot, uint16_t>(p);
#else
    return backward<FloatDot, uint16_t>(p);
#endif
}
