// Rows of a table, or of a part of one, and their gradient without sorting or adding atomically. Of the `of` rows that the whole table
// has, the part has `rows` from `start` on: of others a row of zeros is taken, and nothing is added to them. A row number that the
// whole table doesn't have gives a row of NaN, sets `bad` to 1 and takes no part in the gradient.
#include "packs.cuh"

extern "C" __global__ void embedding(const T *table, const i64 *ids, T *out, int *bad, i64 n_ids, i64 rows, i64 width,
                                     i64 start, i64 of) {
    along_rows(are_even(table, out), n_ids, width, [=](auto few, i64 i, i64 row, i64 c) {
        const i64 id = ids[row];
        const bool is_there = id >= 0 && id < of, is_here = id >= start && id < start + rows;
        if (!is_there) *bad = 1;
        if (is_here) {
            put(out + i, taken<few>(table + (id - start) * width + c));
        } else {
            put(out + i, made<few>([&](int) { return stored(is_there ? 0.0f : NAN_F); }));
        }
    });
}

// Where each row of the part is used first and last: `first` begins at `n_ids` everywhere, `last` at -1.
extern "C" __global__ void embedding_spans(const i64 *ids, i64 *first, i64 *last, i64 n_ids, i64 rows, i64 start) {
    for (i64 i = first_element(); i < n_ids; i += all_threads()) {
        if (ids[i] < start || ids[i] >= start + rows) continue;
        atomicMin(&first[ids[i] - start], i);
        atomicMax(&last[ids[i] - start], i);
    }
}

// Columns that a thread adds up at a time.
const int COLUMNS = 4;

// A block a row of the part. Its threads look for the row's number among 32 ids a warp, and then all add up what was found, in the
// order of the ids.
extern "C" __global__ void embedding_gradient(const T *grad, const i64 *ids, const i64 *first, const i64 *last, T *out, i64 rows,
                                              i64 width, i64 start) {
    __shared__ u32 found[MAX_WARPS];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const i64 end = last[row] + 1;
        for (i64 column = threadIdx.x; column - threadIdx.x < width; column += COLUMNS * blockDim.x) {
            Pack<COLUMNS, float> sums = {};
            const auto each_column = [&](auto f) {
                each<COLUMNS>([&](int j) {
                    if (column + j * blockDim.x < width) f(sums.of[j], column + j * blockDim.x);
                });
            };
            for (i64 from = first[row]; from < end; from += blockDim.x) {
                const i64 mine = from + threadIdx.x;
                const u32 of_warp = __ballot_sync(0xffffffffu, mine < end && ids[mine] == start + row);
                if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = of_warp;
                __syncthreads();
                for (int warp = 0; warp < n_warps(); warp++) {
                    for (u32 left = found[warp]; left != 0; left &= left - 1) {
                        const T *own = grad + (from + warp * 32 + __ffs((int)left) - 1) * width;
                        each_column([&](float &sum, i64 c) { sum += wide(own[c]); });
                    }
                }
                __syncthreads();
            }
            each_column([&](float &sum, i64 c) { out[row * width + c] = stored(sum); });
        }
    }
}
