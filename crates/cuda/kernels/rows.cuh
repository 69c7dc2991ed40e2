// What softmax and the losses need of a row of `width` numbers, whose threads are those of a block.
#pragma once
#include "packs.cuh"

struct Normaliser {
    float largest;
    // The sum of exp(x - largest).
    float sum;
};

__device__ inline Normaliser normaliser(const T *x, i64 width, float *room) {
    float largest = -INFINITY_F;
    by_block(width, [&](auto few, i64 i) {
        const auto own = taken<few>(x + i);
        each<few>([&](int j) { largest = larger(largest, wide(own.of[j])); });
    });
    largest = joined(largest, room, larger);
    float sum = 0.0f;
    by_block(width, [&](auto few, i64 i) {
        const auto own = taken<few>(x + i);
        each<few>([&](int j) { sum += expf(wide(own.of[j]) - largest); });
    });
    return {largest, sum_of_block(sum, room)};
}

// What is taken from each of a row's numbers to make it the logarithm of its softmax.
__device__ inline float log_shift(const T *x, i64 width, float *room) {
    const Normaliser n = normaliser(x, width, room);
    return n.largest + logf(n.sum);
}

// `out = f(x)`, of one row, by the threads of a block.
template <class F> __device__ void map_row(const T *x, T *out, i64 width, F f) {
    by_block(width, [&](auto few, i64 i) {
        const auto own = taken<few>(x + i);
        put(out + i, made<few>([&](int j) { return stored(f(wide(own.of[j]))); }));
    });
}
