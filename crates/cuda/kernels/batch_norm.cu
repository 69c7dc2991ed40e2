// Batch normalisation of rows of `width` channels, as images are whose channels run fastest. What follows it in a residual network,
// a sum with the shortcut and a ReLU, is done in the same pass, and so is their part of the gradient. Statistics of a channel, its
// weight and its bias are in float; what is merged over pieces, and may be summed over ranks, is in double.
#include "columns.cuh"

// Blocks that a multiprocessor should have registers for, so that one has loads under way while another joins what it found.
const int BESIDE = 2;

// --- statistics

// How many numbers there are, their mean, and the sum of their squared distances from it.
typedef Found<3> Few3;

// Those of two parts together, as Chan, Golub and LeVeque do.
__device__ inline Few3 joined_few(const Few3 &a, const Few3 &b) {
    const float count = a.of[0] + b.of[0], share = count > 0.0f ? b.of[0] / count : 0.0f, distance = b.of[1] - a.of[1];
    // In this order a first part, of nothing, adds nothing, however large the mean is.
    return {{count, a.of[1] + distance * share, a.of[2] + b.of[2] + distance * a.of[0] * share * distance}};
}

// What a thread has found of its columns: of each as many numbers.
struct Own3 {
    float count = 0.0f, mean[WIDE] = {}, square[WIDE] = {};

    // As `joined_few` does, whose division is the same for all columns.
    __device__ void join(int j, float share, float other_mean, float other_square) {
        const float distance = other_mean - mean[j];
        square[j] = square[j] + other_square + distance * count * share * distance;
        mean[j] += distance * share;
    }
};

// Joins N rows of a thread, `row`, `row + step` and so on, to what it has found.
template <int N, int SIDE, class Columns> __device__ void join_rows(const T *x, i64 row, const Columns &own, Own3 &mine) {
    const auto in = made<N>([&](int k) { return own.of(x + (row + k * step<SIDE>()) * own.width); });
    const float count = mine.count + (float)N, share = (float)N / count;
    each<WIDE>([&](int j) {
        float sum = 0.0f, squares = 0.0f;
        each<N>([&](int k) { sum += wide(in.of[k].of[j]); });
        const float mean = sum * (1.0f / N);
        each<N>([&](int k) { squares += (wide(in.of[k].of[j]) - mean) * (wide(in.of[k].of[j]) - mean); });
        mine.join(j, share, mean, squares);
    });
    mine.count = count;
}

// Those of each column over rows `first` to `end`, each of which is read once; the first threads of the block get a slot's each.
template <int SIDE, class Columns> __device__ Few3 moments_of_rows(const T *x, i64 first, i64 end, const Columns &own, Room<3, SIDE> &room) {
    Own3 mine;
    in_flights<FLIGHT, SIDE>(first, end, [&](auto few, i64 row) { join_rows<few, SIDE>(x, row, own, mine); });
    Few3 found[WIDE];
    each<WIDE>([&](int j) { found[j] = {{mine.count, mine.mean[j], mine.square[j]}}; });
    return joined_columns(found, room, joined_few);
}

// Each channel's mean and sum of squared distances from it, piece by piece: (width, pieces) each.
extern "C" __global__ void __launch_bounds__(BLOCK, BESIDE)
batch_moments(const T *x, float *means, float *squares, i64 rows, i64 width, i64 piece) {
    __shared__ Room<3, LINE> room;
    const i64 pieces = (rows + piece - 1) / piece;
    by_columns(are_even(x), rows, width, piece, room, [=](auto own, i64 p, i64 first, i64 end, auto &room) {
        const Few3 found = moments_of_rows(x, first, end, own, room);
        own.each_found([&](i64 column) {
            means[column * pieces + p] = found.of[1];
            squares[column * pieces + p] = found.of[2];
        });
    });
}

struct Moments {
    double count;
    double mean;
    double square;
};

__device__ inline Moments of_lane(Moments mine, int mask) {
    return {__shfl_xor_sync(0xffffffffu, mine.count, mask), __shfl_xor_sync(0xffffffffu, mine.mean, mask),
            __shfl_xor_sync(0xffffffffu, mine.square, mask)};
}

