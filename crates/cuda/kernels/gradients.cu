// What is done to all gradients together, between the backward pass and the optimizer.
#include "packs.cuh"

// Sets `found` to 1 where a number is infinite or none.
extern "C" __global__ void find_not_finite(const T *x, int *found, i64 n) {
    by_grid(are_even(x), n, [=](auto few, i64 i) {
        const auto own = taken<few>(x + i);
        bool all = true;
        each<few>([&](int j) { all = all && fabsf(wide(own.of[j])) < INFINITY_F; });
        if (!all) *found = 1;
    });
}

// The sum of squares of each `piece` numbers. In double precision no gradient is too large or too many to be squared and added.
extern "C" __global__ void sum_squares(const T *x, double *parts, i64 n, i64 piece) {
    __shared__ double room[MAX_WARPS];
    for (i64 p = blockIdx.x; p * piece < n; p += gridDim.x) {
        const i64 end = (p + 1) * piece < n ? (p + 1) * piece : n;
        const i64 step = (i64)blockDim.x * WIDE;
        double sum = 0.0;
        const auto add = [&](T number) { sum += (double)wide(number) * (double)wide(number); };
        i64 i = p * piece + (i64)threadIdx.x * WIDE;
        for (; i + (FLIGHT - 1) * step + WIDE <= end; i += FLIGHT * step) {
            const auto own = made<FLIGHT>([&](int k) { return taken<WIDE>(x + i + k * step); });
            each<FLIGHT>([&](int k) { each<WIDE>([&](int j) { add(own.of[k].of[j]); }); });
        }
        for (; i < end; i += step) {
            for (i64 j = i; j < i + WIDE && j < end; j++) add(x[j]);
        }
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
