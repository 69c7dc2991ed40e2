// What softmax and the losses need of a row of `width` numbers, whose threads are those of a block.
#pragma once
#include "packs.cuh"

struct Normaliser {
    float largest;
    // The sum of exp(x - largest).
    float sum;
};

// Of row `row` of `in`.
__device__ inline Normaliser normaliser(const T *in, i64 row, i64 width, float *room) {
    const T *x = in + row * width;
    float largest = -INFINITY_F;
    by_block(row * width, width, [&](auto few, i64 i) {
        const auto own = taken<few>(x + i);
        each<few>([&](int j) { largest = larger(largest, wide(own.of[j])); });
    });
    largest = joined(largest, room, larger);
    float sum = 0.0f;
    by_block(row * width, width, [&](auto few, i64 i) {
        const auto own = taken<few>(x + i);
        each<few>([&](int j) { sum += expf(wide(own.of[j]) - largest); });
    });
    return {largest, sum_of_block(sum, room)};
}

// What is taken from each of a row's numbers to make it the logarithm of its softmax.
__device__ inline float log_shift(const T *in, i64 row, i64 width, float *room) {
    const Normaliser n = normaliser(in, row, width, room);
    return n.largest + logf(n.sum);
}

// `out = f(in)`, of row `row` of both, by the threads of a block.
template <class F> __device__ void map_row(const T *in, T *out, i64 row, i64 width, F f) {
    const i64 start = row * width;
    by_block(start, width, [&](auto few, i64 i) {
        const auto x = taken<few>(in + start + i);
        put(out + start + i, made<few>([&](int j) { return stored(f(wide(x.of[j]))); }));
    });
}
