// Softmax and its logarithm along rows of `width` numbers, a block a row.
#include "rows.cuh"

extern "C" __global__ void softmax(const T *in, T *out, i64 rows, i64 width) {
    __shared__ float room[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const Normaliser n = normaliser(in, row, width, room);
        const float scale = 1.0f / n.sum;
        map_row(in, out, row, width, [&](float x) { return expf(x - n.largest) * scale; });
    }
}

extern "C" __global__ void log_softmax(const T *in, T *out, i64 rows, i64 width) {
    __shared__ float room[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const float shift = log_shift(in, row, width, room);
        map_row(in, out, row, width, [&](float x) { return x - shift; });
    }
}

// From the output: y (g - sum(g y)).
extern "C" __global__ void softmax_gradient(const T *y, const T *grad, T *out, i64 rows, i64 width) {
    __shared__ float room[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const i64 start = row * width;
        float dot = 0.0f;
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) dot += wide(y[start + i]) * wide(grad[start + i]);
        dot = sum_of_block(dot, room);
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            out[start + i] = stored(wide(y[start + i]) * (wide(grad[start + i]) - dot));
        }
    }
}

// From the output: g - exp(y) sum(g).
extern "C" __global__ void log_softmax_gradient(const T *y, const T *grad, T *out, i64 rows, i64 width) {
    __shared__ float room[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const i64 start = row * width;
        float sum = 0.0f;
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) sum += wide(grad[start + i]);
        sum = sum_of_block(sum, room);
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            out[start + i] = stored(wide(grad[start + i]) - expf(wide(y[start + i])) * sum);
        }
    }
}
