// Losses. Each leaves one number a row or piece in `losses`, which `sum_parts` adds up and divides by how many there are. In
// gradients `grad` is that of the loss, a scalar in device memory, and `factor` what the mean makes of it. A label that is no
// class makes its row's loss and gradients NaN, or its row of targets, and its loss sets `bad` to 1.
#include "rows.cuh"

__device__ inline bool is_class(i64 label, i64 width) { return label >= 0 && label < width; }

__device__ inline bool is_class(i64 label, i64 width, int *bad) {
    if (is_class(label, width)) return true;
    *bad = 1;
    return false;
}

// Of `all` classes those from `start` on, of which there are `width`: 1 on each row's label and 0 on others.
extern "C" __global__ void one_hot(const i64 *labels, T *out, int *bad, i64 rows, i64 width, i64 start, i64 all) {
    for (i64 i = first_element(); i < rows * width; i += all_threads()) {
        const i64 label = labels[i / width];
        out[i] = stored(!is_class(label, all, bad) ? NAN_F : label == start + i % width ? 1.0f : 0.0f);
    }
}

// Negative log likelihood, from log-probabilities `y` (rows, width).
extern "C" __global__ void nll(const T *y, const i64 *labels, float *losses, int *bad, i64 rows, i64 width) {
    for (i64 row = first_element(); row < rows; row += all_threads()) {
        const i64 label = labels[row];
        losses[row] = is_class(label, width, bad) ? -wide(y[row * width + label]) : NAN_F;
    }
}

// How many classes come before each row's label where the largest score is first, and of equals the one that is listed first: -1 where its
// score is no number, or the label no class.
extern "C" __global__ void label_places(const T *in, const i64 *labels, float *places, i64 rows, i64 width) {
    __shared__ float room[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *x = in + row * width;
        const i64 label = labels[row];
        const float own = is_class(label, width) ? wide(x[label]) : NAN_F;
        float before = 0.0f;
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            const float other = wide(x[i]);
            before += other > own || (other == own && i < label) ? 1.0f : 0.0f;
        }
        before = sum_of_block(before, room);
        if (threadIdx.x == 0) places[row] = own == own ? before : -1.0f;
    }
}

extern "C" __global__ void nll_gradient(const i64 *labels, const T *grad, T *out, i64 rows, i64 width, float factor) {
    const float each = -factor * wide(*grad);
    for (i64 i = first_element(); i < rows * width; i += all_threads()) {
        const i64 label = labels[i / width];
        out[i] = stored(!is_class(label, width) ? NAN_F : label == i % width ? each : 0.0f);
    }
}

// Cross entropy of logits with labels; keeps of each row what is taken from its logits to make them the logarithm of their softmax.
// With `smoothing` s the target is 1 - s on the label and s / width on every class.
extern "C" __global__ void cross_entropy(const T *in, const i64 *labels, LogShift *shifts, float *losses, int *bad, i64 rows,
                                         i64 width, float smoothing) {
    __shared__ Normaliser of_rows[MAX_WARPS];
    __shared__ float room[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *x = in + row * width;
        const LogShift shift = log_shift(in, row, width, of_rows);
        float mean = 0.0f;
        if (smoothing != 0.0f) {
            float sum = 0.0f;
            for (i64 i = threadIdx.x; i < width; i += blockDim.x) sum += shift.of(wide(x[i]));
            mean = sum_of_block(sum, room) / (float)width;
        }
        if (threadIdx.x == 0) {
            shifts[row] = shift;
            const i64 label = labels[row];
            const float picked = is_class(label, width, bad) ? shift.of(wide(x[label])) : NAN_F;
            losses[row] = -((1.0f - smoothing) * picked + smoothing * mean);
        }
    }
}

// Softmax minus target, from the logits and what was kept of their rows.
extern "C" __global__ void cross_entropy_gradient(const T *in, const LogShift *shifts, const i64 *labels, const float *grad, T *out,
                                                  i64 rows, i64 width, float smoothing, float factor) {
    const float weight = factor * *grad, spread = smoothing / (float)width;
    along_rows(are_even(in, out), rows, width, [=](auto few, i64 i, i64 row, i64 c) {
        const auto x = taken<few>(in + i);
        const i64 label = labels[row];
        const LogShift shift = shifts[row];
        const float others = is_class(label, width) ? spread : NAN_F;
        put(out + i, made<few>([&](int j) {
                const float target = others + (label == c + j ? 1.0f - smoothing : 0.0f);
                return stored((exponential(shift.of(wide(x.of[j]))) - target) * weight);
            }));
    });
}

// A block for each `piece` elements: `losses` gets the sum of `f` over each.
template <class F> __device__ void sum_pairs(const T *x, const T *t, float *losses, i64 n, i64 piece, float *room, F f) {
    for (i64 p = blockIdx.x; p * piece < n; p += gridDim.x) {
        const i64 end = (p + 1) * piece < n ? (p + 1) * piece : n;
        float sum = 0.0f;
        pairs(x, t, p * piece, end - p * piece, [&](auto few, i64, auto x, auto t) {
            each<few>([&](int j) { sum += f(wide(x.of[j]), wide(t.of[j])); });
        });
        sum = sum_of_block(sum, room);
        if (threadIdx.x == 0) losses[p] = sum;
    }
}

extern "C" __global__ void squared_error(const T *x, const T *t, float *losses, i64 n, i64 piece) {
    __shared__ float room[MAX_WARPS];
    sum_pairs(x, t, losses, n, piece, room, [](float x, float t) { return (x - t) * (x - t); });
}

// `factor` is 2 over how many there are; less than 0 for the gradient of the target.
extern "C" __global__ void squared_error_gradient(const T *x, const T *t, const T *grad, T *out, i64 n, float factor) {
    const float each = factor * wide(*grad);
    zip(x, t, out, n, [=](float x, float t) { return (x - t) * each; });
}

// Binary cross entropy of logits, in the form that can't overflow.
extern "C" __global__ void binary_cross_entropy(const T *x, const T *t, float *losses, i64 n, i64 piece) {
    __shared__ float room[MAX_WARPS];
    sum_pairs(x, t, losses, n, piece, room,
              [](float x, float t) { return larger(0.0f, x) - x * t + log1pf(expf(-fabsf(x))); });
}

extern "C" __global__ void binary_cross_entropy_gradient(const T *x, const T *t, const T *grad, T *out, i64 n, float factor) {
    const float each = factor * wide(*grad);
    zip(x, t, out, n, [=](float x, float t) { return (1.0f / (1.0f + expf(-x)) - t) * each; });
}