__device__ inline Moments merged(Moments a, Moments b) {
    const double count = a.count + b.count;
    if (count == 0.0) return a;
    const double distance = b.mean - a.mean;
    return {count, a.mean + distance * b.count / count, a.square + b.square + distance * distance * a.count * b.count / count};
}

// Those of channel `c`, from the pieces of `batch_moments`.
__device__ inline Moments merged_pieces(const float *means, const float *squares, i64 c, i64 rows, i64 piece, Moments *room) {
    const i64 pieces = (rows + piece - 1) / piece;
    Moments mine = {0.0, 0.0, 0.0};
    for (i64 p = threadIdx.x; p < pieces; p += blockDim.x) {
        const i64 left = rows - p * piece;
        mine = merged(mine, {(double)(left < piece ? left : piece), means[c * pieces + p], squares[c * pieces + p]});
    }
    // The butterfly joins pairs in both orders, whose bits may differ: all go by the first thread's.
    return joined(mine, room, merged);
}

// `totals` (1 + 2 width) = how many values a channel has, and each channel's sums of these and of their squares, to be added to other
// ranks': in double little is lost where mean and variance are told apart again.
extern "C" __global__ void batch_totals(const float *means, const float *squares, double *totals, i64 rows, i64 width, i64 piece) {
    __shared__ Moments room[MAX_WARPS];
    if (blockIdx.x == 0 && threadIdx.x == 0) totals[0] = (double)rows;
    for (i64 c = blockIdx.x; c < width; c += gridDim.x) {
        const Moments mine = merged_pieces(means, squares, c, rows, piece, room);
        if (threadIdx.x > 0) continue;
        totals[1 + c] = mine.mean * (double)rows;
        totals[1 + width + c] = mine.square + mine.mean * mine.mean * (double)rows;
    }
}

__device__ inline float scale_of(float variance, double eps) { return (float)(1.0 / sqrt((double)variance + eps)); }

// Moves running statistics of channel `c`, if there are some, by a share of the way to what a batch of `count` values showed; the
// running variance is that of what the batch is a sample of.
__device__ inline void follow(float *running_means, float *running_variances, i64 c, float mean, float variance, double count,
                              double share) {
    if (!running_means) return;
    const float kept = (float)(1.0 - share), unbiased = (float)(share * (count / (count - 1.0)));
    running_means[c] = running_means[c] * kept + mean * (float)share;
    running_variances[c] = running_variances[c] * kept + variance * unbiased;
}

// Where what a batch shows of its channels goes; running statistics may be null.
struct Statistics {
    float *means, *variances, *scales, *running_means, *running_variances;
    double eps, share;

    __device__ void write(i64 c, float mean, float variance, double count) const {
        means[c] = mean, variances[c] = variance, scales[c] = scale_of(variance, eps);
        follow(running_means, running_variances, c, mean, variance, count, share);
    }
};

// The mean, the variance and 1/std of each channel from the pieces of `batch_moments`, and running statistics, which may be null.
extern "C" __global__ void batch_found(const float *mean_parts, const float *square_parts, float *means, float *variances, float *scales,
                                       float *running_means, float *running_variances, i64 rows, i64 width, i64 piece, double eps,
                                       double share) {
    __shared__ Moments room[MAX_WARPS];
    const Statistics to = {means, variances, scales, running_means, running_variances, eps, share};
    for (i64 c = blockIdx.x; c < width; c += gridDim.x) {
        const Moments mine = merged_pieces(mean_parts, square_parts, c, rows, piece, room);
        if (threadIdx.x == 0) to.write(c, (float)mine.mean, (float)(mine.square / (double)rows), (double)rows);
    }
}

// The same from the totals of a batch that this one is a part of.
extern "C" __global__ void batch_shared(const double *totals, float *means, float *variances, float *scales, float *running_means,
                                        float *running_variances, i64 width, double eps, double share) {
    const Statistics to = {means, variances, scales, running_means, running_variances, eps, share};
    const double count = totals[0];
    for (i64 c = first_element(); c < width; c += all_threads()) {
        const double sum = totals[1 + c], mean = sum / count;
        to.write(c, (float)mean, (float)(fmax(totals[1 + width + c] - sum * mean, 0.0) / count), count);
    }
}

// 1/std of given variances.
extern "C" __global__ void batch_scales(const float *variances, float *scales, i64 width, double eps) {
    for (i64 c = first_element(); c < width; c += all_threads()) scales[c] = scale_of(variances[c], eps);
}

