// Neighbouring elements that a thread takes in one go. Memory is busiest where each thread asks for 16 bytes at a time: with 2 or 4, too
// few bytes are under way at once for the loads to hide how long each takes.
//
// In sums, which elements a thread has is a function of sizes alone, and so is their order: a row whose address isn't what its place in
// the table lets expect is only asked for one by one.
#pragma once
#include "grid.cuh"

// How many elements of the module's type that is.
const int WIDE = 16 / (int)sizeof(T);

// How many times a thread that adds up asks for neighbours, or for a row, before it needs the first.
const int FLIGHT = 4;

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

// 16 bytes go to where they may lie in one go, which the compiler would take apart where branches meet.
__device__ inline void put_words(void *to, const u32 (&word)[4]) {
#ifdef HOST_RUN
    memcpy(to, word, sizeof(word));
#else
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]) : "memory");
#endif
}

template <int N, class E> __device__ void put_even(E *to, const Pack<N, E> &pack) {
    if constexpr (sizeof(pack) % 16 == 0) {
        UNROLL
        for (int i = 0; i < (int)sizeof(pack) / 16; i++) {
            u32 words[4];
            memcpy(words, &pack.of[i * (int)(16 / sizeof(E))], sizeof(words));
            put_words((char *)to + i * 16, words);
        }
    } else {
        *(Pack<N, E> *)to = pack;
    }
}

template <int N, class E> __device__ void put(E *to, const Pack<N, E> &pack) {
    if (N > 1 && (u64)to % alignof(Pack<N, E>) == 0) return put_even(to, pack);
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

// Whether all of these begin at multiples of 16 bytes, as buffers do, those that are null aside.
template <class... E> __device__ bool are_even(const E *...from) { return (((u64)from % 16 == 0) && ...); }

// Calls `f(few, i)` for the elements from i on, `few` of them, until all n are done, by all threads of the grid: WIDE at a time, then the
// last ones alone. All of them alone where memory isn't `even`, so that a warp's threads still ask for neighbours.
template <class F> __device__ void by_grid(bool even, i64 n, F f) {
    const i64 first = first_element(), all = all_threads(), packed = even ? n - n % WIDE : 0;
    for (i64 i = first * WIDE; i < packed; i += all * WIDE) f(Few<WIDE>(), i);
    for (i64 i = packed + first; i < n; i += all) f(Few<1>(), i);
}

// `out = f(in)`, element by element.
template <class In, class Out, class F> __device__ void map(const In *in, Out *out, i64 n, F f) {
    by_grid(are_even(in, out), n, [=](auto few, i64 i) {
        const auto x = taken<few>(in + i);
        put(out + i, made<few>([&](int j) { return rounded<Out>(f(wide(x.of[j]))); }));
    });
}

// `out = f(left, right)`, element by element.
template <class Left, class Right, class Out, class F>
__device__ void zip(const Left *left, const Right *right, Out *out, i64 n, F f) {
    by_grid(are_even(left, right, out), n, [=](auto few, i64 i) {
        const auto x = taken<few>(left + i);
        const auto y = taken<few>(right + i);
        put(out + i, made<few>([&](int j) { return rounded<Out>(f(wide(x.of[j]), wide(y.of[j]))); }));
    });
}

// As `by_grid`, of rows of `width` elements, never beyond the end of one: `f(few, i, row, c)` for those from element i of all on, which is
// element c of a row.
template <class F> __device__ void along_rows(bool even, i64 rows, i64 width, F f) {
    by_grid(even && width % WIDE == 0, rows * width, [=](auto few, i64 i) {
        const i64 row = i / width;
        f(few, i, row, i - row * width);
    });
}

// The same where more is to be known of a row's elements than one of them tells, as of channels: a thread has the same elements of all its
// rows, if there are threads for a whole row, and takes what `known(few, c)` gives of them once. `f(few, known, rows, i, step)` is for
// those from elements i, i + step and so on, `rows` of them: whoever loads all of them before it needs one has them under way together.
template <class Known, class F> __device__ void along_known_rows(bool even, i64 rows, i64 width, Known known, F f) {
    const i64 packs = width / WIDE, all = all_threads();
    if (!even || width % WIDE != 0 || all < packs) {
        return along_rows(even, rows, width, [=](auto few, i64 i, i64, i64 c) { f(few, known(few, c), Few<1>(), i, (i64)0); });
    }
    const i64 side = all - all % packs, n = rows * width, step = side * WIDE;
    const i64 first = first_element();
    if (first >= side) return;
    const auto own = known(Few<WIDE>(), first % packs * WIDE);
    i64 i = first * WIDE;
    for (; i + step < n; i += 2 * step) f(Few<WIDE>(), own, Few<2>(), i, step);
    if (i < n) f(Few<WIDE>(), own, Few<1>(), i, step);
}

// Calls `f(few, i)` for the elements of a row by the threads of a block, where the row begins `start` elements behind what begins evenly:
// the first ones alone until that is a multiple of WIDE, then WIDE at a time, and the last ones alone.
template <class F> __device__ void by_block(i64 start, i64 width, F f) {
    const i64 before = (WIDE - start % WIDE) % WIDE, head = before < width ? before : width;
    const i64 packed = head + (width - head) / WIDE * WIDE;
    for (i64 i = threadIdx.x; i < head; i += blockDim.x) f(Few<1>(), i);
    for (i64 i = head + (i64)threadIdx.x * WIDE; i < packed; i += (i64)blockDim.x * WIDE) f(Few<WIDE>(), i);
    for (i64 i = packed + threadIdx.x; i < width; i += blockDim.x) f(Few<1>(), i);
}
