// The part of kernels/distill_loss.py between its matrix products: cross-entropy and divergence from a teacher of each
// row of logits, and the gradient of their mixture written over the logits, in their dtype.
//
// Against the k likeliest tokens of a teacher, those logits are taken out of the row first (-inf stands in their place),
// so that the mass of all others is a sum of its own, relative to its own largest logit: neither a difference of two
// sums near 1, nor 0 where the student is sure. Three passes over the row follow (largest logit, sums, gradient).

#include <vector>

#include "row_softmax.h"

namespace {

using lowbit::Args;

constexpr int64_t kSerialWork = 1 << 14;  // as in cross_entropy.cpp
constexpr double kNothing = -__builtin_inf();  // the log of no mass

struct Mixture {
    float cross_entropy, divergence;  // weights; the second has temperature^2 in it
    float inverse_temperature;
    bool reverse, with_grad;
};

struct Losses {
    double cross_entropy, divergence;
};

template <typename T> float largest(const T* row, int64_t size) {
    Floats partial[kVectors];
    for (Floats& p : partial) p = Floats{} + kMinusInfinity;
    for_vectors(size, [&](int j, int64_t i, auto count) {
        partial[j] = larger(load(row + i, count, kMinusInfinity), partial[j]);
    });
    return fold(partial, [](float a, float b) { return a > b ? a : b; });
}

// sum e^(beta (z - top)) over a row
template <typename T> float sum_of_exp(const T* row, int64_t size, float top, float beta) {
    Floats partial[kVectors] = {};
    for_vectors(size, [&](int j, int64_t i, auto count) {
        partial[j] += exp_of_negative((load(row + i, count, kMinusInfinity) - top) * beta);
    });
    return sum_of(partial);
}

inline double log_of_sum(double a, double b) {  // log(e^a + e^b); one may be -inf
    const double top = std::max(a, b);
    return top + std::log(std::exp(a - top) + std::exp(b - top));
}

// One outcome: what it adds to the divergence, and `slope`: the gradient to the logit of an outcome of one token.
struct Outcome {
    double log_p, log_q;  // teacher, student

