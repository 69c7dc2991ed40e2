// Max and average pooling of images whose channels run fastest: (N, H, W, C).
#include "grid.cuh"

// Sizes of images and windows: (height, width) each.
struct Window {
    i64 channels;
    i64 in[2];
    i64 out[2];
    i64 kernel[2];
    i64 stride[2];
    i64 padding[2];
};

// A place in a batch of images.
struct Place {
    i64 n, y, x, c;
};

__device__ inline Place place_of(i64 i, const i64 (&size)[2], i64 channels) {
    const i64 pixel = i / channels, row = pixel / size[1];
    return {row / size[0], row % size[0], pixel % size[1], i % channels};
}

__device__ inline i64 index_of(i64 n, i64 y, i64 x, i64 c, const i64 (&size)[2], i64 channels) {
    return ((n * size[0] + y) * size[1] + x) * channels + c;
}

struct Range {
    i64 first, end;
};

// The pixels along dimension `d` that the window of output `at` covers.
__device__ inline Range covered(const Window &w, i64 at, int d) {
    const i64 start = at * w.stride[d] - w.padding[d], end = start + w.kernel[d];
    return {start > 0 ? start : 0, end < w.in[d] ? end : w.in[d]};
}

// The outputs along dimension `d` whose windows cover pixel `at`.
__device__ inline Range covering(const Window &w, i64 at, int d) {
    const i64 last = (at + w.padding[d]) / w.stride[d] + 1, before = at + w.padding[d] - w.kernel[d];
    const i64 first = before < 0 ? 0 : before / w.stride[d] + 1;
    return {first, last < w.out[d] ? last : w.out[d]};
}

// `position` gets the number of the first of the largest in its window, padding counted; the last NaN wins.
extern "C" __global__ void max_pool(const T *x, T *out, u8 *position, Window w, i64 n) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        const Place o = place_of(i, w.out, w.channels);
        const Range rows = covered(w, o.y, 0), columns = covered(w, o.x, 1);
        float best = 0.0f;
        i64 at = -1;
        for (i64 y = rows.first; y < rows.end; y++) {
            for (i64 xx = columns.first; xx < columns.end; xx++) {
                const float value = wide(x[index_of(o.n, y, xx, o.c, w.in, w.channels)]);
                if (at >= 0 && !(value > best) && !is_nan(value)) continue;
                best = value;
                at = (y - o.y * w.stride[0] + w.padding[0]) * w.kernel[1] + xx - o.x * w.stride[1] + w.padding[1];
            }
        }
        out[i] = stored(best);
        position[i] = (u8)at;
    }
}

// Each pixel takes from the windows that it was the largest of, in their order.
extern "C" __global__ void max_pool_gradient(const u8 *position, const T *grad, T *out, Window w, i64 n) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        const Place p = place_of(i, w.in, w.channels);
        const Range rows = covering(w, p.y, 0), columns = covering(w, p.x, 1);
        float sum = 0.0f;
        for (i64 y = rows.first; y < rows.end; y++) {
            for (i64 x = columns.first; x < columns.end; x++) {
                const i64 from = index_of(p.n, y, x, p.c, w.out, w.channels);
                const i64 at = (p.y + w.padding[0] - y * w.stride[0]) * w.kernel[1] + p.x + w.padding[1] - x * w.stride[1];
                if (position[from] == at) sum += wide(grad[from]);
            }
        }
        out[i] = stored(sum);
    }
}

// What a pixel counts in the window of an output: one over its pixels, with the padding if `whole` isn't 0. A whole window ends where
// the padded image ends, as PyTorch's does.
__device__ inline float share_of(const Window &w, i64 y, i64 x, i64 whole) {
    const i64 at[2] = {y, x};
    i64 count = 1;
    for (int d = 0; d < 2; d++) {
        const Range inside = covered(w, at[d], d);
        const i64 start = at[d] * w.stride[d], end = start + w.kernel[d], last = w.in[d] + 2 * w.padding[d];
        count *= whole ? (end < last ? end : last) - start : inside.end - inside.first;
    }
    return 1.0f / (float)count;
}

extern "C" __global__ void average_pool(const T *x, T *out, Window w, i64 whole, i64 n) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        const Place o = place_of(i, w.out, w.channels);
        const Range rows = covered(w, o.y, 0), columns = covered(w, o.x, 1);
        float sum = 0.0f;
        for (i64 y = rows.first; y < rows.end; y++) {
            for (i64 xx = columns.first; xx < columns.end; xx++) sum += wide(x[index_of(o.n, y, xx, o.c, w.in, w.channels)]);
        }
        out[i] = stored(sum * share_of(w, o.y, o.x, whole));
    }
}

extern "C" __global__ void average_pool_gradient(const T *grad, T *out, Window w, i64 whole, i64 n) {
    for (i64 i = first_element(); i < n; i += all_threads()) {
        const Place p = place_of(i, w.in, w.channels);
        const Range rows = covering(w, p.y, 0), columns = covering(w, p.x, 1);
        float sum = 0.0f;
        for (i64 y = rows.first; y < rows.end; y++) {
            for (i64 x = columns.first; x < columns.end; x++) {
                sum += wide(grad[index_of(p.n, y, x, p.c, w.out, w.channels)]) * share_of(w, y, x, whole);
            }
        }
        out[i] = stored(sum);
    }
}