// --- what comes out

// N elements of `(x - mean) scale weight + bias`, plus `added`, cut off below zero if `relu` isn't 0.
template <int N> struct Normal {
    Pack<N, float> mean, mul, shift;

    __device__ Pack<N, T> of(const Pack<N, T> &in, const Pack<N, T> &added, bool relu) const {
        return made<N>([&](int j) {
            const float y = (wide(in.of[j]) - mean.of[j]) * mul.of[j] + shift.of[j] + wide(added.of[j]);
            return stored(relu && y <= 0.0f ? 0.0f : y);
        });
    }
};

// Weight and bias may be null.
template <int N>
__device__ Normal<N> normal_of(const Pack<N, float> &mean, const Pack<N, float> &scale, bool weighs, const Pack<N, float> &weight,
                               const Pack<N, float> &bias) {
    return {mean, made<N>([&](int j) { return weighs ? scale.of[j] * weight.of[j] : scale.of[j]; }), bias};
}

// Whether a fused ReLU that gave `out` passes gradients on, of each of WIDE neighbours, the first in the lowest bit.
__device__ inline u8 bits_of(const Pack<WIDE, T> &out) {
    u32 bits = 0;
    each<WIDE>([&](int j) { bits |= where_relu_passed(1.0f, wide(out.of[j])) != 0.0f ? 1u << j : 0u; });
    return (u8)bits;
}

// `plus`, weight and bias may be null, and so may `bits`: a byte for each WIDE neighbours, which the gradient reads in the place of the
// output. Where there are bits, `width` has to be a multiple of WIDE.
extern "C" __global__ void batch_normalise(const T *x, const float *means, const float *scales, const float *weight, const float *bias,
                                           const T *plus, T *out, u8 *bits, i64 rows, i64 width, i64 relu) {
    const auto known = [=](auto few, i64 c) {
        return normal_of<few>(taken<few>(means + c), taken<few>(scales + c), weight, taken_or_zeros<few>(weight, c),
                              taken_or_zeros<few>(bias, c));
    };
    // What lies unevenly is asked for one by one, but a byte is written by the thread that has all of its neighbours.
    const bool together = are_even(x, plus, out) || bits;
    along_known_rows(together, rows, width, known, [=](auto few, const auto &normal, auto some, i64 i, i64 step) {
        const int n = few;
        const auto in = made<some>([&](int k) { return taken<n>(x + i + k * step); });
        const auto added = made<some>([&](int k) { return taken_or_zeros<n>(plus, i + k * step); });
        each<some>([&](int k) {
            const auto y = normal.of(in.of[k], added.of[k], relu);
            put(out + i + k * step, y);
            if constexpr (n == WIDE) {
                if (bits) bits[(u64)(i + k * step) / WIDE] = bits_of(y);
            }
        });
    });
}

// All of it at once where there are few rows, of which a block has all: the statistics of the batch, running ones, and what comes out.
extern "C" __global__ void __launch_bounds__(BLOCK)
batch_whole(const T *x, const float *weight, const float *bias, const T *plus, T *out, float *means, float *variances, float *scales,
            float *running_means, float *running_variances, i64 rows, i64 width, i64 relu, double eps, double share) {
    __shared__ Room<3, SECTOR> room;
    const bool even = are_even(x, plus, out) && are_even(weight, bias, means, scales);
    const Statistics to = {means, variances, scales, running_means, running_variances, eps, share};
    by_columns(even, rows, width, rows, room, [=](auto own, i64, i64, i64 end, auto &room) {
        const Few3 found = moments_of_rows(x, 0, end, own, room);
        own.each_found([&](i64 c) { to.write(c, found.of[1], (float)((double)found.of[2] / (double)rows), (double)rows); });
        __syncthreads();
        const auto normal = normal_of<WIDE>(own.of_any(means), own.of_any(scales), weight, own.of_any(weight), own.of_any(bias));
        in_flights<FLIGHT>(own, 0, end, [&](auto few, i64 row) {
            const auto at = [&](int k) { return (row + k * step<SECTOR>()) * width; };
            const auto in = made<few>([&](int k) { return own.of(x + at(k)); });
            const auto added = made<few>([&](int k) { return own.of_or_zeros(plus, at(k)); });
            each<few>([&](int k) { own.put(out + at(k), normal.of(in.of[k], added.of[k], relu)); });
        });
    });
}

