// How a grid's threads share out work, and how those of a block add up. Every kernel loops with the step of its grid, so that
// any number of blocks does all the work; nothing depends on how many there are but the time that it takes.
#pragma once
#include "numbers.cuh"

__device__ inline i64 first_element() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline i64 all_threads() { return (i64)gridDim.x * blockDim.x; }

// The most warps of a block: numbers that a reduction needs room for.
const int MAX_WARPS = 32;

__device__ inline int n_warps() { return (int)blockDim.x / 32; }

// What the lane has whose number differs by `mask`. Structs have overloads of this.
template <class V> __device__ V of_lane(V mine, int mask) { return __shfl_xor_sync(0xffffffffu, mine, mask); }

// What `join` makes of the values of all threads of the block, which are a multiple of 32 and all come here: first inside of
// warps, then warp after warp, so in an order that the block's size alone decides. All threads get it.
template <class V, class Join> __device__ V joined(V value, V *room, Join join) {
    for (int step = 16; step > 0; step /= 2) value = join(value, of_lane(value, step));
    // Somebody may still read what was joined before.
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
    __syncthreads();
    value = room[0];
    for (int warp = 1; warp < n_warps(); warp++) value = join(value, room[warp]);
    return value;
}

template <class V> __device__ V sum_of_block(V value, V *room) {
    return joined(value, room, [](V a, V b) { return a + b; });
}

// The sum of `n` numbers, by all threads of the block.
__device__ inline float sum_of_parts(const float *parts, i64 n, float *room) {
    float sum = 0.0f;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += parts[i];
    return sum_of_block(sum, room);
}
