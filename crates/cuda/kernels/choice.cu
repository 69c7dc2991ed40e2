// Which of two numbers is which, and elements that are taken by what others say.
#include "grid.cuh"
#include "strided.cuh"

// As the engine numbers them.
const i64 LESS = 0, AT_MOST = 1;

template <class N> __device__ float holds(N x, N y, i64 relation) {
    const bool it_does = relation == LESS ? x < y : relation == AT_MOST ? x <= y : x == y;
    return it_does ? 1.0f : 0.0f;
}

// `mask` is 1 where the relation holds between elements of two views, else 0.
extern "C" __global__ void compare(const T *left, const T *right, float *mask, Walk<2> walk, i64 n, i64 relation) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        i64 at[2];
        places(walk, i, at);
        mask[i] = holds(wide(left[at[0]]), wide(right[at[1]]), relation);
    }
}

extern "C" __global__ void compare_integers(const i64 *left, const i64 *right, float *mask, Walk<2> walk, i64 n, i64 relation) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        i64 at[2];
        places(walk, i, at);
        mask[i] = holds(left[at[0]], right[at[1]], relation);
    }
}

// `out` is what `yes` has where the mask isn't 0, and else what `no` has.
template <class E> __device__ void choose_of(const float *mask, const E *yes, const E *no, E *out, const Walk<3> &walk, i64 n) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        i64 at[3];
        places(walk, i, at);
        out[i] = mask[at[0]] != 0.0f ? yes[at[1]] : no[at[2]];
    }
}

extern "C" __global__ void choose(const float *mask, const T *yes, const T *no, T *out, Walk<3> walk, i64 n) {
    choose_of(mask, yes, no, out, walk, n);
}

extern "C" __global__ void choose_integers(const float *mask, const i64 *yes, const i64 *no, i64 *out, Walk<3> walk, i64 n) {
    choose_of(mask, yes, no, out, walk, n);
}

// Of `x` (outer, size, inner) the elements along the middle that `index` (outer, taken, inner) says. A number that is no place there
// gives `none`, sets `bad` to 1 and takes no part in the gradient.
template <class E>
__device__ void gather_of(const E *x, const i64 *index, E *out, int *bad, i64 outer, i64 size, i64 taken, i64 inner, E none) {
    for (i64 i = first_element(); i < outer * taken * inner; i += all_threads()) {
        const i64 at = index[i], row = i / inner / taken;
        const bool is_there = at >= 0 && at < size;
        if (!is_there) *bad = 1;
        out[i] = is_there ? x[(row * size + at) * inner + i % inner] : none;
    }
}

extern "C" __global__ void gather(const T *x, const i64 *index, T *out, int *bad, i64 outer, i64 size, i64 taken, i64 inner) {
    gather_of(x, index, out, bad, outer, size, taken, inner, stored(NAN_F));
}

extern "C" __global__ void gather_integers(const i64 *x, const i64 *index, i64 *out, int *bad, i64 outer, i64 size, i64 taken, i64 inner) {
    gather_of(x, index, out, bad, outer, size, taken, inner, (i64)0);
}

// Sets `bad` to 1 if one of n numbers is no place among `size`.
extern "C" __global__ void check_places(const i64 *index, int *bad, i64 n, i64 size) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        if (index[i] < 0 || index[i] >= size) *bad = 1;
    }
}

// The gradient: each element of `out` gets the sum of those of `grad` that were taken from it, in their order; none is a number where
// `bad` says that some weren't there to be taken.
extern "C" __global__ void gather_gradient(const T *grad, const i64 *index, T *out, const int *bad, i64 outer, i64 size, i64 taken, i64 inner) {
    const float none = *bad == 0 ? 0.0f : NAN_F;
    for (i64 i = first_element(); i < outer * size * inner; i += all_threads()) {
        const i64 row = i / inner, from = row / size * taken * inner + i % inner;
        float sum = none;
        for (i64 k = 0; k < taken; k++) {
            if (index[from + k * inner] == row % size) sum += wide(grad[from + k * inner]);
        }
        out[i] = stored(sum);
    }
}
