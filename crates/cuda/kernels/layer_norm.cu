// Normalisation of rows of `width` numbers, forward and backward. Each row's mean and 1/std are in float, and so are weight and
// bias, which are null where there are none. Rows in float may come out in the module's type, as products want them: then their
// gradient comes in that, and goes on in float.
#include "columns.cuh"
#include "packs.cuh"

template <class In, class Out>
__device__ void normalise(const In *in, const float *weight, const float *bias, Out *out, float *means, float *scales, i64 rows,
                          i64 width, float eps, float *room) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const In *x = in + row * width;
        Out *y = out + row * width;
        float sum = 0.0f;
        by_block(row * width, width, [&](auto few, i64 i) {
            const auto own = taken<few>(x + i);
            each<few>([&](int j) { sum += wide(own.of[j]); });
        });
        const float mean = sum_of_block(sum, room) / (float)width;
        float squares = 0.0f;
        by_block(row * width, width, [&](auto few, i64 i) {
            const auto own = taken<few>(x + i);
            each<few>([&](int j) { squares += (wide(own.of[j]) - mean) * (wide(own.of[j]) - mean); });
        });
        const float scale = 1.0f / sqrtf(sum_of_block(squares, room) / (float)width + eps);
        by_block(row * width, width, [&](auto few, i64 i) {
            const auto own = taken<few>(x + i);
            const auto factor = taken_or_zeros<few>(weight, i);
            const auto shift = taken_or_zeros<few>(bias, i);
            put(y + i, made<few>([&](int j) {
                    const float u = (wide(own.of[j]) - mean) * scale;
                    return rounded<Out>((weight ? u * factor.of[j] : u) + (bias ? shift.of[j] : 0.0f));
                }));
        });
        if (threadIdx.x == 0) means[row] = mean, scales[row] = scale;
    }
}

// With u = (x - mean) scale and h = grad weight, the gradient of a row is scale (h - mean(h) - u mean(h u)).
template <class In, class Out>
__device__ void gradient(const In *in, const float *weight, const Out *grad, const float *means, const float *scales, In *out, i64 rows,
                         i64 width, float *room) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const i64 start = row * width;
        const float mean = means[row], scale = scales[row];
        // Calls `use(few, i, h, u)` over the row.
        const auto over = [&](auto use) {
            by_block(start, width, [&](auto few, i64 i) {
                const auto x = taken<few>(in + start + i);
                const auto g = taken<few>(grad + start + i);
                const auto factor = taken_or_zeros<few>(weight, i);
                use(few, i, [&](int j) { return wide(g.of[j]) * (weight ? factor.of[j] : 1.0f); },
                    [&](int j) { return (wide(x.of[j]) - mean) * scale; });
            });
        };
        float sum_h = 0.0f, sum_hu = 0.0f;
        over([&](auto few, i64, auto h, auto u) {
            each<few>([&](int j) {
                sum_h += h(j);
                sum_hu += h(j) * u(j);
            });
        });
        const float mean_h = sum_of_block(sum_h, room) / (float)width, mean_hu = sum_of_block(sum_hu, room) / (float)width;
        over([&](auto few, i64 i, auto h, auto u) {
            put(out + start + i, made<few>([&](int j) { return rounded<In>(scale * (h(j) - mean_h - u(j) * mean_hu)); }));
        });
    }
}

// Rows of up to EIGHT numbers a thread, whose number EIGHT divides: each thread has neighbours, which it reads once.
const int EIGHT = 8;

// Two sums that go together.
struct Two {
    float of[2];
};
__device__ inline Two of_lane(Two mine, int mask) { return {{of_lane(mine.of[0], mask), of_lane(mine.of[1], mask)}}; }

// As `normalise`. Where there is a branch, rows are sums of those of `in` and of the branch, and go to `sums` as well.
template <class In, class Out>
__device__ void normalise_whole(const In *in, const T *branch, In *sums, const float *weight, const float *bias, Out *out, float *means,
                                float *scales, i64 rows, i64 width, float eps, float *room) {
    const i64 c = (i64)threadIdx.x * EIGHT;
    const bool has_any = c < width;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const i64 at = row * width + c;
        Pack<EIGHT, In> x = {};
        if (has_any) {
            x = taken<EIGHT>(in + at);
            if (branch) {
                const auto more = taken<EIGHT>(branch + at);
                each<EIGHT>([&](int j) { x.of[j] = rounded<In>(wide(x.of[j]) + wide(more.of[j])); });
                put(sums + at, x);
            }
        }
        float sum = 0.0f, squares = 0.0f;
        each<EIGHT>([&](int j) { sum += wide(x.of[j]); });
        const float mean = sum_of_block(sum, room) / (float)width;
        each<EIGHT>([&](int j) { squares += has_any ? (wide(x.of[j]) - mean) * (wide(x.of[j]) - mean) : 0.0f; });
        const float scale = 1.0f / sqrtf(sum_of_block(squares, room) / (float)width + eps);
        if (has_any) {
            const auto factor = taken_or_zeros<EIGHT>(weight, c), shift = taken_or_zeros<EIGHT>(bias, c);
            put(out + at, made<EIGHT>([&](int j) {
                    const float u = (wide(x.of[j]) - mean) * scale;
                    return rounded<Out>((weight ? u * factor.of[j] : u) + (bias ? shift.of[j] : 0.0f));
                }));
        }
        if (threadIdx.x == 0) means[row] = mean, scales[row] = scale;
    }
}