    double divergence(bool reverse) const {
        const double weight = std::exp(reverse ? log_q : log_p);
        return weight == 0 ? 0 : weight * (reverse ? log_q - log_p : log_p - log_q);
    }
    double slope(bool reverse, double total) const {
        const double q = std::exp(log_q);
        if (!reverse) return q - std::exp(log_p);
        return q == 0 ? 0 : q * (log_q - log_p - total);
    }
};

// ids and log_probs of the teacher's k tokens, log_probs[k] of all others together; `taken` has room for k logits.
template <typename T>
Losses top_k_row(T* row, int64_t size, int64_t label, const int32_t* ids, const float* log_probs, int64_t k,
                 const Mixture& mix, float* taken) {
    const float beta = mix.inverse_temperature;
    const float at_label = label < 0 ? 0.0f : lowbit::load(row + label);
    float top = kMinusInfinity;
    for (int64_t i = 0; i < k; i++) {
        taken[i] = lowbit::load(row + ids[i]);
        top = std::max(top, taken[i]);
    }
    for (int64_t i = 0; i < k; i++) lowbit::store(row + ids[i], kMinusInfinity);
    double sum = 0, sum_cooled = 0;
    for (int64_t i = 0; i < k; i++) {
        sum += std::exp(double(taken[i]) - top);
        sum_cooled += std::exp((double(taken[i]) - top) * beta);
    }

    const bool has_rest = k < size;
    const float rest_top = has_rest ? largest(row, size) : 0.0f;
    const float rest_sum = has_rest ? sum_of_exp(row, size, rest_top, 1.0f) : 0.0f;
    const float rest_cooled = !has_rest ? 0.0f : beta == 1.0f ? rest_sum : sum_of_exp(row, size, rest_top, beta);
    const double log_rest = has_rest ? rest_top + std::log(double(rest_sum)) : kNothing;
    const double log_rest_cooled = has_rest ? double(rest_top) * beta + std::log(double(rest_cooled)) : kNothing;
    const double log_sum = log_of_sum(top + std::log(sum), log_rest);
    const double log_sum_cooled = log_of_sum(double(top) * beta + std::log(sum_cooled), log_rest_cooled);

    const auto outcome = [&](int64_t i) {
        return Outcome{log_probs[i], (i < k ? double(taken[i]) * beta : log_rest_cooled) - log_sum_cooled};
    };
    Losses losses{label < 0 ? 0.0 : log_sum - at_label, 0};
    for (int64_t i = 0; i <= k; i++) losses.divergence += outcome(i).divergence(mix.reverse);
    if (!mix.with_grad) return losses;

    const float weight = label < 0 ? 0.0f : mix.cross_entropy, slope = mix.divergence * beta;
    if (has_rest) {
        const float scale = weight * std::exp(log_rest - log_sum) / rest_sum;
        const float scale_cooled = slope * outcome(k).slope(mix.reverse, losses.divergence) / rest_cooled;
        const auto gradient = [=](Floats z) {
            const Floats below = z - rest_top, e = exp_of_negative(below);
            if (beta == 1.0f) return e * (scale + scale_cooled);
            return e * scale + exp_of_negative(below * beta) * scale_cooled;
        };
        for_vectors(size, [&](int, int64_t i, auto count) {
            store(row + i, count, gradient(load(row + i, count, 0.0f)));
        });
        if (label >= 0) lowbit::store(row + label, gradient(Floats{} + at_label)[0] - weight);
    }
    for (int64_t i = 0; i < k; i++) {
        const double q = std::exp(taken[i] - log_sum) - (ids[i] == label ? 1 : 0);
        lowbit::store(row + ids[i], float(weight * q + slope * outcome(i).slope(mix.reverse, losses.divergence)));
    }
    return losses;
}

// Against all logits of the teacher.
template <typename T> Losses whole_row(T* row, const T* teacher, int64_t size, int64_t label, const Mixture& mix) {
    const float beta = mix.inverse_temperature;
    const float top = largest(row, size), teacher_top = largest(teacher, size);
    const float sum = sum_of_exp(row, size, top, 1.0f);
    const float cooled = beta == 1.0f ? sum : sum_of_exp(row, size, top, beta);
    const float teacher_sum = sum_of_exp(teacher, size, teacher_top, beta);
    const float log_shift = std::log(double(teacher_sum)) - std::log(double(cooled));
    const float scale_q = 1.0f / cooled, scale_p = 1.0f / teacher_sum;
    const bool reverse = mix.reverse;
    // log q - log p, q and p of a vector of tokens
    const auto compare = [=](Floats z, Floats t, Floats& q, Floats& p) {
        const Floats student = (z - top) * beta, other = (t - teacher_top) * beta;
        q = exp_of_negative(student) * scale_q;
        p = exp_of_negative(other) * scale_p;
        return student - other + log_shift;
    };
    Floats partial[kVectors] = {};
    for_vectors(size, [&](int j, int64_t i, auto count) {
        Floats q, p;
        const Floats z = load(row + i, count, kMinusInfinity), t = load(teacher + i, count, kMinusInfinity);
        const Floats ratio = compare(z, t, q, p);
        const Floats weight = reverse ? q : -p;
        partial[j] += weight == 0.0f ? Floats{} : weight * ratio;  // of the lanes behind the row, ratio is nan
    });
    const float divergence = sum_of(partial);
    const float at_label = label < 0 ? 0.0f : lowbit::load(row + label);
    const Losses losses{label < 0 ? 0.0 : top + std::log(double(sum)) - at_label, divergence};
    if (!mix.with_grad) return losses;

    const float weight = label < 0 ? 0.0f : mix.cross_entropy, slope = mix.divergence * beta, scale = weight / sum;
    const auto gradient = [=](Floats z, Floats t) {
        Floats q, p;
        const Floats ratio = compare(z, t, q, p);
        const Floats g = exp_of_negative(z - top) * scale;
        return g + slope * (reverse ? (q == 0.0f ? Floats{} : q * (ratio - divergence)) : q - p);
    };
    const float at_teacher = label < 0 ? 0.0f : lowbit::load(teacher + label);
    for_vectors(size, [&](int, int64_t i, auto count) {
        store(row + i, count, gradient(load(row + i, count, 0.0f), load(teacher + i, count, 0.0f)));
    });
    if (label >= 0)
        lowbit::store(row + label, gradient(Floats{} + at_label, Floats{} + at_teacher)[0] - weight);
    return losses;
}

// The arguments that both have: rows, size, ce_weight, kl_weight (with temperature^2), 1 / temperature, reverse,
// with_grad, labels, losses.
struct Rows {
    int64_t rows, size;
    Mixture mix;
    const int64_t* labels;
    double* losses;  // [rows, 2]

