// Where the elements of views lie. A walk goes through a shape row by row; for each of `VIEWS` tensors it knows the step along
// each dimension, which is 0 where an element is repeated.
#pragma once
#include "numbers.cuh"

const int MAX_DIMS = 6;

template <int VIEWS> struct Walk {
    // How many dimensions there are; the last one runs fastest.
    i64 n_dims;
    i64 sizes[MAX_DIMS];
    i64 steps[VIEWS][MAX_DIMS];
};

// The places of element `i` in each view.
template <int VIEWS> __device__ void places(const Walk<VIEWS> &walk, i64 i, i64 (&at)[VIEWS]) {
    for (int view = 0; view < VIEWS; view++) at[view] = 0;
    for (int d = (int)walk.n_dims - 1; d >= 0; d--) {
        const i64 rest = i / walk.sizes[d];
        const i64 index = i - rest * walk.sizes[d];
        for (int view = 0; view < VIEWS; view++) at[view] += index * walk.steps[view][d];
        i = rest;
    }
}

__device__ inline i64 place(const Walk<1> &walk, i64 i) {
    i64 at[1];
    places(walk, i, at);
    return at[0];
}
