// Sums and largest values. A tensor is seen as outputs (the dimensions that stay) times terms (those that go), each with a walk
// of its own. Sums are in float, in an order that the sizes alone decide.
#include "columns.cuh"
#include "grid.cuh"
#include "strided.cuh"

// A thread an output: where there are many outputs of few terms, or neighbouring outputs are neighbours in memory.
extern "C" __global__ void sum_by_thread(const T *x, T *out, Walk<1> outputs, Walk<1> terms, i64 n_outputs, i64 n_terms) {
    for (i64 o = first_element(); o < n_outputs; o += all_threads()) {
        const T *from = x + place(outputs, o);
        float sum = 0.0f;
        for (i64 i = 0; i < n_terms; i++) sum += wide(from[place(terms, i)]);
        out[o] = stored(sum);
    }
}

// The sum of terms `first` to `end`, by all threads of a block.
__device__ float block_sum(const T *from, const Walk<1> &terms, i64 first, i64 end, float *room) {
    float sum = 0.0f;
    for (i64 i = first + threadIdx.x; i < end; i += blockDim.x) sum += wide(from[place(terms, i)]);
    return sum_of_block(sum, room);
}

// A block an output.
extern "C" __global__ void sum_by_block(const T *x, T *out, Walk<1> outputs, Walk<1> terms, i64 n_outputs, i64 n_terms) {
    __shared__ float room[MAX_WARPS];
    for (i64 o = blockIdx.x; o < n_outputs; o += gridDim.x) {
        const float sum = block_sum(x + place(outputs, o), terms, 0, n_terms, room);
        if (threadIdx.x == 0) out[o] = stored(sum);
    }
}

// A block for each `piece` terms of an output, where there are many: `parts` (outputs, pieces) are added up by `sum_parts`.
extern "C" __global__ void sum_pieces(const T *x, float *parts, Walk<1> outputs, Walk<1> terms, i64 n_outputs, i64 n_terms, i64 piece) {
    __shared__ float room[MAX_WARPS];
    const i64 n_pieces = (n_terms + piece - 1) / piece;
    for (i64 i = blockIdx.x; i < n_outputs * n_pieces; i += gridDim.x) {
        const i64 o = i / n_pieces, first = (i - o * n_pieces) * piece;
        const i64 end = first + piece < n_terms ? first + piece : n_terms;
        const float sum = block_sum(x + place(outputs, o), terms, first, end, room);
        if (threadIdx.x == 0) parts[i] = sum;
    }
}

// `out[o] = factor` times the sum of row `o` of `parts`.
extern "C" __global__ void sum_parts(const float *parts, T *out, i64 n_outputs, i64 n_parts, float factor) {
    __shared__ float room[MAX_WARPS];
    for (i64 o = blockIdx.x; o < n_outputs; o += gridDim.x) {
        const float sum = sum_of_parts(parts + o * n_parts, n_parts, room);
        if (threadIdx.x == 0) out[o] = stored(sum * factor);
    }
}

// The sums of the columns of `x` (rows, width), piece by piece: the rows of `parts` (width, pieces) are added up by `sum_parts`.
extern "C" __global__ void sum_columns(const T *x, float *parts, i64 rows, i64 width, i64 piece) {
    __shared__ Room<1, LINE> room;
    const i64 pieces = (rows + piece - 1) / piece;
    const auto term_of = [=](auto own) {
        return [=](auto few, i64 row, Found<1>(&found)[WIDE]) {
            const auto in = made<few>([&](int k) { return own.of(x + (row + k * step<LINE>()) * width); });
            each<few>([&](int k) { each<WIDE>([&](int j) { found[j].of[0] += wide(in.of[k].of[j]); }); });
        };
    };
    sums_of_columns(are_even(x), rows, width, piece, room, term_of,
                    [=](i64 p, i64 column, const Found<1> &sums) { parts[column * pieces + p] = sums.of[0]; });
}

// Whole numbers, which wrap around: a block a piece of an output, one after the other in `out`.
extern "C" __global__ void sum_integers(const i64 *x, i64 *out, Walk<1> outputs, Walk<1> terms, i64 n_outputs, i64 n_terms, i64 piece) {
    __shared__ u64 room[MAX_WARPS];
    // Of nothing there is one, of nothing.
    const i64 pieces = n_terms <= piece ? 1 : (n_terms + piece - 1) / piece;
    for (i64 i = blockIdx.x; i < n_outputs * pieces; i += gridDim.x) {
        const i64 *from = x + place(outputs, i / pieces);
        const i64 first = i % pieces * piece;
        const i64 end = first + piece < n_terms ? first + piece : n_terms;
        u64 sum = 0;
        for (i64 k = first + threadIdx.x; k < end; k += blockDim.x) sum += (u64)from[place(terms, k)];
        sum = sum_of_block(sum, room);
        if (threadIdx.x == 0) out[i] = (i64)sum;
    }
}

