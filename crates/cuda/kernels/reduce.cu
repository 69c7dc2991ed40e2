// Sums and largest values. A tensor is seen as outputs (the dimensions that stay) times terms (those that go), each with a walk
// of its own. Sums are in float, in an order that the sizes alone decide.
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
        float sum = 0.0f;
        for (i64 i = threadIdx.x; i < n_parts; i += blockDim.x) sum += parts[o * n_parts + i];
        sum = sum_of_block(sum, room);
        if (threadIdx.x == 0) out[o] = stored(sum * factor);
    }
}
