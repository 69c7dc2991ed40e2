// What is found of the columns of a table (rows, width), such as their sums. A block of 256 threads takes some neighbouring columns of a
// piece of the rows: SIDE threads side by side have WIDE columns each, and as many rows at once as there are such groups. What the
// threads find is joined in an order that sizes alone decide.
#pragma once
#include "packs.cuh"

const int BLOCK = 256;
// Threads side by side where rows are cut into pieces: a row's part is a line of the caches.
const int LINE = 8;
// The same where a block takes all rows: what memory gives at least.
const int SECTOR = 2;
// The columns of a thread in a tile: neighbours where rows are EVEN, so that they come in one go; else each SIDE columns from the one
// before, so that neighbouring threads ask for neighbours.
template <int SIDE, bool EVEN> struct Own {
    i64 start, width;

    // Which column number `slot` of the tile's is: slots are in the order in which threads side by side hold them.
    __device__ i64 column(int slot) const { return start + (EVEN ? slot % SIDE * WIDE + slot / SIDE : slot); }
    __device__ i64 own(int j) const { return column(j * SIDE + (int)threadIdx.x % SIDE); }

    __device__ bool has_any() const { return own(0) < width; }

    // Calls `f(column)` by the thread that has what is found of it, of each of the tile's.
    template <class F> __device__ void each_found(F f) const {
        const i64 own = column((int)threadIdx.x);
        if ((int)threadIdx.x < SIDE * WIDE && own < width) f(own);
    }

    // The thread's part of a row, of which it has one.
    template <class E> __device__ Pack<WIDE, E> of(const E *row) const {
        if (EVEN) return *(const Pack<WIDE, E> *)(row + own(0));
        return made<WIDE>([&](int j) { return own(j) < width ? row[own(j)] : E(); });
    }

    // The same `at` elements on; zeros where there is nothing to take from.
    template <class E> __device__ Pack<WIDE, E> of_or_zeros(const E *from, i64 at) const { return from ? of(from + at) : Pack<WIDE, E>(); }

    // The same of a row that may be null, or that the thread may have no part of.
    template <class E> __device__ Pack<WIDE, E> of_any(const E *row) const { return has_any() ? of_or_zeros(row, 0) : Pack<WIDE, E>(); }

    template <class E> __device__ void put(E *row, const Pack<WIDE, E> &pack) const {
        if (EVEN) return put_even(row + own(0), pack);
        each<WIDE>([&](int j) {
            if (own(j) < width) row[own(j)] = pack.of[j];
        });
    }
};

// What is found of a column: N numbers.
template <int N> struct Found {
    float of[N];
};

template <int N> __device__ Found<N> sum_of(const Found<N> &a, const Found<N> &b) {
    Found<N> sum;
    each<N>([&](int n) { sum.of[n] = a.of[n] + b.of[n]; });
    return sum;
}

// A block's, to join what its threads have found. Rows are that far apart that a warp's writes go to different banks.
template <int N, int SIDE> struct Room {
    float own[N][BLOCK / SIDE][SIDE * WIDE + SIDE];
    float some[N][BLOCK / (SIDE * WIDE)][SIDE * WIDE];
};

// What `join` makes of what all threads of the block have found of each column; the first SIDE * WIDE threads get that of a slot each.
template <int N, int SIDE, class Join>
__device__ Found<N> joined_columns(const Found<N> (&mine)[WIDE], Room<N, SIDE> &room, Join join) {
    const int slots = SIDE * WIDE, place = (int)threadIdx.x % SIDE, slot = (int)threadIdx.x % slots, some = (int)threadIdx.x / slots;
    // Somebody may still read what was joined before.
    __syncthreads();
    each<N>([&](int n) { each<WIDE>([&](int j) { room.own[n][threadIdx.x / SIDE][j * SIDE + place] = mine[j].of[n]; }); });
    __syncthreads();
    // WIDE columns of a row become a column of WIDE rows.
    const auto found = [&](const auto &of, int row) {
        Found<N> found;
        each<N>([&](int n) { found.of[n] = of[n][row][slot]; });
        return found;
    };
    Found<N> all = found(room.own, some * WIDE);
    for (int row = 1; row < WIDE; row++) all = join(all, found(room.own, some * WIDE + row));
    each<N>([&](int n) { room.some[n][some][slot] = all.of[n]; });
    __syncthreads();
    if (some == 0) {
        for (int other = 1; other < BLOCK / slots; other++) all = join(all, found(room.some, other));
    }
    return all;
}