    explicit Rows(Args& args) : rows(args.integer()), size(args.integer()) {
        mix.cross_entropy = args.real();
        mix.divergence = args.real();
        mix.inverse_temperature = args.real();
        mix.reverse = args.integer();
        mix.with_grad = args.integer();
        labels = args.pointer<int64_t>();
        losses = args.pointer<double>();
    }

    template <typename Row> void run(int64_t k, int64_t threads, Row row) const {
        lowbit::parallel_for(rows, rows * size > kSerialWork ? threads : 1, [&](int64_t begin, int64_t end) {
            std::vector<float> taken(k);
            for (int64_t i = begin; i < end; i++) {
                const Losses found = row(i, taken.data());
                losses[2 * i] = found.cross_entropy;
                losses[2 * i + 1] = found.divergence;
            }
        });
    }
};

template <typename T>
void top_k_rows(T* logits, const Rows& rows, const int32_t* ids, const float* log_probs, int64_t k, int64_t threads) {
    rows.run(k, threads, [&](int64_t i, float* taken) {
        return top_k_row(logits + i * rows.size, rows.size, rows.labels[i], ids + i * k, log_probs + i * (k + 1), k,
                         rows.mix, taken);
    });
}

template <typename T> void whole_rows(T* logits, const T* teacher, const Rows& rows, int64_t threads) {
    rows.run(0, threads, [&](int64_t i, float*) {
        return whole_row(logits + i * rows.size, teacher + i * rows.size, rows.size, rows.labels[i], rows.mix);
    });
}

}  // namespace

// dtype, logits, Rows, ids [rows, k] int32 in 0..size-1, log_probs [rows, k + 1] float32, k, threads.
extern "C" void distill_top_k(const int64_t* boxed) {
    Args args(boxed);
    const bool bfloat16 = args.integer() == lowbit::kBFloat16;
    void* logits = args.pointer<void>();
    const Rows rows(args);
    const int32_t* ids = args.pointer<int32_t>();
    const float* log_probs = args.pointer<float>();
    const int64_t k = args.integer(), threads = args.integer();
    if (bfloat16) top_k_rows(static_cast<uint16_t*>(logits), rows, ids, log_probs, k, threads);
    else top_k_rows(static_cast<float*>(logits), rows, ids, log_probs, k, threads);
}

// dtype, logits, Rows, the teacher's logits, threads.
extern "C" void distill_whole(const int64_t* boxed) {
    Args args(boxed);
    const bool bfloat16 = args.integer() == lowbit::kBFloat16;
    void* logits = args.pointer<void>();
    const Rows rows(args);
    void* teacher = args.pointer<void>();
    const int64_t threads = args.integer();
    if (bfloat16) whole_rows(static_cast<uint16_t*>(logits), static_cast<uint16_t*>(teacher), rows, threads);
    else whole_rows(static_cast<float*>(logits), static_cast<float*>(teacher), rows, threads);
}
