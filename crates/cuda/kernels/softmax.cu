// Softmax and its logarithm along rows of `width` numbers, a block a row.
#include "rows.cuh"

extern "C" __global__ void softmax(const T *in, T *out, i64 rows, i64 width) {
    __shared__ Normaliser room[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const Normaliser n = normaliser(in, row, width, room);
        const float scale = 1.0f / n.sum;
        map_row(in, out, row, width, [&](float x) { return exponential(x - n.largest) * scale; });
    }
}

extern "C" __global__ void log_softmax(const T *in, T *out, i64 rows, i64 width) {
    __shared__ Normaliser room[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const LogShift shift = log_shift(in, row, width, room);
        map_row(in, out, row, width, [&](float x) { return shift.of(x); });
    }
}

// From the output: y (g - sum(g y)).
extern "C" __global__ void softmax_gradient(const T *y, const T *grad, T *out, i64 rows, i64 width) {
    __shared__ float room[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const i64 start = row * width;
        float dot = 0.0f;
        pairs(y, grad, start, width, [&](auto few, i64, auto y, auto g) {
            each<few>([&](int j) { dot += wide(y.of[j]) * wide(g.of[j]); });
        });
        dot = sum_of_block(dot, room);
        pairs(y, grad, start, width, [&](auto few, i64 at, auto y, auto g) {
            put(out + at, made<few>([&](int j) { return stored(wide(y.of[j]) * (wide(g.of[j]) - dot)); }));
        });
    }
}

// From the output: g - exp(y) sum(g).
extern "C" __global__ void log_softmax_gradient(const T *y, const T *grad, T *out, i64 rows, i64 width) {
    __shared__ float room[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const i64 start = row * width;
        float sum = 0.0f;
        by_block(start, width, [&](auto few, i64 i) {
            const auto g = taken<few>(grad + start + i);
            each<few>([&](int j) { sum += wide(g.of[j]); });
        });
        sum = sum_of_block(sum, room);
        pairs(y, grad, start, width, [&](auto few, i64 at, auto y, auto g) {
            put(out + at, made<few>([&](int j) { return stored(wide(g.of[j]) - exponential(wide(y.of[j])) * sum); }));
        });
    }
}
