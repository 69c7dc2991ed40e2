// Rows of a table, or of a part of one, and their gradient without sorting or adding atomically. Of the `of` rows that the whole table
// has, the part has `rows` from `start` on: of others a row of zeros is taken, and nothing is added to them. A row number that the
// whole table doesn't have gives a row of NaN, sets `bad` to 1 and takes no part in the gradient.
#include "grid.cuh"

extern "C" __global__ void embedding(const T *table, const i64 *ids, T *out, int *bad, i64 n_ids, i64 rows, i64 width,
                                     i64 start, i64 of) {
    for (i64 i = first_element(); i < n_ids * width; i += all_threads()) {
        const i64 id = ids[i / width];
        const bool is_there = id >= 0 && id < of, is_here = id >= start && id < start + rows;
        if (!is_there) *bad = 1;
        out[i] = is_here ? table[(id - start) * width + i % width] : stored(is_there ? 0.0f : NAN_F);
    }
}

// Where each row of the part is used first and last: `first` begins at `n_ids` everywhere, `last` at -1.
extern "C" __global__ void embedding_spans(const i64 *ids, i64 *first, i64 *last, i64 n_ids, i64 rows, i64 start) {
    for (i64 i = first_element(); i < n_ids; i += all_threads()) {
        if (ids[i] < start || ids[i] >= start + rows) continue;
        atomicMin(&first[ids[i] - start], i);
        atomicMax(&last[ids[i] - start], i);
    }
}

// A block a row of the part. Its threads look for the row's number among 32 ids a warp, and then all add up what was found, in the
// order of the ids.
extern "C" __global__ void embedding_gradient(const T *grad, const i64 *ids, const i64 *first, const i64 *last, T *out, i64 rows,
                                              i64 width, i64 start) {
    __shared__ u32 found[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const i64 end = last[row] + 1;
        for (i64 column = threadIdx.x; column - threadIdx.x < width; column += blockDim.x) {
            float sum = 0.0f;
            for (i64 from = first[row]; from < end; from += blockDim.x) {
                const i64 mine = from + threadIdx.x;
                const u32 of_warp = __ballot_sync(0xffffffffu, mine < end && ids[mine] == start + row);
                if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = of_warp;
                __syncthreads();
                for (int warp = 0; warp < n_warps() && column < width; warp++) {
                    for (u32 left = found[warp]; left != 0; left &= left - 1) {
                        const i64 i = from + warp * 32 + __ffs((int)left) - 1;
                        sum += wide(grad[i * width + column]);
                    }
                }
                __syncthreads();
            }
            if (column < width) out[row * width + column] = stored(sum);
        }
    }
}
