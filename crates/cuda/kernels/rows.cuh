// What softmax and the losses need of a row of `width` numbers, whose threads are those of a block.
#pragma once
#include "packs.cuh"

struct Normaliser {
    float largest;
    // The sum of exp(x - largest).
    float sum;
};
__device__ inline Normaliser of_lane(Normaliser mine, int mask) { return {of_lane(mine.largest, mask), of_lane(mine.sum, mask)}; }

// e to the power of x. Where numbers are of 16 bits, memory brings so many at a time that every instruction counts.
__device__ inline float exponential(float x) { return sizeof(T) == 2 ? power_of_2(x * LOG2_E) : expf(x); }

// A sum of exp(x - from) as one of exp(x - to), where `to` is at least `from`, and the numbers may be infinite or none.
__device__ inline float moved(float sum, float from, float to) { return from == to ? sum : sum * expf(from - to); }

// Of row `row` of `in`, which is read once: where a thread meets a larger number than before, what it has so far is made less.
__device__ inline Normaliser normaliser(const T *in, i64 row, i64 width, Normaliser *room) {
    const T *x = in + row * width;
    Normaliser n = {-INFINITY_F, 0.0f};
    by_block(row * width, width, [&](auto few, i64 i) {
        const auto own = taken<few>(x + i);
        // No NaN is the largest, but the sum is one where there is any.
        float largest = n.largest;
        each<few>([&](int j) { largest = fmaxf(largest, wide(own.of[j])); });
        if (largest == -INFINITY_F) {
            // Where there was nothing but minus infinity, nothing is there to add up.
            each<few>([&](int j) { n.sum = is_nan(wide(own.of[j])) ? NAN_F : n.sum; });
            return;
        }
        n = {largest, moved(n.sum, n.largest, largest)};
        each<few>([&](int j) { n.sum += exponential(wide(own.of[j]) - largest); });
    });
    return joined(n, room, [](Normaliser a, Normaliser b) {
        const float largest = fmaxf(a.largest, b.largest);
        return Normaliser{largest, moved(a.sum, a.largest, largest) + moved(b.sum, b.largest, largest)};
    });
}

// What is taken from each of a row's numbers to make it the logarithm of its softmax: one after the other, since beside a large number
// the second would be lost.
struct LogShift {
    float largest, log;
    __device__ float of(float x) const { return (x - largest) - log; }
};

__device__ inline LogShift log_shift(const T *in, i64 row, i64 width, Normaliser *room) {
    const Normaliser n = normaliser(in, row, width, room);
    return {n.largest, logf(n.sum)};
}

// Calls `f(few, at, left, right)` for the neighbours of both from element `at` of all on, which are those of the row that begins with
// element `start`, by the threads of a block.
template <class F> __device__ void pairs(const T *left, const T *right, i64 start, i64 width, F f) {
    by_block(start, width, [&](auto few, i64 i) { f(few, start + i, taken<few>(left + start + i), taken<few>(right + start + i)); });
}

// `out = f(in)`, of row `row` of both, by the threads of a block.
template <class F> __device__ void map_row(const T *in, T *out, i64 row, i64 width, F f) {
    const i64 start = row * width;
    by_block(start, width, [&](auto few, i64 i) {
        const auto x = taken<few>(in + start + i);
        put(out + start + i, made<few>([&](int j) { return stored(f(wide(x.of[j]))); }));
    });
}
