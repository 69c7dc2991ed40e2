// Batch normalisation of rows of `width` channels, as images are whose channels run fastest. What follows it in a residual network,
// a sum with the shortcut and a ReLU, is done in the same pass, and so is their part of the gradient. Statistics of a channel, its
// weight and its bias are in float; what is merged over pieces, and may be summed over ranks, is in double.
#include "columns.cuh"
#include "packs.cuh"

// Each channel's mean and sum of squared distances from it, piece by piece: (pieces, width) each.
extern "C" __global__ void batch_moments(const T *x, float *means, float *squares, i64 rows, i64 width, i64 piece) {
    __shared__ float room[1][LANES][COLUMNS];
    sums_of_columns<1>(
        rows, width, piece, room, [=](i64 row, i64 column, float(&sums)[1]) { sums[0] += wide(x[row * width + column]); },
        [=](i64 p, i64 column, const float(&sums)[1]) {
            const i64 left = rows - p * piece;
            means[p * width + column] = sums[0] / (float)(left < piece ? left : piece);
        });
    // The blocks of a column's piece are the same both times, and there is a barrier between.
    sums_of_columns<1>(
        rows, width, piece, room,
        [=](i64 row, i64 column, float(&sums)[1]) {
            const float distance = wide(x[row * width + column]) - means[row / piece * width + column];
            sums[0] += distance * distance;
        },
        [=](i64 p, i64 column, const float(&sums)[1]) { squares[p * width + column] = sums[0]; });
}

struct Moments {
    double count;
    double mean;
    double square;
};

__device__ inline Moments of_lane(Moments mine, int mask) {
    return {__shfl_xor_sync(0xffffffffu, mine.count, mask), __shfl_xor_sync(0xffffffffu, mine.mean, mask),
            __shfl_xor_sync(0xffffffffu, mine.square, mask)};
}

// Those of two parts together, as Chan, Golub and LeVeque do.
__device__ inline Moments merged(Moments a, Moments b) {
    const double count = a.count + b.count;
    if (count == 0.0) return a;
    const double distance = b.mean - a.mean;
    return {count, a.mean + distance * b.count / count, a.square + b.square + distance * distance * a.count * b.count / count};
}

// `moments` (2, width) = each channel's mean and sum of squared distances, from the pieces of `batch_moments`.
extern "C" __global__ void merge_moments(const float *means, const float *squares, double *moments, i64 rows, i64 width, i64 piece) {
    __shared__ Moments room[MAX_WARPS];
    const i64 n_pieces = (rows + piece - 1) / piece;
    for (i64 c = blockIdx.x; c < width; c += gridDim.x) {
        Moments mine = {0.0, 0.0, 0.0};
        for (i64 p = threadIdx.x; p < n_pieces; p += blockDim.x) {
            const i64 left = rows - p * piece;
            mine = merged(mine, {(double)(left < piece ? left : piece), means[p * width + c], squares[p * width + c]});
        }
        // The butterfly joins pairs in both orders, whose bits may differ: all go by the first thread's.
        mine = joined(mine, room, merged);
        if (threadIdx.x == 0) moments[c] = mine.mean, moments[width + c] = mine.square;
    }
}

// The mean, the variance and 1/std of each channel, from moments of `count` values.
extern "C" __global__ void batch_statistics(const double *moments, float *means, float *variances, float *scales, i64 width,
                                            double count, double eps) {
    for (i64 c = first_element(); c < width; c += all_threads()) {
        const double variance = moments[width + c] / count;
        means[c] = (float)moments[c];
        variances[c] = (float)variance;
        scales[c] = (float)(1.0 / sqrt((double)variances[c] + eps));
    }
}

// 1/std of given variances.
extern "C" __global__ void batch_scales(const float *variances, float *scales, i64 width, double eps) {
    for (i64 c = first_element(); c < width; c += all_threads()) scales[c] = (float)(1.0 / sqrt((double)variances[c] + eps));
}

// `out = (x - mean) scale weight + bias`, plus `plus`, cut off below zero if `relu` isn't 0. Weight, bias and `plus` may be null.
extern "C" __global__ void batch_normalise(const T *x, const float *means, const float *scales, const float *weight, const float *bias,
                                           const T *plus, T *out, i64 rows, i64 width, i64 relu) {
    along_rows(are_even(x, plus, out), rows, width, [=](auto few, i64 i, i64, i64 c) {
        const auto in = taken<few>(x + i);
        const auto added = taken_or_zeros<few>(plus, i);
        const auto mean = taken<few>(means + c), scale = taken<few>(scales + c);
        const auto factor = taken_or_zeros<few>(weight, c);
        const auto shift = taken_or_zeros<few>(bias, c);
        put(out + i, made<few>([&](int j) {
                const float mul = weight ? scale.of[j] * factor.of[j] : scale.of[j];
                float y = (wide(in.of[j]) - mean.of[j]) * mul + (bias ? shift.of[j] : 0.0f);
                if (plus) y += wide(added.of[j]);
                return stored(relu && y <= 0.0f ? 0.0f : y);
            }));
    });
}

