// Matrix products of any sizes and steps, for those that NVIDIA's library has no way for: an output a thread, its terms in order.
#include "grid.cuh"

// `out` (count / (m * n), m, n) without gaps; of the factors (m, k) and (k, n) the steps in elements along rows, along columns and
// from one matrix of the batch to the next.
extern "C" __global__ void plain_product(const T *a, const T *b, T *out, i64 count, i64 m, i64 n, i64 k, i64 a_row, i64 a_column,
                                         i64 a_matrix, i64 b_row, i64 b_column, i64 b_matrix) {
    for (i64 i = first_element(); i < count; i += all_threads()) {
        const i64 matrix = i / (m * n), row = i / n % m, column = i % n;
        const T *x = a + matrix * a_matrix + row * a_row, *y = b + matrix * b_matrix + column * b_column;
        float sum = 0.0f;
        for (i64 j = 0; j < k; j++) sum += wide(x[j * a_column]) * wide(y[j * b_row]);
        out[i] = stored(sum);
    }
}