// As `gradient`, of bands of `band` rows, to which `plus` is added where there is such; `halves`, if it isn't null, gets the same in the
// module's type. What a band comes to of the gradients of weight and bias goes to their parts, EIGHT columns of it side by side:
// (width / EIGHT, bands, EIGHT). Each is null where nobody wants it.
template <class In, class Out>
__device__ void gradient_whole(const In *in, const float *weight, const Out *grad, const In *plus, const float *means, const float *scales,
                               In *out, T *halves, float *weight_parts, float *bias_parts, i64 rows, i64 width, i64 band, Two *room) {
    const i64 c = (i64)threadIdx.x * EIGHT, bands = (rows + band - 1) / band;
    const bool has_any = c < width;
    const auto factor = made<EIGHT>([&](int j) { return weight && has_any ? weight[c + j] : 1.0f; });
    for (i64 b = blockIdx.x; b < bands; b += gridDim.x) {
        Pack<EIGHT, float> of_weight = {}, of_bias = {};
        const i64 end = (b + 1) * band < rows ? (b + 1) * band : rows;
        for (i64 row = b * band; row < end; row++) {
            const i64 at = row * width + c;
            Pack<EIGHT, In> x = {}, more = {};
            Pack<EIGHT, Out> g = {};
            if (has_any) {
                x = taken<EIGHT>(in + at);
                g = taken<EIGHT>(grad + at);
                more = taken_or_zeros<EIGHT>(plus, at);
            }
            const float mean = means[row], scale = scales[row];
            const auto u = made<EIGHT>([&](int j) { return (wide(x.of[j]) - mean) * scale; });
            const auto h = made<EIGHT>([&](int j) { return wide(g.of[j]) * factor.of[j]; });
            Two sums = {};
            each<EIGHT>([&](int j) {
                sums.of[0] += h.of[j];
                sums.of[1] += h.of[j] * u.of[j];
            });
            sums = joined(sums, room, [](Two a, Two b) { return Two{{a.of[0] + b.of[0], a.of[1] + b.of[1]}}; });
            if (!has_any) continue;
            const float mean_h = sums.of[0] / (float)width, mean_hu = sums.of[1] / (float)width;
            auto own = made<EIGHT>([&](int j) { return rounded<In>(scale * (h.of[j] - mean_h - u.of[j] * mean_hu)); });
            if (plus) each<EIGHT>([&](int j) { own.of[j] = rounded<In>(wide(more.of[j]) + wide(own.of[j])); });
            if (out) put(out + at, own);
            if (halves) put(halves + at, made<EIGHT>([&](int j) { return stored(wide(own.of[j])); }));
            each<EIGHT>([&](int j) {
                of_weight.of[j] += wide(g.of[j]) * u.of[j];
                of_bias.of[j] += wide(g.of[j]);
            });
        }
        const i64 part = (c / EIGHT * bands + b) * EIGHT;
        if (has_any && weight_parts) put(weight_parts + part, of_weight);
        if (has_any && bias_parts) put(bias_parts + part, of_bias);
    }
}

// What the parts of all bands come to; weight or bias may be null.
extern "C" __global__ void layer_norm_bands(const float *weight_parts, const float *bias_parts, float *weight, float *bias, i64 width,
                                            i64 bands) {
    __shared__ float room[MAX_WARPS][EIGHT];
    const i64 groups = width / EIGHT;
    for (i64 row = blockIdx.x; row < 2 * groups; row += gridDim.x) {
        const bool is_bias = row >= groups;
        const i64 group = is_bias ? row - groups : row;
        float *out = is_bias ? bias : weight;
        if (!out) continue;
        const float *parts = (is_bias ? bias_parts : weight_parts) + group * bands * EIGHT;
        // A thread's parts are of one column, and those of every eighth thread of the same.
        float sum = 0.0f;
        for (i64 i = threadIdx.x; i < bands * EIGHT; i += blockDim.x) sum += parts[i];
        for (int step = 16; step >= EIGHT; step /= 2) sum += of_lane(sum, step);
        // Somebody may still read what was joined before.
        __syncthreads();
        if (threadIdx.x % 32 < EIGHT) room[threadIdx.x / 32][threadIdx.x % 32] = sum;
        __syncthreads();
        if (threadIdx.x < EIGHT) {
            sum = room[0][threadIdx.x];
            for (int warp = 1; warp < n_warps(); warp++) sum += room[warp][threadIdx.x];
            out[group * EIGHT + threadIdx.x] = sum;
        }
    }
}

