// Convolutions of images whose channels run fastest, for those that NVIDIA's library has no engine for: a number of the result a
// thread, its terms in order.
#include "grid.cuh"

// Sizes and steps: (height, width) each.
struct Taps {
    i64 channels;
    i64 outputs;
    i64 groups;
    i64 in[2];
    i64 out[2];
    i64 kernel[2];
    i64 stride[2];
    i64 padding[2];
    i64 dilation[2];

    __device__ i64 channels_of_group() const { return channels / groups; }
    __device__ i64 outputs_of_group() const { return outputs / groups; }

    // The pixel along dimension `d` that tap `k` of output `at` lies on, which may be padding.
    __device__ i64 pixel(int d, i64 at, i64 k) const { return at * stride[d] - padding[d] + k * dilation[d]; }
    __device__ bool is_pixel(int d, i64 at) const { return at >= 0 && at < in[d]; }

    // The output along dimension `d` whose tap `k` lies on pixel `at`, or -1.
    __device__ i64 output(int d, i64 at, i64 k) const {
        const i64 from = at + padding[d] - k * dilation[d];
        return from >= 0 && from % stride[d] == 0 && from / stride[d] < out[d] ? from / stride[d] : -1;
    }
};

// Where the channels of a pixel begin.
__device__ inline i64 channels_at(i64 n, i64 y, i64 x, const i64 (&size)[2], i64 channels) {
    return ((n * size[0] + y) * size[1] + x) * channels;
}

// `outputs` (N, OH, OW, O), `count` in all, of `images` (N, H, W, C) and `kernels` (O, KH, KW, C / groups).
extern "C" __global__ void plain_convolution(const T *images, const T *kernels, T *outputs, i64 count, Taps t) {
    const i64 channels = t.channels_of_group();
    for (i64 i = first_element(); i < count; i += all_threads()) {
        const i64 o = i % t.outputs, x = i / t.outputs % t.out[1], y = i / t.outputs / t.out[1] % t.out[0];
        const i64 n = i / t.outputs / t.out[1] / t.out[0];
        float sum = 0.0f;
        for (i64 ky = 0; ky < t.kernel[0]; ky++) {
            const i64 in_y = t.pixel(0, y, ky);
            if (!t.is_pixel(0, in_y)) continue;
            for (i64 kx = 0; kx < t.kernel[1]; kx++) {
                const i64 in_x = t.pixel(1, x, kx);
                if (!t.is_pixel(1, in_x)) continue;
                const T *image = images + channels_at(n, in_y, in_x, t.in, t.channels) + o / t.outputs_of_group() * channels;
                const T *kernel = kernels + channels_at(o, ky, kx, t.kernel, channels);
                for (i64 c = 0; c < channels; c++) sum += wide(image[c]) * wide(kernel[c]);
            }
        }
        outputs[i] = stored(sum);
    }
}

// `images`, the gradient of them, `count` in all, of the gradient of the outputs.
extern "C" __global__ void plain_convolution_images(const T *outputs, const T *kernels, T *images, i64 count, Taps t) {
    const i64 channels = t.channels_of_group(), of_group = t.outputs_of_group();
    for (i64 i = first_element(); i < count; i += all_threads()) {
        const i64 c = i % t.channels, x = i / t.channels % t.in[1], y = i / t.channels / t.in[1] % t.in[0];
        const i64 n = i / t.channels / t.in[1] / t.in[0], first = c / channels * of_group;
        float sum = 0.0f;
        for (i64 ky = 0; ky < t.kernel[0]; ky++) {
            const i64 out_y = t.output(0, y, ky);
            if (out_y < 0) continue;
            for (i64 kx = 0; kx < t.kernel[1]; kx++) {
                const i64 out_x = t.output(1, x, kx);
                if (out_x < 0) continue;
                const T *output = outputs + channels_at(n, out_y, out_x, t.out, t.outputs);
                for (i64 o = first; o < first + of_group; o++) {
                    sum += wide(output[o]) * wide(kernels[channels_at(o, ky, kx, t.kernel, channels) + c % channels]);
                }
            }
        }
        images[i] = stored(sum);
    }
}

// `kernels`, the gradient of them, `count` in all, of `batch` images and the gradient of their outputs. Rows of pixels are summed in
// float32, and what they come to in float64, since there are many.
extern "C" __global__ void plain_convolution_kernels(const T *images, const T *outputs, T *kernels, i64 count, i64 batch, Taps t) {
    const i64 channels = t.channels_of_group();
    for (i64 i = first_element(); i < count; i += all_threads()) {
        const i64 c = i % channels, kx = i / channels % t.kernel[1], ky = i / channels / t.kernel[1] % t.kernel[0];
        const i64 o = i / channels / t.kernel[1] / t.kernel[0], in_c = o / t.outputs_of_group() * channels + c;
        double sum = 0.0;
        for (i64 n = 0; n < batch; n++) {
            for (i64 y = 0; y < t.out[0]; y++) {
                const i64 in_y = t.pixel(0, y, ky);
                if (!t.is_pixel(0, in_y)) continue;
                float row = 0.0f;
                for (i64 x = 0; x < t.out[1]; x++) {
                    const i64 in_x = t.pixel(1, x, kx);
                    if (!t.is_pixel(1, in_x)) continue;
                    row += wide(images[channels_at(n, in_y, in_x, t.in, t.channels) + in_c]) *
                           wide(outputs[channels_at(n, y, x, t.out, t.outputs) + o]);
                }
                sum += row;
            }
        }
        kernels[i] = stored((float)sum);
    }
}
