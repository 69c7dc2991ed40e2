// Batches from samples that are kept as bytes: images that are cut out, mirrored, looked up and partly blanked, and windows of a text.
// What is random is a function of seed, epoch and the sample's number, word for word as on a CPU (`draw.rs` of the crate `data`).
#include "grid.cuh"
#include "philox.cuh"

// How an image is cut out of the bytes of a sample, which are planes of rows.
struct Framing {
    i64 channels;
    // Height and width of the bytes, and of the image.
    i64 from[2];
    i64 to[2];
    // Row and column of the bytes that the image begins with, where no crop moves it.
    i64 corner[2];
    // Whether the bytes are seen reflected beyond their border; if not, they count as 0 there.
    i64 reflects;
    // How many rows further down, and columns to the right, a random crop may begin, and its place among the draws.
    i64 crop[2];
    i64 crop_place;
    // It is mirrored where a word is below this.
    i64 flip_below;
    i64 flip_place;
    // The side of the square that becomes 0.
    i64 cutout;
    i64 cutout_place;
    // Whether channels lie next to each other in the image, and whether samples lie by their numbers or in the batch's order.
    i64 channels_last;
    i64 by_number;
};

// What a sample draws in a place of its pipeline. `words` begins with the seed and the stream of the epoch.
__device__ inline Words draw(const i64 *words, i64 sample, i64 place) {
    return philox((u64)words[0], (u64)words[1], (u64)sample << 16 | (u64)place << 8);
}

__device__ inline i64 below(u32 word, i64 n) { return (i64)((u64)word * (u64)n >> 32); }

// Which of `n` rows or columns is seen at a place before, among or behind them; -1 where none is.
__device__ inline i64 seen_at(i64 place, i64 n, bool reflects) {
    if (place >= 0 && place < n) return place;
    if (!reflects) return -1;
    if (n == 1) return 0;
    const i64 period = 2 * (n - 1), there = (place % period + period) % period;
    return there < n ? there : period - there;
}

// Image `i` of `n` from sample `words[2 + i]`, of which there are so many; `table` has a number for each byte of each channel. One that
// isn't there is NaN.
extern "C" __global__ void sample_images(const u8 *bytes, const i64 *words, const float *table, T *out, Framing how, i64 samples,
                                         i64 n) {
    const i64 height = how.to[0], width = how.to[1], pixels = height * width, size = how.channels * pixels;
    for (i64 i = blockIdx.x; i < n; i += gridDim.x) {
        const i64 sample = words[2 + i], at = how.by_number ? sample : i;
        const bool is_there = at >= 0 && at < samples;
        i64 top = how.corner[0], left = how.corner[1];
        if (how.crop[0] > 1 || how.crop[1] > 1) {
            const Words drawn = draw(words, sample, how.crop_place);
            top += below(drawn.word[0], how.crop[0]);
            left += below(drawn.word[1], how.crop[1]);
        }
        const bool mirrored = how.flip_below > 0 && (i64)draw(words, sample, how.flip_place).word[0] < how.flip_below;
        // Rows and columns from the first one to below the second become 0.
        i64 rows[2] = {0, 0}, columns[2] = {0, 0};
        if (how.cutout > 0) {
            const Words drawn = draw(words, sample, how.cutout_place);
            rows[0] = below(drawn.word[0], height) - how.cutout / 2;
            columns[0] = below(drawn.word[1], width) - how.cutout / 2;
            rows[1] = rows[0] + how.cutout;
            columns[1] = columns[0] + how.cutout;
        }
        for (i64 e = threadIdx.x; e < size; e += blockDim.x) {
            const i64 channel = how.channels_last ? e % how.channels : e / pixels;
            const i64 pixel = how.channels_last ? e / how.channels : e % pixels;
            const i64 y = pixel / width, x = pixel % width;
            float value = 0.0f;
            if (!is_there) {
                value = NAN_F;
            } else if (!(y >= rows[0] && y < rows[1] && x >= columns[0] && x < columns[1])) {
                const i64 row = seen_at(top + y, how.from[0], how.reflects);
                const i64 column = seen_at(left + (mirrored ? width - 1 - x : x), how.from[1], how.reflects);
                const i64 plane = at * how.channels + channel;
                const u8 byte = row >= 0 && column >= 0 ? bytes[(plane * how.from[0] + row) * how.from[1] + column] : (u8)0;
                value = table[channel * 256 + byte];
            }
            out[i * size + e] = stored(value);
        }
    }
}

// Window `i` of `n`: so many bytes as ids, and as labels the same one byte later. It begins at so many times `stride`, counted by the
// sample's number, `words[2 + i]`, or in the batch's order. Beyond the text's length ids and labels are -1, which is none.
extern "C" __global__ void sample_windows(const u8 *bytes, const i64 *words, i64 *ids, i64 *labels, i64 window, i64 stride,
                                          i64 by_number, i64 length, i64 n) {
    for (i64 e = first_element(); e < n * window; e += all_threads()) {
        const i64 i = e / window, at = (by_number ? words[2 + i] : i) * stride + e % window;
        const bool is_there = at >= 0 && at + 1 < length;
        ids[e] = is_there ? bytes[at] : -1;
        labels[e] = is_there ? bytes[at + 1] : -1;
    }
}