// The gradients of weight and bias, piece by piece, (width, pieces) each.
template <class In, class Out>
__device__ void columns(const In *x, const Out *grad, const float *means, const float *scales, float *weight_parts, float *bias_parts,
                        i64 rows, i64 width, i64 piece, Room<2, LINE> &room) {
    const i64 pieces = (rows + piece - 1) / piece;
    const auto term_of = [=](auto own) {
        return [=](auto few, i64 first, Found<2>(&found)[WIDE]) {
            const auto row = [&](int k) { return first + k * step<LINE>(); };
            const auto in = made<few>([&](int k) { return own.of(x + row(k) * width); });
            const auto gradient = made<few>([&](int k) { return own.of(grad + row(k) * width); });
            const auto mean = made<few>([&](int k) { return means[row(k)]; }), scale = made<few>([&](int k) { return scales[row(k)]; });
            each<few>([&](int k) {
                each<WIDE>([&](int j) {
                    const float g = wide(gradient.of[k].of[j]);
                    found[j].of[0] += g * ((wide(in.of[k].of[j]) - mean.of[k]) * scale.of[k]);
                    found[j].of[1] += g;
                });
            });
        };
    };
    sums_of_columns(are_even(x) && are_even(grad), rows, width, piece, room, term_of, [=](i64 p, i64 column, const Found<2> &sums) {
        weight_parts[column * pieces + p] = sums.of[0];
        bias_parts[column * pieces + p] = sums.of[1];
    });
}

// What the rows of both come to; weight or bias may be null.
extern "C" __global__ void layer_norm_parameters(const float *weight_parts, const float *bias_parts, float *weight, float *bias, i64 width,
                                                 i64 pieces) {
    __shared__ float room[MAX_WARPS];
    for (i64 row = blockIdx.x; row < 2 * width; row += gridDim.x) {
        const bool is_bias = row >= width;
        const i64 c = is_bias ? row - width : row;
        float *out = is_bias ? bias : weight;
        if (!out) continue;
        const float sum = sum_of_parts((is_bias ? bias_parts : weight_parts) + c * pieces, pieces, room);
        if (threadIdx.x == 0) out[c] = sum;
    }
}

// Those of rows in a type that come out in a type.
#define ROWS(NAME, IN, OUT)                                                                                                  \
    extern "C" __global__ void NAME(const IN *in, const float *weight, const float *bias, OUT *out, float *means,            \
                                    float *scales, i64 rows, i64 width, float eps) {                                         \
        __shared__ float room[MAX_WARPS];                                                                                    \
        normalise(in, weight, bias, out, means, scales, rows, width, eps, room);                                             \
    }                                                                                                                        \
    extern "C" __global__ void NAME##_gradient(const IN *in, const float *weight, const OUT *grad, const float *means,       \
                                               const float *scales, IN *out, i64 rows, i64 width) {                          \
        __shared__ float room[MAX_WARPS];                                                                                    \
        gradient(in, weight, grad, means, scales, out, rows, width, room);                                                   \
    }                                                                                                                        \
    extern "C" __global__ void NAME##_columns(const IN *x, const OUT *grad, const float *means, const float *scales,         \
                                              float *weight_parts, float *bias_parts, i64 rows, i64 width, i64 piece) {      \
        __shared__ Room<2, LINE> room;                                                                                        \
        columns(x, grad, means, scales, weight_parts, bias_parts, rows, width, piece, room);                                 \
    }                                                                                                                        \
    extern "C" __global__ void NAME##_whole(const IN *in, const T *branch, IN *sums, const float *weight, const float *bias, \
                                            OUT *out, float *means, float *scales, i64 rows, i64 width, float eps) {         \
        __shared__ float room[MAX_WARPS];                                                                                    \
        normalise_whole(in, branch, sums, weight, bias, out, means, scales, rows, width, eps, room);                         \
    }                                                                                                                        \
    extern "C" __global__ void NAME##_whole_gradient(const IN *in, const float *weight, const OUT *grad, const IN *plus,     \
                                                     const float *means, const float *scales, IN *out, T *halves,            \
                                                     float *weight_parts, float *bias_parts, i64 rows, i64 width,            \
                                                     i64 band) {                                                             \
        __shared__ Two room[MAX_WARPS];                                                                                      \
        gradient_whole(in, weight, grad, plus, means, scales, out, halves, weight_parts, bias_parts, rows, width, band,      \
                       room);                                                                                                \
    }

ROWS(layer_norm, T, T)
ROWS(rounded_layer_norm, float, T)
