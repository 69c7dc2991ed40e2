// Functions of one tensor and their gradients, and arithmetic of two. Meanings are those of the op table of the engine.
// Gradients are told from the value that the op keeps: its output or its input.
#include "packs.cuh"
#include "strided.cuh"

// The share of a standard normal below x.
__device__ inline float normal_cdf(float x) { return 0.5f * (1.0f + erff(x * 0.70710678118654752f)); }

__device__ inline float gelu_slope(float x) {
    const float density = 0.3989422804014327f * expf(-0.5f * x * x);
    return normal_cdf(x) + x * density;
}

// 1 / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3): nearly the share of a standard normal below x.
__device__ inline float gelu_tanh_share(float x) {
    return 1.0f / (1.0f + expf(x * (-0.07135481627361f * x * x - 1.59576912160573f)));
}

__device__ inline float gelu_tanh_slope(float x) {
    const float share = gelu_tanh_share(x);
    return share + x * share * (1.0f - share) * (0.21406444882083f * x * x + 1.59576912160573f);
}

__device__ inline float silu_slope(float x) {
    const float share = 1.0f / (1.0f + expf(-x));
    return share * (1.0f + x * (1.0f - share));
}

// `kept` is null where the gradient is a function of neither the input nor the output.
template <class F> __device__ void map_gradient(const T *kept, const T *grad, T *out, i64 n, F f) {
    by_grid(are_even(kept, grad, out), n, [=](auto few, i64 i) {
        const auto g = taken<few>(grad + i);
        const auto x = taken_or_zeros<few>(kept, i);
        put(out + i, made<few>([&](int j) { return stored(f(wide(x.of[j]), wide(g.of[j]))); }));
    });
}

// One row a function: its name, its value at `x`, its gradient from `kept` and `g`; `a` and `b` are its constants.
#define FUNCTION(NAME, VALUE, GRADIENT)                                                                                      \
    extern "C" __global__ void NAME(const T *in, T *out, i64 n, float a, float b) {                                          \
        map(in, out, n, [=](float x) { return VALUE; });                                                                     \
    }                                                                                                                        \
    extern "C" __global__ void NAME##_gradient(const T *kept, const T *grad, T *out, i64 n, float a, float b) {              \
        map_gradient(kept, grad, out, n, [=](float kept, float g) { return GRADIENT; });                                     \
    }

FUNCTION(negative, -x, -g)
FUNCTION(exponential, expf(x), g *kept)
FUNCTION(logarithm, logf(x), g / kept)
FUNCTION(root, sqrtf(x), 0.5f * g / kept)
FUNCTION(hyperbolic_tangent, tanhf(x), g * (1.0f - kept * kept))
FUNCTION(sigmoid, 1.0f / (1.0f + expf(-x)), g *kept *(1.0f - kept))
FUNCTION(relu, x > 0.0f || is_nan(x) ? x : 0.0f, where_relu_passed(g, kept))
FUNCTION(gelu, x *normal_cdf(x), g *gelu_slope(kept))
FUNCTION(gelu_tanh, x *gelu_tanh_share(x), g *gelu_tanh_slope(kept))
FUNCTION(silu, x / (1.0f + expf(-x)), g *silu_slope(kept))
FUNCTION(softplus, (x > 0.0f ? x : 0.0f) + log1pf(expf(-fabsf(x))), g / (1.0f + expf(-kept)))
FUNCTION(leaky_relu, x > 0.0f ? x : a * x, kept > 0.0f ? g : g * a)
FUNCTION(elu, x > 0.0f ? x : a * expm1f(x), kept > 0.0f ? g : g * a * expf(kept))
FUNCTION(sine, sinf(x), g *cosf(kept))
FUNCTION(cosine, cosf(x), -g *sinf(kept))
FUNCTION(absolute, fabsf(x), kept > 0.0f ? g : kept < 0.0f ? -g : 0.0f)
FUNCTION(square, x *x, 2.0f * g * kept)
// x^0 is 1 everywhere; the formula would give 0 times infinity at 0. `b` is a - 1, rounded once.
FUNCTION(power, powf(x, a), a == 0.0f ? 0.0f : g * a * powf(kept, b))
FUNCTION(over, x / a, g / a)
// What is no number stays.
FUNCTION(clamp, x < a ? a : x > b ? b : x, a < kept && kept < b ? g : 0.0f)
FUNCTION(affine, fmaf(x, a, b), g *a)

// Whether neighbours of the result are neighbours of each view, or one of its elements, in packs that begin evenly where the view does.
template <int VIEWS> __device__ bool walks_by_packs(const Walk<VIEWS> &walk) {
    const int last = (int)walk.n_dims - 1;
    bool all = last >= 0 && walk.sizes[last] % WIDE == 0;
    for (int view = 0; all && view < VIEWS; view++) {
        const i64 step = walk.steps[view][last];
        all = step == 0 || step == 1;
        for (int d = 0; d < last; d++) all = all && (step == 0 || walk.steps[view][d] % WIDE == 0);
    }
    return all;
}

