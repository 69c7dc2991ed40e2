// Neighbouring elements that a thread takes in one go. Memory is busiest where each thread asks for 16 bytes at a time: with 2 or 4, too
// few bytes are under way at once for the loads to hide how long each takes.
//
// Which elements a thread has is a function of sizes alone, and so is the order of a sum; an address that isn't a multiple of 16 only
// makes it ask for them one by one.
#pragma once
#include "grid.cuh"

// How many elements of the module's type that is.
const int WIDE = 16 / (int)sizeof(T);

// So many neighbours.
template <int N, class E> struct alignas(N * sizeof(E) < 16 ? N * sizeof(E) : 16) Pack {
    E of[N];
};

// A number that is known to the compiler, as an argument.
template <int N> struct Few {
    __device__ constexpr operator int() const { return N; }
};

template <int N, class E> __device__ Pack<N, E> taken(const E *from) {
    if (N > 1 && (u64)from % alignof(Pack<N, E>) == 0) return *(const Pack<N, E> *)from;
    Pack<N, E> pack;
    UNROLL
    for (int j = 0; j < N; j++) pack.of[j] = from[j];
    return pack;
}

// Zeros where there is nothing to take from.
template <int N, class E> __device__ Pack<N, E> taken_or_zeros(const E *from, i64 i) { return from ? taken<N>(from + i) : Pack<N, E>(); }

template <int N, class E> __device__ void put(E *to, const Pack<N, E> &pack) {
    if (N > 1 && (u64)to % alignof(Pack<N, E>) == 0) {
        *(Pack<N, E> *)to = pack;
        return;
    }
    UNROLL
    for (int j = 0; j < N; j++) to[j] = pack.of[j];
}

// Calls `f(j)` for each of N.
template <int N, class F> __device__ void each(F f) {
    UNROLL
    for (int j = 0; j < N; j++) f(j);
}

// The neighbours that `f(j)` gives.
template <int N, class F> __device__ auto made(F f) {
    Pack<N, decltype(f(0))> pack;
    UNROLL
    for (int j = 0; j < N; j++) pack.of[j] = f(j);
    return pack;
}

// Calls `f(few, i)` for the elements from i on, `few` of them, until all n are done: WIDE at a time, then the last ones alone.
template <class F> __device__ void in_packs(i64 first, i64 all, i64 n, F f) {
    const i64 packed = n - n % WIDE;
    for (i64 i = first * WIDE; i < packed; i += all * WIDE) f(Few<WIDE>(), i);
    for (i64 i = packed + first; i < n; i += all) f(Few<1>(), i);
}

// By all threads of the grid.
template <class F> __device__ void by_grid(i64 n, F f) { in_packs(first_element(), all_threads(), n, f); }

// By the threads of a block.
template <class F> __device__ void by_block(i64 n, F f) { in_packs(threadIdx.x, blockDim.x, n, f); }

// By all threads of the grid, `f(few, i, c)` over rows of `width` elements, never beyond the end of one; c is where in its row i stands.
template <class F> __device__ void along_rows(i64 rows, i64 width, F f) {
    if (width % WIDE == 0) {
        by_grid(rows * width, [=](auto few, i64 i) { f(few, i, i % width); });
        return;
    }
    for (i64 i = first_element(); i < rows * width; i += all_threads()) f(Few<1>(), i, i % width);
}
