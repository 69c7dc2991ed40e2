/* How long MPI's ranks take to sum their slices of float32, each result verified: the peer of `phalanx bench allreduce`.
 *
 * Every round is a barrier and then the timed MPI_Allreduce; a round is as long as its slowest rank took. Rank 0 prints, for
 * each size, the median and the 99th percentile of those times and the median of its own, in microseconds.
 *
 * Usage: mpicc -O3 -o allreduce_mpi allreduce_mpi.c && mpirun -n 2 ./allreduce_mpi [BYTES...]
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double percentile(const double *sorted, int n, int percent) { return sorted[(n * percent + 99) / 100 - 1]; }

static void measure(size_t bytes, int rank, int n) {
    int len = (int)(bytes / sizeof(float));
    int counted = (int)((1u << 30) / bytes);
    counted = counted < 20 ? 20 : counted > 1000 ? 1000 : counted;
    int warm_up = (counted + 4) / 5;
    float *values = malloc(bytes);
    double *own = malloc(counted * sizeof *own), *slowest = malloc(counted * sizeof *slowest);
    long wrong = 0;
    for (int round = 0; round < warm_up + counted; round++) {
        for (int i = 0; i < len; i++) values[i] = (float)(((i + round) % 1021 + 1) * (rank + 1));
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        MPI_Allreduce(MPI_IN_PLACE, values, len, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        double time = MPI_Wtime() - start;
        if (round >= warm_up) own[round - warm_up] = time * 1e6;
        for (int i = 0; i < len; i++) wrong += values[i] != (float)(((i + round) % 1021 + 1) * (n * (n + 1) / 2));
    }
    MPI_Allreduce(own, slowest, counted, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, &wrong, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    qsort(own, counted, sizeof *own, by_value);
    qsort(slowest, counted, sizeof *slowest, by_value);
    double p50 = percentile(slowest, counted, 50);
    if (rank == 0)
        printf("%10zu B  p50 %11.2f us  p99 %11.2f us  rank 0 p50 %11.2f us  algbw %7.3f GB/s  wrong %ld\n", bytes, p50,
               percentile(slowest, counted, 99), percentile(own, counted, 50), bytes / p50 / 1e3, wrong);
    free(values), free(own), free(slowest);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, n;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &n);
    if (argc == 1)
        for (size_t bytes = 4; bytes <= 64u << 20; bytes *= 4) measure(bytes, rank, n);
    for (int i = 1; i < argc; i++) measure(strtoul(argv[i], NULL, 10), rank, n);
    MPI_Finalize();
}