// The element of a view for each of N neighbours of the result.
template <int N> __device__ Pack<N, T> taken_of_view(const T *from, i64 step) {
    if (step == 1) return taken<N>(from);
    return made<N>([&](int) { return *from; });
}

template <class F> __device__ void zip_views(const T *left, const T *right, T *out, const Walk<2> &walk, i64 n, F f) {
    const bool even = are_even(left, right, out) && walks_by_packs(walk);
    const int last = even ? (int)walk.n_dims - 1 : 0;
    by_grid(even, n, [&](auto few, i64 i) {
        i64 at[2];
        places(walk, i, at);
        const auto x = taken_of_view<few>(left + at[0], walk.steps[0][last]), y = taken_of_view<few>(right + at[1], walk.steps[1][last]);
        put(out + i, made<few>([&](int j) { return stored(f(wide(x.of[j]), wide(y.of[j]))); }));
    });
}

// One row an operation of two tensors: of the same order in memory, and of any views, where `out` is row-major.
#define ARITHMETIC(NAME, VALUE)                                                                                              \
    extern "C" __global__ void NAME(const T *left, const T *right, T *out, i64 n) {                                          \
        zip(left, right, out, n, [](float x, float y) { return VALUE; });                                                    \
    }                                                                                                                        \
    extern "C" __global__ void NAME##_views(const T *left, const T *right, T *out, Walk<2> walk, i64 n) {                    \
        zip_views(left, right, out, walk, n, [](float x, float y) { return VALUE; });                                        \
    }

ARITHMETIC(sum, x + y)
ARITHMETIC(difference, x - y)
ARITHMETIC(product, x *y)
ARITHMETIC(quotient, x / y)
ARITHMETIC(maximum, larger(x, y))
ARITHMETIC(minimum, -larger(-x, -y))

// As the engine numbers them. Whole numbers wrap around, which those with a sign may not in C++.
const i64 SUM = 0, DIFFERENCE = 1, PRODUCT = 2, MAXIMUM = 4, MINIMUM = 5, FLOOR_DIV = 6;
const i64 AFFINE = 0, CLAMP = 1, ABSOLUTE = 2;

// The quotient, rounded down; 0 where there is none.
__device__ inline i64 floor_div(i64 x, i64 y) {
    if (y == 0) return 0;
    if (y == -1) return (i64)(0 - (u64)x);
    return x / y - (x % y != 0 && (x < 0) != (y < 0) ? 1 : 0);
}

__device__ inline i64 of_two_integers(i64 x, i64 y, i64 f) {
    if (f == SUM) return (i64)((u64)x + (u64)y);
    if (f == DIFFERENCE) return (i64)((u64)x - (u64)y);
    if (f == PRODUCT) return (i64)((u64)x * (u64)y);
    if (f == MAXIMUM) return x > y ? x : y;
    if (f == MINIMUM) return x < y ? x : y;
    const i64 quotient = floor_div(x, y);
    return f == FLOOR_DIV ? quotient : y == 0 ? 0 : (i64)((u64)x - (u64)quotient * (u64)y);
}

extern "C" __global__ void arithmetic_of_integers(const i64 *left, const i64 *right, i64 *out, Walk<2> walk, i64 n, i64 f) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        i64 at[2];
        places(walk, i, at);
        out[i] = of_two_integers(left[at[0]], right[at[1]], f);
    }
}

// `a x + b`, or x between a and b, or |x|, or x^2.
extern "C" __global__ void function_of_integers(const i64 *in, i64 *out, i64 n, i64 f, i64 a, i64 b) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        const i64 x = in[i];
        if (f == AFFINE) out[i] = (i64)((u64)x * (u64)a + (u64)b);
        else if (f == CLAMP) out[i] = x < a ? a : x > b ? b : x;
        else if (f == ABSOLUTE) out[i] = x < 0 ? (i64)(0 - (u64)x) : x;
        else out[i] = (i64)((u64)x * (u64)x);
    }
}

// `out = grad` where `mine` beats `other` or either is NaN, half of it at a tie, else 0. `sign` is 1 for a maximum, -1 for a
// minimum. All may be any views but `out`, which is row-major.
extern "C" __global__ void winner_gradient(const T *mine, const T *other, const T *grad, T *out, Walk<3> walk, i64 n, float sign) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        i64 at[3];
        places(walk, i, at);
        const float x = wide(mine[at[0]]) * sign, y = wide(other[at[1]]) * sign;
        const float share = x == y ? 0.5f : x < y ? 0.0f : 1.0f;
        // The loser gets nothing of a gradient that is no number either.
        out[i] = stored(share == 0.0f ? 0.0f : share * wide(grad[at[2]]));
    }
}

// `sum += x`.
extern "C" __global__ void add_assign(T *sum, const T *x, i64 n) {
    zip(sum, x, sum, n, [](float x, float y) { return x + y; });
}

// What is in float plus what is in the module's type.
extern "C" __global__ void sum_in_float(const float *left, const T *right, float *out, i64 n) {
    zip(left, right, out, n, [](float x, float y) { return x + y; });
}
