// Random numbers and dropout: each number is a function of its key and its place alone, the same as on a CPU.
#include "key.cuh"
#include "packs.cuh"

// Numbers in [low, high), of which `largest` is the last one that the type has.
extern "C" __global__ void uniform(T *out, i64 seed, i64 stream, double low, double high, float largest, i64 n) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        const u32 word = philox((u64)seed, (u64)stream, (u64)i / 4).word[i % 4];
        const float value = wide(stored((float)(low + (high - low) * (double)unit(word))));
        out[i] = stored(value < largest ? value : largest);
    }
}

// Two numbers of each block of four words, as first values are made.
extern "C" __global__ void fill_normal(T *out, i64 seed, i64 stream, double std, i64 n) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        const Words words = philox((u64)seed, (u64)stream, (u64)i / 2);
        const int first = (int)(i % 2) * 2;
        out[i] = stored((float)(std * normal_of(words.word[first], words.word[first + 1])));
    }
}

// One number of each block.
extern "C" __global__ void normal(T *out, i64 seed, i64 stream, double mean, double std, i64 n) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        const Words words = philox((u64)seed, (u64)stream, (u64)i);
        out[i] = stored((float)(mean + std * normal_of(words.word[0], words.word[1])));
    }
}

// Calls `elements(few, i, dropped)` for the elements from i on, `few` of them, until all `width` of each sample are done; `dropped(j)`
// tells whether j of them is. One block of random words does for four.
template <class F> __device__ void drop(const Key *key, const u64 *samples, i64 n_samples, i64 width, i64 threshold, F elements) {
    const u64 seed = mixed(*key);
    const i64 fours = (width + 3) / 4;
    for (i64 i = first_element(); i < n_samples * fours; i += all_threads()) {
        const i64 sample = i / fours, first = i % fours * 4;
        const Words words = philox(seed, samples[sample], (u64)(first / 4));
        const i64 start = sample * width + first;
        if (first + 4 <= width) {
            elements(Few<4>(), start, [&](int j) { return words.word[j] < (u32)threshold; });
            continue;
        }
        UNROLL
        for (int k = 0; k < 4; k++) {
            if (first + k < width) elements(Few<1>(), start + k, [&](int) { return words.word[k] < (u32)threshold; });
        }
    }
}

// 0 where an element is dropped, `keep` elsewhere.
extern "C" __global__ void dropout_mask(T *mask, const Key *key, const u64 *samples, i64 n_samples, i64 width, i64 threshold,
                                        float keep) {
    drop(key, samples, n_samples, width, threshold, [=](auto few, i64 i, auto dropped) {
        put(mask + i, made<few>([&](int j) { return stored(dropped(j) ? 0.0f : keep); }));
    });
}

// Row-major elements times that mask, which is never written: the gradient is made by the same call.
extern "C" __global__ void dropout(const T *x, T *out, const Key *key, const u64 *samples, i64 n_samples, i64 width, i64 threshold,
                                   float keep) {
    drop(key, samples, n_samples, width, threshold, [=](auto few, i64 i, auto dropped) {
        const auto in = taken<few>(x + i);
        put(out + i, made<few>([&](int j) { return stored(wide(in.of[j]) * (dropped(j) ? 0.0f : keep)); }));
    });
}
