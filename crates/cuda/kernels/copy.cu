// Copies between views and fills, of elements of 1, 2, 4 or 8 bytes, whatever they stand for.
#include "grid.cuh"
#include "strided.cuh"

template <class E> __device__ void copy_views(const E *from, E *to, const Walk<2> &walk, i64 n) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        i64 at[2];
        places(walk, i, at);
        to[at[1]] = from[at[0]];
    }
}

const int TILE = 32;

// Matrices (rows, columns) one after the other become (columns, rows), tile by tile, so that both sides are read and written in
// rows.
template <class E>
__device__ void transpose_tiles(const E *from, E *to, i64 matrices, i64 rows, i64 columns, E (&tile)[TILE][TILE + 1]) {
    const i64 down = (rows + TILE - 1) / TILE, across = (columns + TILE - 1) / TILE;
    const int x = (int)threadIdx.x % TILE, y = (int)threadIdx.x / TILE, step = (int)blockDim.x / TILE;
    for (i64 i = blockIdx.x; i < matrices * down * across; i += gridDim.x) {
        const i64 matrix = i / (down * across), rest = i % (down * across);
        const i64 row = rest / across * TILE, column = rest % across * TILE, start = matrix * rows * columns;
        for (int j = y; j < TILE; j += step) {
            if (row + j < rows && column + x < columns) tile[j][x] = from[start + (row + j) * columns + column + x];
        }
        __syncthreads();
        for (int j = y; j < TILE; j += step) {
            if (column + j < columns && row + x < rows) to[start + (column + j) * rows + row + x] = tile[x][j];
        }
        __syncthreads();
    }
}

#define COPIES(BYTES, E)                                                                                                     \
    extern "C" __global__ void copy_##BYTES(const E *from, E *to, Walk<2> walk, i64 n) { copy_views(from, to, walk, n); }    \
    extern "C" __global__ void transpose_##BYTES(const E *from, E *to, i64 matrices, i64 rows, i64 columns) {                \
        __shared__ E tile[TILE][TILE + 1];                                                                                   \
        transpose_tiles(from, to, matrices, rows, columns, tile);                                                            \
    }                                                                                                                        \
    extern "C" __global__ void flip_##BYTES(const E *from, E *to, i64 outer, i64 size, i64 inner) {                          \
        for (i64 i = first_element(); i < outer * size * inner; i += all_threads()) {                                        \
            const i64 line = i / inner;                                                                                      \
            to[i] = from[((line / size + 1) * size - 1 - line % size) * inner + i % inner];                                  \
        }                                                                                                                    \
    }                                                                                                                        \
    extern "C" __global__ void fill_##BYTES(E *to, i64 bits, i64 n) {                                                        \
        for (i64 i = first_element(); i < n; i += all_threads()) to[i] = (E)bits;                                            \
    }

COPIES(1, u8)
COPIES(2, u16)
COPIES(4, u32)
COPIES(8, u64)
