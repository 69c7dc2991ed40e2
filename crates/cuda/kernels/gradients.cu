// What is done to all gradients together, between the backward pass and the optimizer.
#include "packs.cuh"

// Sets `found` to 1 where a number is infinite or none.
extern "C" __global__ void find_not_finite(const T *x, int *found, i64 n) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        if (!(fabsf(wide(x[i])) < INFINITY_F)) *found = 1;
    }
}

// The sum of squares of each `piece` numbers. In double precision no gradient is too large or too many to be squared and added.
extern "C" __global__ void sum_squares(const T *x, double *parts, i64 n, i64 piece) {
    __shared__ double room[MAX_WARPS];
    for (i64 p = blockIdx.x; p * piece < n; p += gridDim.x) {
        const i64 end = (p + 1) * piece < n ? (p + 1) * piece : n;
        double sum = 0.0;
        for (i64 i = p * piece + threadIdx.x; i < end; i += blockDim.x) sum += (double)wide(x[i]) * (double)wide(x[i]);
        sum = sum_of_block(sum, room);
        if (threadIdx.x == 0) parts[p] = sum;
    }
}

// The root of the sum of `parts`, by one block.
extern "C" __global__ void norm_of_parts(const double *parts, double *norm, i64 n_parts) {
    __shared__ double room[MAX_WARPS];
    double sum = 0.0;
    for (i64 i = threadIdx.x; i < n_parts; i += blockDim.x) sum += parts[i];
    sum = sum_of_block(sum, room);
    if (threadIdx.x == 0 && blockIdx.x == 0) *norm = sqrt(sum);
}

// Makes each number at most `limit` large.
extern "C" __global__ void clip_value(T *x, float limit, i64 n) {
    map(x, x, n, [=](float value) { return value < -limit ? -limit : value > limit ? limit : value; });
}
