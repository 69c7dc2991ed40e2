// What softmax and the losses need of a row of `width` numbers, whose threads are those of a block.
#pragma once
#include "grid.cuh"

struct Normaliser {
    float largest;
    // The sum of exp(x - largest).
    float sum;
};

__device__ inline Normaliser normaliser(const T *x, i64 width, float *room) {
    float largest = -INFINITY_F;
    for (i64 i = threadIdx.x; i < width; i += blockDim.x) largest = larger(largest, wide(x[i]));
    largest = joined(largest, room, larger);
    float sum = 0.0f;
    for (i64 i = threadIdx.x; i < width; i += blockDim.x) sum += expf(wide(x[i]) - largest);
    return {largest, sum_of_block(sum, room)};
}

// What is taken from each of a row's numbers to make it the logarithm of its softmax.
__device__ inline float log_shift(const T *x, i64 width, float *room) {
    const Normaliser n = normaliser(x, width, room);
    return n.largest + logf(n.sum);
}
