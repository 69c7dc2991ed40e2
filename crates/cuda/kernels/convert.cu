// Conversions to the type of the module, and from it to double.
#include "packs.cuh"

template <class From> __device__ void converted(const From *from, T *to, i64 n) {
    map(from, to, n, [](float x) { return x; });
}

extern "C" __global__ void from_f32(const float *from, T *to, i64 n) { converted(from, to, n); }
extern "C" __global__ void from_bf16(const Bf16 *from, T *to, i64 n) { converted(from, to, n); }
extern "C" __global__ void from_f16(const F16 *from, T *to, i64 n) { converted(from, to, n); }

// Doubles, which nothing but sums over ranks is computed in, are rounded to float first, as on a CPU.
extern "C" __global__ void from_f64(const double *from, T *to, i64 n) {
    for (i64 i = first_element(); i < n; i += all_threads()) to[i] = stored((float)from[i]);
}

extern "C" __global__ void to_f64(const T *from, double *to, i64 n) {
    for (i64 i = first_element(); i < n; i += all_threads()) to[i] = (double)wide(from[i]);
}

extern "C" __global__ void from_integers(const i64 *from, T *to, i64 n) {
    for (i64 i = first_element(); i < n; i += all_threads()) to[i] = stored((float)from[i]);
}

// Towards zero; what is no number becomes 0, and what is too large the largest or the smallest that there is.
extern "C" __global__ void to_integers(const T *from, i64 *to, i64 n) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        const float x = wide(from[i]);
        const i64 most = 0x7fffffffffffffffLL;
        to[i] = is_nan(x) ? 0 : x >= 9223372036854775808.0f ? most : x <= -9223372036854775808.0f ? -most - 1 : (i64)x;
    }
}

// Runs of elements that lie apart, each cut into chunks of which a block takes one at a time: `first` is the number of a run's first
// chunk among those of all.
struct Run {
    i64 from, to, n, first;
};

const i64 CHUNK = 2048;
const int MOST_RUNS = 32;
// What a thread takes at a time: 16 bytes.
const int HALVES = 8;

struct Spread {
    Run of[MOST_RUNS];
};

template <class From> __device__ void spread(const From *from, T *to, const Spread &runs, i64 n_runs, i64 chunks) {
    int r = 0;
    for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        // A block's chunks go up, and so do their runs.
        while (r + 1 < n_runs && runs.of[r + 1].first <= chunk) r++;
        const Run run = runs.of[r];
        const i64 begin = (chunk - run.first) * CHUNK, left = run.n - begin;
        const From *source = from + run.from + begin;
        T *target = to + run.to + begin;
        const i64 n = left < CHUNK ? left : CHUNK;
        for (i64 i = (i64)threadIdx.x * HALVES; i < n; i += (i64)blockDim.x * HALVES) {
            if (i + HALVES <= n) {
                const auto x = taken<HALVES>(source + i);
                put(target + i, made<HALVES>([&](int j) { return rounded<T>(wide(x.of[j])); }));
            } else {
                for (i64 last = i; last < n; last++) target[last] = rounded<T>(wide(source[last]));
            }
        }
    }
}

extern "C" __global__ void spread_from_bf16(const Bf16 *from, T *to, Spread runs, i64 n_runs, i64 chunks) {
    spread(from, to, runs, n_runs, chunks);
}

extern "C" __global__ void spread_from_f16(const F16 *from, T *to, Spread runs, i64 n_runs, i64 chunks) {
    spread(from, to, runs, n_runs, chunks);
}
