// The part of kernels/cross_entropy.py between its matrix products: the loss of each row of logits, and the gradient of
// the loss written over the logits, in their dtype, ready for the next product.
//
// Three passes over a row (largest logit, sums, gradient); the second-level cache holds it from the first to the last:
// a row of 49152 bfloat16 logits has 98 KB.

#include "row_softmax.h"

namespace {

using lowbit::Args;

constexpr int64_t kSerialWork = 1 << 14;  // so many logits are 10 us on one Zen 4 core; fewer are not worth a thread

struct Loss {
    float z_loss, label_smoothing, logit_scale, inverse_softcap;  // inverse_softcap 0: no cap
};

// The loss of one row; `row` becomes its gradient to what the product gave, before scale and cap.
template <typename T> double loss_of_row(T* row, int64_t size, int64_t label, const Loss& options, bool with_grad) {
    Floats partial[kVectors], logits[kVectors] = {};
    for (Floats& p : partial) p = Floats{} + kMinusInfinity;
    for_vectors(size, [&](int j, int64_t i, auto count) {
        partial[j] = larger(load(row + i, count, kMinusInfinity), partial[j]);
    });
    const float top = fold(partial, [](float a, float b) { return a > b ? a : b; });
    for (Floats& p : partial) p = Floats{};
    for_vectors(size, [&](int j, int64_t i, auto count) {
        partial[j] += exp_of_negative(load(row + i, count, kMinusInfinity) - top);
    });
    const float sum = sum_of(partial);
    const double log_sum = static_cast<double>(top) + std::log(static_cast<double>(sum));
    const float at_label = lowbit::load(row + label);
    double loss = log_sum - at_label + options.z_loss * log_sum * log_sum;
    if (options.label_smoothing != 0.0f) {
        for_vectors(size, [&](int j, int64_t i, auto count) { logits[j] += load(row + i, count, 0.0f); });
        loss += options.label_smoothing * (at_label - sum_of(logits) / static_cast<double>(size));
    }
    if (!with_grad) return loss;

    const float factor = static_cast<float>((1.0 + 2.0 * options.z_loss * log_sum) / sum);
    const float spread = options.label_smoothing / static_cast<float>(size);
    const float at_label_target = 1.0f - options.label_smoothing + spread;
    const float cap = options.inverse_softcap, scale = options.logit_scale;
    const auto gradient = [=](Floats z, float target) {
        Floats g = exp_of_negative(z - top) * factor - target;
        if (cap != 0.0f) g *= 1.0f - (z * cap) * (z * cap);  // of cap * tanh(x / cap)
        return g * scale;
    };
    for_vectors(size, [&](int, int64_t i, auto count) {
        store(row + i, count, gradient(load(row + i, count, 0.0f), spread));
    });
    lowbit::store(row + label, gradient(Floats{} + at_label, at_label_target)[0]);
    return loss;
}

template <typename T>
void softmax_gradient(T* logits, int64_t rows, int64_t size, const int64_t* labels, double* losses, const Loss& options,
                      bool with_grad, int64_t threads) {
    lowbit::parallel_for(rows, rows * size > kSerialWork ? threads : 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++)
            losses[row] = loss_of_row(logits + row * size, size, labels[row], options, with_grad);
    });
}

}  // namespace

// dtype, logits, rows, size, labels, losses, z_loss, label_smoothing, logit_scale, 1 / softcap or 0, with_grad,
// threads. Labels are in 0..size-1.
extern "C" void softmax_gradient(const int64_t* boxed) {
    Args args(boxed);
    const bool bfloat16 = args.integer() == lowbit::kBFloat16;
    void* logits = args.pointer<void>();
    const int64_t rows = args.integer(), size = args.integer();
    const int64_t* labels = args.pointer<int64_t>();
    double* losses = args.pointer<double>();
    const float z_loss = args.real(), label_smoothing = args.real(), logit_scale = args.real();
    const Loss options{z_loss, label_smoothing, logit_scale, args.real()};
    const bool with_grad = args.integer();
    const int64_t threads = args.integer();
    if (bfloat16)
        softmax_gradient(static_cast<uint16_t*>(logits), rows, size, labels, losses, options, with_grad, threads);
    else
        softmax_gradient(static_cast<float*>(logits), rows, size, labels, losses, options, with_grad, threads);
}