// --- gradients

// What of a gradient counts: where `mask`, the output of a fused ReLU, isn't null, what that passed on.
struct ByOutput {
    const T *mask;

    __device__ bool is_even() const { return are_even(mask); }

    template <int N> __device__ Pack<N, T> taken(i64 i) const { return taken_or_zeros<N>(mask, i); }

    // The same of a thread's columns of the row that begins with element `at`.
    template <class Columns> __device__ Pack<WIDE, T> of(const Columns &own, i64 at) const { return own.of_or_zeros(mask, at); }

    template <int N> __device__ Pack<N, float> passed(const Pack<N, T> &grad, const Pack<N, T> &out) const {
        return made<N>([&](int j) { return mask ? where_relu_passed(wide(grad.of[j]), wide(out.of[j])) : wide(grad.of[j]); });
    }
};

// The same by the bits that `batch_normalise` has written.
struct ByBits {
    const u8 *bits;

    __device__ bool is_even() const { return true; }

    template <int N> __device__ u32 taken(i64 i) const { return (u32)bits[(u64)i / WIDE] >> ((u64)i % WIDE); }

    template <int SIDE> __device__ u32 of(const Own<SIDE, true> &own, i64 at) const { return taken<WIDE>(at + own.own(0)); }

    template <int SIDE> __device__ u32 of(const Own<SIDE, false> &own, i64 at) const {
        u32 found = 0;
        each<WIDE>([&](int j) {
            if (own.own(j) < own.width) found |= (taken<1>(at + own.own(j)) & 1u) << j;
        });
        return found;
    }

    template <int N> __device__ Pack<N, float> passed(const Pack<N, T> &grad, u32 found) const {
        return made<N>([&](int j) { return found >> j & 1u ? wide(grad.of[j]) : 0.0f; });
    }
};

// The gradient of an output, which may come in two parts that are to be added up, as where a shortcut begins: `more` may be null.
struct Graded {
    const T *grad, *more;

    __device__ bool is_even() const { return are_even(grad, more); }
};

// The sum of two parts, if there are `two`.
template <int N> __device__ Pack<N, T> sum_of_two(const Pack<N, T> &own, bool two, const Pack<N, T> &rest) {
    return made<N>([&](int j) { return two ? stored(wide(own.of[j]) + wide(rest.of[j])) : own.of[j]; });
}

// A thread's part of N rows.
template <int N, class Gate, class Passing> struct Loaded {
    Gate gate;
    Pack<N, Pack<WIDE, T>> in, grad;
    Pack<N, Passing> passing;

    // What of row k's gradient counts.
    __device__ Pack<WIDE, float> passed(int k) const { return gate.passed(grad.of[k], passing.of[k]); }
};

// Rows `row`, `row + step` and so on.
template <int N, int SIDE, class Gate, class Columns>
__device__ auto loaded(const T *x, const Graded &grad, const Gate &gate, i64 row, const Columns &own) {
    const auto at = [&](int k) { return (row + k * step<SIDE>()) * own.width; };
    return Loaded<N, Gate, decltype(gate.of(own, row))>{
        gate, made<N>([&](int k) { return own.of(x + at(k)); }),
        made<N>([&](int k) { return sum_of_two(own.of(grad.grad + at(k)), grad.more, own.of_or_zeros(grad.more, at(k))); }),
        made<N>([&](int k) { return gate.of(own, at(k)); })};
}

// Each channel's sums of grad, and of grad (x - mean), over some rows.
template <int SIDE, class Gate, class Columns>
__device__ Found<2> sums_of_gradients(const T *x, const Graded &grad, const Gate &gate, const float *means, i64 first, i64 end,
                                      const Columns &own, Room<2, SIDE> &room) {
    const auto mean = own.of_any(means);
    return sums_of_rows(own, first, end, room, [&](auto few, i64 row, Found<2>(&found)[WIDE]) {
        const auto rows = loaded<few, SIDE>(x, grad, gate, row, own);
        each<few>([&](int k) {
            const auto g = rows.passed(k);
            each<WIDE>([&](int j) {
                found[j].of[0] += g.of[j];
                found[j].of[1] += g.of[j] * (wide(rows.in.of[k].of[j]) - mean.of[j]);
            });
        });
    });
}