__device__ inline float passed(const T *grad, const T *mask, i64 i) {
    return mask ? where_relu_passed(wide(grad[i]), wide(mask[i])) : wide(grad[i]);
}

// Each channel's sum of grad, and of grad (x - mean), piece by piece. Where `mask`, the output of a fused ReLU, isn't null, only
// what that passed on counts.
extern "C" __global__ void batch_sums(const T *x, const T *grad, const T *mask, const float *means, float *grad_parts,
                                      float *product_parts, i64 rows, i64 width, i64 piece) {
    __shared__ float room[2][LANES][COLUMNS];
    sums_of_columns<2>(
        rows, width, piece, room,
        [=](i64 row, i64 column, float(&sums)[2]) {
            const i64 i = row * width + column;
            const float g = passed(grad, mask, i);
            sums[0] += g;
            sums[1] += g * (wide(x[i]) - means[column]);
        },
        [=](i64 p, i64 column, const float(&sums)[2]) {
            grad_parts[p * width + column] = sums[0];
            product_parts[p * width + column] = sums[1];
        });
}

// `sums` (2, width) = the sums over the pieces of `batch_sums`.
extern "C" __global__ void merge_sums(const float *grad_parts, const float *product_parts, double *sums, i64 n_pieces, i64 width) {
    __shared__ double room[MAX_WARPS];
    for (i64 c = blockIdx.x; c < width; c += gridDim.x) {
        double grads = 0.0, products = 0.0;
        for (i64 p = threadIdx.x; p < n_pieces; p += blockDim.x) {
            grads += (double)grad_parts[p * width + c];
            products += (double)product_parts[p * width + c];
        }
        grads = sum_of_block(grads, room);
        products = sum_of_block(products, room);
        if (threadIdx.x == 0) sums[c] = grads, sums[width + c] = products;
    }
}

// The gradients of weight and bias, from the sums of this part of the batch; either may be null.
extern "C" __global__ void batch_channel_gradients(const double *sums, const float *scales, float *weight, float *bias, i64 width) {
    for (i64 c = first_element(); c < width; c += all_threads()) {
        if (weight) weight[c] = (float)(sums[width + c] * (double)scales[c]);
        if (bias) bias[c] = (float)sums[c];
    }
}

// What the gradient of the input needs of each channel: `factors` (3, width) = weight times scale, the mean of grad, and the mean of
// grad (x - mean) times the scale squared. The means are 0 where `sums` is null: then the statistics were given.
extern "C" __global__ void batch_factors(const double *sums, const float *scales, const float *weight, float *factors, i64 width,
                                         double count) {
    for (i64 c = first_element(); c < width; c += all_threads()) {
        const double scale = (double)scales[c];
        factors[c] = weight ? scales[c] * weight[c] : scales[c];
        factors[width + c] = sums ? (float)(sums[c] / count) : 0.0f;
        factors[2 * width + c] = sums ? (float)(sums[width + c] / count * scale * scale) : 0.0f;
    }
}

// The gradients of the input and, where `plus` isn't null, of what was added.
extern "C" __global__ void batch_input_gradient(const T *x, const T *grad, const T *mask, const float *means, const float *factors,
                                                T *out, T *plus, i64 rows, i64 width) {
    along_rows(are_even(x, grad, mask, out, plus), rows, width, [=](auto few, i64 i, i64, i64 c) {
        const auto in = taken<few>(x + i), gradient = taken<few>(grad + i);
        const auto output = taken_or_zeros<few>(mask, i);
        const auto mean = taken<few>(means + c), factor = taken<few>(factors + c);
        const auto less = taken<few>(factors + width + c), slope = taken<few>(factors + 2 * width + c);
        const auto g = made<few>([&](int j) {
            const float own = wide(gradient.of[j]);
            return mask ? where_relu_passed(own, wide(output.of[j])) : own;
        });
        put(out + i, made<few>([&](int j) {
                return stored(factor.of[j] * (g.of[j] - less.of[j] - (wide(in.of[j]) - mean.of[j]) * slope.of[j]));
            }));
        if (plus) put(plus + i, made<few>([&](int j) { return stored(g.of[j]); }));
    });
}
