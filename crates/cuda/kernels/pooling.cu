// Max and average pooling of images whose channels run fastest: (N, H, W, C). A thread has neighbouring channels of a pixel, so that what
// the pixel's windows are is found out once for all of them.
#include "packs.cuh"

// Sizes of images and windows: (height, width) each.
struct Window {
    i64 channels;
    i64 in[2];
    i64 out[2];
    i64 kernel[2];
    i64 stride[2];
    i64 padding[2];
};

// A pixel in a batch of images.
struct Pixel {
    i64 n;
    int at[2];
};

__device__ inline Pixel pixel_of(i64 i, const i64 (&size)[2]) {
    const i64 row = i / size[1], n = row / size[0];
    return {n, {(int)(row - n * size[0]), (int)(i - row * size[1])}};
}

// Where a pixel's channels begin.
__device__ inline i64 channels_of(i64 n, int y, int x, const i64 (&size)[2], i64 channels) {
    return ((n * size[0] + y) * size[1] + x) * channels;
}

struct Range {
    int first, end;
};

// The pixels along dimension `d` that the window of an output covers.
__device__ inline Range covered(const Window &w, const Pixel &output, int d) {
    const int start = output.at[d] * (int)w.stride[d] - (int)w.padding[d], end = start + (int)w.kernel[d];
    return {start > 0 ? start : 0, end < (int)w.in[d] ? end : (int)w.in[d]};
}

// The outputs along dimension `d` whose windows cover a pixel.
__device__ inline Range covering(const Window &w, const Pixel &pixel, int d) {
    const int at = pixel.at[d] + (int)w.padding[d], stride = (int)w.stride[d], last = at / stride + 1, before = at - (int)w.kernel[d];
    return {before < 0 ? 0 : before / stride + 1, last < (int)w.out[d] ? last : (int)w.out[d]};
}

// Which number of the window of output `y`, `x` a pixel is, padding counted.
__device__ inline int number_in(const Window &w, int y, int x, int pixel_y, int pixel_x) {
    return (pixel_y + (int)w.padding[0] - y * (int)w.stride[0]) * (int)w.kernel[1] + pixel_x + (int)w.padding[1] - x * (int)w.stride[1];
}

// Calls `f(few, i, pixel, c)` for the elements of n from i on, which are channels of a pixel from c on.
template <class F> __device__ void by_pixels(bool even, i64 n, const i64 (&size)[2], i64 channels, F f) {
    if (n == 0) return;
    along_rows(even, n / channels, channels, [&](auto few, i64 i, i64 pixel, i64 c) { f(few, i, pixel_of(pixel, size), c); });
}

// Calls `f(from, y, x)` for all pixels of two ranges in an image, from where channels from c on begin.
template <class F>
__device__ void each_pixel(i64 n, const Range &rows, const Range &columns, const i64 (&size)[2], i64 channels, i64 c, F f) {
    for (int y = rows.first; y < rows.end; y++) {
        i64 from = channels_of(n, y, columns.first, size, channels) + c;
        for (int x = columns.first; x < columns.end; x++, from += channels) f(from, y, x);
    }
}

// `position` gets the number of the first of the largest in its window, padding counted; the last NaN wins.
extern "C" __global__ void max_pool(const T *x, T *out, u8 *position, Window w, i64 n) {
    by_pixels(are_even(x, out), n, w.out, w.channels, [&](auto few, i64 i, const Pixel &o, i64 c) {
        constexpr int FEW = few;
        Pack<FEW, float> best = {};
        Pack<FEW, u8> at = made<FEW>([](int) { return (u8)255; });
        bool is_first = true;
        each_pixel(o.n, covered(w, o, 0), covered(w, o, 1), w.in, w.channels, c, [&](i64 from, int y, int x_of_pixel) {
            const auto values = taken<FEW>(x + from);
            const u8 number = (u8)number_in(w, o.at[0], o.at[1], y, x_of_pixel);
            each<FEW>([&](int j) {
                const float value = wide(values.of[j]);
                const bool is_larger = is_first || value > best.of[j] || is_nan(value);
                best.of[j] = is_larger ? value : best.of[j];
                at.of[j] = is_larger ? number : at.of[j];
            });
            is_first = false;
        });
        put(out + i, made<FEW>([&](int j) { return stored(best.of[j]); }));
        put(position + i, at);
    });
}