// The same piece by piece: (width, pieces) each. Of `mask` and `bits`, which of them counts, one may be there.
extern "C" __global__ void __launch_bounds__(BLOCK, BESIDE)
batch_sums(const T *x, const T *grad, const T *more, const T *mask, const u8 *bits, const float *means, float *grad_parts,
           float *product_parts, i64 rows, i64 width, i64 piece) {
    __shared__ Room<2, LINE> room;
    const i64 pieces = (rows + piece - 1) / piece;
    const Graded both = {grad, more};
    const auto sum_by = [&](const auto &gate) {
        const bool even = are_even(x, means) && both.is_even() && gate.is_even();
        by_columns(even, rows, width, piece, room, [=](auto own, i64 p, i64 first, i64 end, auto &room) {
            const Found<2> sums = sums_of_gradients(x, both, gate, means, first, end, own, room);
            own.each_found([&](i64 column) {
                grad_parts[column * pieces + p] = sums.of[0];
                product_parts[column * pieces + p] = sums.of[1];
            });
        });
    };
    if (bits) return sum_by(ByBits{bits});
    sum_by(ByOutput{mask});
}

// A channel's sums over the pieces of `batch_sums`.
struct Sums {
    double grad;
    double product;
};

__device__ inline Sums merged_sums(const float *grad_parts, const float *product_parts, i64 c, i64 pieces, double *room) {
    Sums sums = {0.0, 0.0};
    for (i64 p = threadIdx.x; p < pieces; p += blockDim.x) {
        sums.grad += (double)grad_parts[c * pieces + p];
        sums.product += (double)product_parts[c * pieces + p];
    }
    return {sum_of_block(sums.grad, room), sum_of_block(sums.product, room)};
}

// `sums` (2, width) = these, to be added to other ranks'.
extern "C" __global__ void merge_sums(const float *grad_parts, const float *product_parts, double *sums, i64 pieces, i64 width) {
    __shared__ double room[MAX_WARPS];
    for (i64 c = blockIdx.x; c < width; c += gridDim.x) {
        const Sums mine = merged_sums(grad_parts, product_parts, c, pieces, room);
        if (threadIdx.x == 0) sums[c] = mine.grad, sums[width + c] = mine.product;
    }
}

// The gradients of weight and bias of channel `c`, from the sums of this part of the batch; either may be null.
__device__ inline void channel_gradients(float *weight, float *bias, i64 c, Sums sums, float scale) {
    if (weight) weight[c] = (float)(sums.product * (double)scale);
    if (bias) bias[c] = (float)sums.grad;
}

extern "C" __global__ void batch_channel_gradients(const double *sums, const float *scales, float *weight, float *bias, i64 width) {
    for (i64 c = first_element(); c < width; c += all_threads()) {
        channel_gradients(weight, bias, c, {sums[c], sums[width + c]}, scales[c]);
    }
}

// What the gradient of the input needs of a channel: `factors` (3, width) = weight times scale, the mean of grad, and the mean of
// grad (x - mean) times the scale squared. The means are over `count` values, and 0 where that is 0, as where the statistics were given.
__device__ inline void write_factors(float *factors, i64 c, i64 width, Sums sums, float scale, const float *weight, double count) {
    factors[c] = weight ? scale * weight[c] : scale;
    factors[width + c] = count > 0.0 ? (float)(sums.grad / count) : 0.0f;
    factors[2 * width + c] = count > 0.0 ? (float)(sums.product / count * (double)scale * (double)scale) : 0.0f;
}

// Those from the sums and the totals of all parts of a batch.
extern "C" __global__ void batch_factors(const double *sums, const double *totals, const float *scales, const float *weight,
                                         float *factors, i64 width) {
    for (i64 c = first_element(); c < width; c += all_threads()) {
        write_factors(factors, c, width, {sums[c], sums[width + c]}, scales[c], weight, totals[0]);
    }
}