// The running sums along the middle of `x` (outer, size, inner), from its end if `backwards`: a thread a line.
extern "C" __global__ void running_sums(const T *x, T *out, i64 outer, i64 size, i64 inner, i64 backwards) {
    for (i64 line = first_element(); line < outer * inner; line += all_threads()) {
        const i64 first = line / inner * size * inner + line % inner;
        double sum = 0.0;
        for (i64 i = 0; i < size; i++) {
            const i64 at = first + (backwards ? size - 1 - i : i) * inner;
            sum += wide(x[at]);
            out[at] = stored((float)sum);
        }
    }
}

// The same of rows: a block each, which adds up as many neighbours as it has threads and what came before them.
extern "C" __global__ void running_sums_of_rows(const T *x, T *out, i64 rows, i64 width, i64 backwards) {
    __shared__ double room[MAX_WARPS * 32];
    const i64 threads = blockDim.x, own = threadIdx.x;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        double before = 0.0;
        for (i64 first = 0; first < width; first += threads) {
            const i64 i = first + own, at = row * width + (backwards ? width - 1 - i : i);
            // Somebody may still read what was summed before.
            __syncthreads();
            room[own] = i < width ? wide(x[at]) : 0.0;
            for (i64 step = 1; step < threads; step *= 2) {
                __syncthreads();
                const double left = own >= step ? room[own - step] : 0.0;
                __syncthreads();
                room[own] += left;
            }
            __syncthreads();
            if (i < width) out[at] = stored((float)(before + room[own]));
            before += room[threads - 1];
        }
    }
}

// A value and where it stands.
struct Best {
    float value;
    i64 at;
};

__device__ inline Best of_lane(Best mine, int mask) {
    return {__shfl_xor_sync(0xffffffffu, mine.value, mask), __shfl_xor_sync(0xffffffffu, mine.at, mask)};
}

// The larger of two, the first of equals; a NaN is larger than any number, the first one of all.
__device__ inline Best better(Best a, Best b) {
    const bool equal = a.value == b.value || (is_nan(a.value) && is_nan(b.value));
    if (equal) return a.at < b.at ? a : b;
    return is_nan(a.value) || a.value > b.value ? a : b;
}

// The largest along the middle of `x` (outer, size, inner), and where the first of them stands: a thread an output.
extern "C" __global__ void max_by_thread(const T *x, T *out, i64 *index, i64 outer, i64 size, i64 inner) {
    for (i64 o = first_element(); o < outer * inner; o += all_threads()) {
        const T *from = x + o / inner * size * inner + o % inner;
        Best best = {wide(from[0]), 0};
        for (i64 i = 1; i < size; i++) best = better(best, {wide(from[i * inner]), i});
        out[o] = stored(best.value);
        index[o] = best.at;
    }
}

// The same of rows, a block each.
extern "C" __global__ void max_by_block(const T *x, T *out, i64 *index, i64 rows, i64 width) {
    __shared__ Best room[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *from = x + row * width;
        Best best = {wide(from[0]), 0};
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) best = better(best, {wide(from[i]), i});
        best = joined(best, room, better);
        if (threadIdx.x == 0) out[row] = stored(best.value), index[row] = best.at;
    }
}

// The `n` largest of each row, the largest first: where they stand. A block a row, which looks for one after the other.
extern "C" __global__ void top_by_block(const T *x, i64 *index, i64 rows, i64 width, i64 n) {
    __shared__ Best room[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *from = x + row * width;
        Best last = {};
        for (i64 k = 0; k < n; k++) {
            // What comes after all others.
            Best best = {-INFINITY_F, width};
            for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
                const Best own = {wide(from[i]), i};
                if (k == 0 || (i != last.at && better(last, own).at == last.at)) best = better(best, own);
            }
            last = joined(best, room, better);
            if (threadIdx.x == 0) index[row * n + k] = last.at;
        }
    }
}

// The gradient of the largest (outer, inner) goes to where it stood in `out` (outer, size, inner).
extern "C" __global__ void max_gradient(const T *grad, const i64 *index, T *out, i64 outer, i64 size, i64 inner) {
    for (i64 i = first_element(); i < outer * size * inner; i += all_threads()) {
        const i64 row = i / inner, o = row / size * inner + i % inner;
        out[i] = index[o] == row % size ? grad[o] : stored(0.0f);
    }
}
