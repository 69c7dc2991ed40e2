// Sums over the columns of a table (rows, width), whose rows are cut into pieces. A block of 8 warps takes 32 neighbouring columns
// of one piece: each warp every eighth row, then the warps' sums one after the other.
#pragma once
#include "grid.cuh"

const int COLUMNS = 32;
const int LANES = 8;

// `SUMS` sums a column: `term(row, column, sums)` adds one row's part, `done(piece, column, sums)` takes what a piece comes to.
template <int SUMS, class Term, class Done>
__device__ void sums_of_columns(i64 rows, i64 width, i64 piece, float (&room)[SUMS][LANES][COLUMNS], Term term, Done done) {
    const i64 n_tiles = (width + COLUMNS - 1) / COLUMNS, n_pieces = (rows + piece - 1) / piece;
    const int lane = (int)threadIdx.x / COLUMNS, place = (int)threadIdx.x % COLUMNS;
    for (i64 i = blockIdx.x; i < n_tiles * n_pieces; i += gridDim.x) {
        const i64 p = i / n_tiles, column = (i - p * n_tiles) * COLUMNS + place;
        const i64 end = (p + 1) * piece < rows ? (p + 1) * piece : rows;
        float sums[SUMS] = {};
        if (column < width) {
            for (i64 row = p * piece + lane; row < end; row += LANES) term(row, column, sums);
        }
        for (int s = 0; s < SUMS; s++) room[s][lane][place] = sums[s];
        __syncthreads();
        if (lane == 0 && column < width) {
            for (int s = 0; s < SUMS; s++) {
                for (int other = 1; other < LANES; other++) sums[s] += room[s][other][place];
            }
            done(p, column, sums);
        }
        __syncthreads();
    }
}