// Calls `f(own, p, first, end, room)` for each tile of SIDE * WIDE columns of each piece `p` of the rows: those from `first` to `end`, which
// for a thread without a column are none.
template <int SIDE, int N, class F> __device__ void by_columns(bool even, i64 rows, i64 width, i64 piece, Room<N, SIDE> &room, F f) {
    const i64 tiles = (width + SIDE * WIDE - 1) / (SIDE * WIDE), pieces = (rows + piece - 1) / piece;
    for (i64 i = blockIdx.x; i < tiles * pieces; i += gridDim.x) {
        const i64 p = i / tiles, start = (i - p * tiles) * SIDE * WIDE, first = p * piece;
        const i64 end = first + piece < rows ? first + piece : rows;
        if (even && width % WIDE == 0) {
            const Own<SIDE, true> own = {start, width};
            f(own, p, first, own.has_any() ? end : first, room);
        } else {
            const Own<SIDE, false> own = {start, width};
            f(own, p, first, own.has_any() ? end : first, room);
        }
    }
}

// The distance between the rows of a thread.
template <int SIDE> __device__ constexpr i64 step() { return BLOCK / SIDE; }

// Calls `f(few, row)` for rows `row`, `row + step` and so on up to `end`, of which it takes `few`, as many as N at once: whoever loads all of
// them before it needs one has them under way together.
template <int N, int SIDE, class F> __device__ void in_flights_from(i64 row, i64 end, F f) {
    for (; row + (N - 1) * step<SIDE>() < end; row += N * step<SIDE>()) f(Few<N>(), row);
    if constexpr (N > 1) in_flights_from<N / 2, SIDE>(row, end, f);
}

// The same of a thread's rows from `first` on.
template <int N, int SIDE, class F> __device__ void in_flights(i64 first, i64 end, F f) {
    in_flights_from<N, SIDE>(first + (int)threadIdx.x / SIDE, end, f);
}

// The same for one whose result doesn't depend on how many rows it is given: one, where columns come one by one and need the registers.
template <int N, int SIDE, bool EVEN, class F> __device__ void in_flights(const Own<SIDE, EVEN> &, i64 first, i64 end, F f) {
    in_flights<EVEN ? N : 1, SIDE>(first, end, f);
}

// The sums of N numbers that `term(few, row, found)` adds to what is found of each column, over the rows of a piece; the first threads of
// the block get a slot's each.
template <int N, int SIDE, class Columns, class Term>
__device__ Found<N> sums_of_rows(const Columns &own, i64 first, i64 end, Room<N, SIDE> &room, Term term) {
    Found<N> mine[WIDE] = {};
    in_flights<FLIGHT>(own, first, end, [&](auto few, i64 row) { term(few, row, mine); });
    return joined_columns(mine, room, [](const Found<N> &a, const Found<N> &b) { return sum_of(a, b); });
}

// The same of all pieces of a table: `term_of(own)` gives the term of a thread's columns, `done(p, column, sums)` takes what comes of it.
template <int N, class TermOf, class Done>
__device__ void sums_of_columns(bool even, i64 rows, i64 width, i64 piece, Room<N, LINE> &room, TermOf term_of, Done done) {
    by_columns(even, rows, width, piece, room, [=](auto own, i64 p, i64 first, i64 end, auto &room) {
        const Found<N> sums = sums_of_rows(own, first, end, room, term_of(own));
        own.each_found([&](i64 column) { done(p, column, sums); });
    });
}