// Each pixel takes from the windows that it was the largest of, in their order.
extern "C" __global__ void max_pool_gradient(const u8 *position, const T *grad, T *out, Window w, i64 n) {
    by_pixels(are_even(grad, out), n, w.in, w.channels, [&](auto few, i64 i, const Pixel &p, i64 c) {
        constexpr int FEW = few;
        Pack<FEW, float> sum = {};
        each_pixel(p.n, covering(w, p, 0), covering(w, p, 1), w.out, w.channels, c, [&](i64 from, int y, int x) {
            const auto positions = taken<FEW>(position + from);
            const auto grads = taken<FEW>(grad + from);
            const int at = number_in(w, y, x, p.at[0], p.at[1]);
            each<FEW>([&](int j) {
                if (positions.of[j] == at) sum.of[j] += wide(grads.of[j]);
            });
        });
        put(out + i, made<FEW>([&](int j) { return stored(sum.of[j]); }));
    });
}

// What a pixel counts in the window of an output: one over its pixels, with the padding if `whole` isn't 0. A whole window ends where
// the padded image ends, as PyTorch's does.
__device__ inline float share_of(const Window &w, const Pixel &output, i64 whole) {
    int count = 1;
    UNROLL
    for (int d = 0; d < 2; d++) {
        const Range inside = covered(w, output, d);
        const int start = output.at[d] * (int)w.stride[d], end = start + (int)w.kernel[d], last = (int)w.in[d] + 2 * (int)w.padding[d];
        count *= whole ? (end < last ? end : last) - start : inside.end - inside.first;
    }
    return 1.0f / (float)count;
}

extern "C" __global__ void average_pool(const T *x, T *out, Window w, i64 whole, i64 n) {
    by_pixels(are_even(x, out), n, w.out, w.channels, [&](auto few, i64 i, const Pixel &o, i64 c) {
        constexpr int FEW = few;
        Pack<FEW, float> sum = {};
        each_pixel(o.n, covered(w, o, 0), covered(w, o, 1), w.in, w.channels, c, [&](i64 from, int, int) {
            const auto values = taken<FEW>(x + from);
            each<FEW>([&](int j) { sum.of[j] += wide(values.of[j]); });
        });
        const float share = share_of(w, o, whole);
        put(out + i, made<FEW>([&](int j) { return stored(sum.of[j] * share); }));
    });
}

extern "C" __global__ void average_pool_gradient(const T *grad, T *out, Window w, i64 whole, i64 n) {
    by_pixels(are_even(grad, out), n, w.in, w.channels, [&](auto few, i64 i, const Pixel &p, i64 c) {
        constexpr int FEW = few;
        Pack<FEW, float> sum = {};
        each_pixel(p.n, covering(w, p, 0), covering(w, p, 1), w.out, w.channels, c, [&](i64 from, int y, int x) {
            const auto grads = taken<FEW>(grad + from);
            const float share = share_of(w, {p.n, {y, x}}, whole);
            each<FEW>([&](int j) { sum.of[j] += wide(grads.of[j]) * share; });
        });
        put(out + i, made<FEW>([&](int j) { return stored(sum.of[j]); }));
    });
}

// Sums of elements along the middle of `x` (outer, size, inner): each row of the table (to, width) has the first that counts for an element
// of `out` (outer, to, inner), and what that one and those behind it count. What counts nothing isn't looked at. `n` elements in all.
extern "C" __global__ void resample(const T *x, const float *table, T *out, i64 n, i64 size, i64 to, i64 inner, i64 width) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        const i64 row = i / inner, line = row / to;
        const float *sum_of = table + (row - line * to) * width;
        const T *from = x + (line * size + (i64)sum_of[0]) * inner + (i - row * inner);
        float sum = 0.0f;
        for (i64 k = 1; k < width; k++) {
            if (sum_of[k] != 0.0f) sum += sum_of[k] * wide(from[(k - 1) * inner]);
        }
        out[i] = stored(sum);
    }
}