// Both, of the sums of `batch_sums`.
extern "C" __global__ void batch_gradients_found(const float *grad_parts, const float *product_parts, const float *scales,
                                                 const float *weight, float *of_weight, float *of_bias, float *factors, i64 pieces,
                                                 i64 width, double count) {
    __shared__ double room[MAX_WARPS];
    for (i64 c = blockIdx.x; c < width; c += gridDim.x) {
        const Sums sums = merged_sums(grad_parts, product_parts, c, pieces, room);
        if (threadIdx.x > 0) continue;
        channel_gradients(of_weight, of_bias, c, sums, scales[c]);
        write_factors(factors, c, width, sums, scales[c], weight, count);
    }
}

// What is common to N neighbours of a row.
template <int N> struct Slopes {
    Pack<N, float> mean, factor, less, slope;

    // The gradient of the input, from what of the output's counts.
    __device__ Pack<N, T> of(const Pack<N, T> &in, const Pack<N, float> &g) const {
        return made<N>([&](int j) {
            return stored(factor.of[j] * (g.of[j] - less.of[j] - (wide(in.of[j]) - mean.of[j]) * slope.of[j]));
        });
    }
};

template <int N> __device__ Pack<N, T> all_stored(const Pack<N, float> &g) {
    return made<N>([&](int j) { return stored(g.of[j]); });
}

// The gradients of the input and, where `plus` isn't null, of what was added. Of `mask` and `bits` one may be there.
extern "C" __global__ void batch_input_gradient(const T *x, const T *grad, const T *more, const T *mask, const u8 *bits,
                                                const float *means, const float *factors, T *out, T *plus, i64 rows, i64 width) {
    const auto known = [=](auto few, i64 c) {
        return Slopes<few>{taken<few>(means + c), taken<few>(factors + c), taken<few>(factors + width + c),
                           taken<few>(factors + 2 * width + c)};
    };
    const auto find_by = [&](const auto &gate) {
        const bool even = are_even(x, grad, more, out, plus) && gate.is_even();
        along_known_rows(even, rows, width, known, [=](auto few, const auto &slopes, auto some, i64 i, i64 step) {
            const int n = few;
            const auto in = made<some>([&](int k) { return taken<n>(x + i + k * step); });
            const auto own = made<some>([&](int k) { return taken<n>(grad + i + k * step); });
            const auto rest = made<some>([&](int k) { return taken_or_zeros<n>(more, i + k * step); });
            const auto passing = made<some>([&](int k) { return gate.template taken<n>(i + k * step); });
            each<some>([&](int k) {
                const auto g = gate.passed(sum_of_two(own.of[k], more, rest.of[k]), passing.of[k]);
                put(out + i + k * step, slopes.of(in.of[k], g));
                if (plus) put(plus + i + k * step, all_stored(g));
            });
        });
    };
    if (bits) return find_by(ByBits{bits});
    find_by(ByOutput{mask});
}

// All of it at once where there are few rows, of which a block has all.
extern "C" __global__ void __launch_bounds__(BLOCK)
batch_whole_gradient(const T *x, const T *grad, const T *more, const T *mask, const float *means, const float *scales,
                     const float *weight, T *out, T *plus, float *of_weight, float *of_bias, float *factors, i64 rows, i64 width,
                     double count) {
    __shared__ Room<2, SECTOR> room;
    const Graded both = {grad, more};
    const ByOutput gate = {mask};
    const bool even = are_even(x, out, plus) && gate.is_even() && both.is_even() && are_even(means, factors);
    by_columns(even, rows, width, rows, room, [=](auto own, i64, i64, i64 end, auto &room) {
        const Found<2> found = sums_of_gradients(x, both, gate, means, 0, end, own, room);
        own.each_found([&](i64 c) {
            const Sums sums = {(double)found.of[0], (double)found.of[1]};
            channel_gradients(of_weight, of_bias, c, sums, scales[c]);
            write_factors(factors, c, width, sums, scales[c], weight, count);
        });
        __syncthreads();
        const Slopes<WIDE> slopes = {own.of_any(means), own.of_any(factors), own.of_any(factors + width), own.of_any(factors + 2 * width)};
        in_flights<FLIGHT>(own, 0, end, [&](auto few, i64 row) {
            const auto rows = loaded<few, SECTOR>(x, both, gate, row, own);
            each<few>([&](int k) {
                const i64 at = (row + k * step<SECTOR>()) * width;
                const auto g = rows.passed(k);
                own.put(out + at, slopes.of(rows.in.of[k], g));
                if (plus) own.put(plus + at, all_stored(g));
            });
        });
    });
}
