// Normalisation of rows of `width` numbers, forward and backward. Each row's mean and 1/std are in float, and so are weight and
// bias, which are null where there are none.
#include "columns.cuh"
#include "grid.cuh"

extern "C" __global__ void layer_norm(const T *in, const float *weight, const float *bias, T *out, float *means, float *scales, i64 rows,
                                      i64 width, float eps) {
    __shared__ float room[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *x = in + row * width;
        float sum = 0.0f;
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) sum += wide(x[i]);
        const float mean = sum_of_block(sum, room) / (float)width;
        float squares = 0.0f;
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) squares += (wide(x[i]) - mean) * (wide(x[i]) - mean);
        const float scale = 1.0f / sqrtf(sum_of_block(squares, room) / (float)width + eps);
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            const float u = (wide(x[i]) - mean) * scale;
            out[row * width + i] = stored((weight ? u * weight[i] : u) + (bias ? bias[i] : 0.0f));
        }
        if (threadIdx.x == 0) means[row] = mean, scales[row] = scale;
    }
}

// With u = (x - mean) scale and h = grad weight, the gradient of a row is scale (h - mean(h) - u mean(h u)).
extern "C" __global__ void layer_norm_gradient(const T *in, const float *weight, const T *grad, const float *means, const float *scales,
                                               T *out, i64 rows, i64 width) {
    __shared__ float room[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const i64 start = row * width;
        const float mean = means[row], scale = scales[row];
        float sum_h = 0.0f, sum_hu = 0.0f;
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            const float h = wide(grad[start + i]) * (weight ? weight[i] : 1.0f);
            sum_h += h;
            sum_hu += h * ((wide(in[start + i]) - mean) * scale);
        }
        const float mean_h = sum_of_block(sum_h, room) / (float)width, mean_hu = sum_of_block(sum_hu, room) / (float)width;
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            const float h = wide(grad[start + i]) * (weight ? weight[i] : 1.0f);
            out[start + i] = stored(scale * (h - mean_h - (wide(in[start + i]) - mean) * scale * mean_hu));
        }
    }
}

// The gradients of weight and bias, piece by piece: `sum_column_parts` adds up both.
extern "C" __global__ void layer_norm_columns(const T *x, const T *grad, const float *means, const float *scales, float *weight_parts,
                                              float *bias_parts, i64 rows, i64 width, i64 piece) {
    __shared__ float room[2][LANES][COLUMNS];
    sums_of_columns<2>(
        rows, width, piece, room,
        [=](i64 row, i64 column, float(&sums)[2]) {
            const float g = wide(grad[row * width + column]);
            sums[0] += g * ((wide(x[row * width + column]) - means[row]) * scales[row]);
            sums[1] += g;
        },
        [=](i64 p, i64 column, const float(&sums)[2]) {
            weight_parts[p * width + column] = sums[0];
            bias_parts[p * width + column] = sums[1];
        });
}
