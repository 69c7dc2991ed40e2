// Attention of several heads, without the scores ever being stored whole: Dao, Fu, Ermon, Rudra and Re,
// "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", https://arxiv.org/abs/2205.14135. In plain
// multiplications of floats, for every type and depth; attention_halves.cu is held against it.
//
// A block has the positions of one tile as its own and goes through those of the other side, tile by tile: its own queries look at
// keys, or its own keys at the queries that see them. A score is a product of rows in float; scores of a tile stay in registers, 4 x
// 4 of them a thread, and what is made of them, the shares or their slopes, goes through shared memory to be multiplied with the
// other side's rows. Forward, each query keeps the largest score so far, the sum of the exponentials of its scores less that, and
// the sum of values that they weigh; when a larger score comes, both sums are scaled down. What is left of the scores is one number a
// query, the logarithm of the sum of their exponentials, which makes shares of scores at once on the way back. There, queries
// and keys get their gradients from a kernel each, and scores are made twice: so each sum belongs to one block, in an order that
// sizes alone decide.
#include "heads.cuh"

const int OWN = 32;
const int OTHERS = 64;
const int THREADS = 128;
// Numbers of a row that are in shared memory at a time.
const int CHUNK = 32;
// Keeps columns apart in the banks of shared memory, four numbers still aligned.
const int GAP = 4;

// Four neighbouring numbers are read at a time where they are multiples of 16 bytes.
struct alignas(16) Room {
    float own[CHUNK][OWN + GAP];
    float others[CHUNK][OTHERS + GAP];
    float values[OTHERS][CHUNK];
    // Of each position of the other side for each of one's own.
    float shares[OTHERS][OWN + GAP];
};

// The first of a thread's four rows of scores, which are its block's own positions, and of its four columns.
__device__ inline int my_row() { return (int)threadIdx.x / 16 * 4; }
__device__ inline int my_column() { return (int)threadIdx.x % 16 * 4; }
// The first of its two numbers of each chunk of a row.
__device__ inline int my_number() { return (int)threadIdx.x % 16 * 2; }

// What `join` makes of a row's values, of which 16 neighbouring threads have a part each.
template <class Join> __device__ float across(float value, Join join) {
    for (int step = 8; step > 0; step /= 2) value = join(value, of_lane(value, step));
    return value;
}

__device__ inline float sum_across(float value) {
    return across(value, [](float a, float b) { return a + b; });
}

// Numbers from `chunk` on of positions from `first` on, a column a position; zeros where there are none.
template <int COUNT>
__device__ void load_columns(float (&to)[CHUNK][COUNT + GAP], Rows<const T> from, i64 first, i64 chunk, const Heads &heads) {
    UNROLL_FOUR
    for (int i = (int)threadIdx.x; i < COUNT * CHUNK; i += THREADS) {
        const int position = i / CHUNK, number = i % CHUNK;
        const bool is_there = from.has(first + position) && chunk + number < heads.depth;
        to[number][position] = is_there ? wide(from[first + position][chunk + number]) : 0.0f;
    }
}

// The products of one's own rows with those of the other side.
__device__ inline void multiply(Rows<const T> own, i64 first_own, Rows<const T> others, i64 first_other, const Heads &heads, Room &room,
                                float (&products)[4][4]) {
    UNROLL
    for (int i = 0; i < 4; i++) {
        UNROLL
        for (int j = 0; j < 4; j++) products[i][j] = 0.0f;
    }
    for (i64 chunk = 0; chunk < heads.depth; chunk += CHUNK) {
        __syncthreads();
        load_columns<OWN>(room.own, own, first_own, chunk, heads);
        load_columns<OTHERS>(room.others, others, first_other, chunk, heads);
        __syncthreads();
        UNROLL_FOUR
        for (int number = 0; number < CHUNK; number++) {
            UNROLL
            for (int i = 0; i < 4; i++) {
                const float x = room.own[number][my_row() + i];
                UNROLL
                for (int j = 0; j < 4; j++) products[i][j] = fmaf(x, room.others[number][my_column() + j], products[i][j]);
            }
        }
    }
}

// What dropout multiplies a thread's shares by, where it drops any: they lie where the shares will, and are made one after the other, since
// random numbers in each share's place would be most of a kernel. `factor(i, j)` is that of the thread's row `i` and column `j`. Neighbouring
// keys, which share their random numbers, come one after the other: they are columns, or with KEYS_ARE_OWN rows.
template <bool KEYS_ARE_OWN> struct Factors {
    Room &room;
    bool drop;
    float keep;

    template <class Factor> __device__ Factors(Room &room, const Mask &mask, Factor factor) : room(room), drop(mask.drops), keep(mask.keep) {
        if (!drop) return;
        NO_UNROLL
        for (int query = 0; query < 4; query++) {
            NO_UNROLL
            for (int key = 0; key < 4; key++) {
                const int i = KEYS_ARE_OWN ? key : query, j = KEYS_ARE_OWN ? query : key;
                room.shares[my_column() + j][my_row() + i] = factor(i, j);
            }
        }
    }

    __device__ float at(int i, int j) const { return drop ? room.shares[my_column() + j][my_row() + i] : keep; }
};

// Sums of rows of numbers, one for each of a thread's own positions.
template <int DEPTH> struct Sums {
    float at[DEPTH / CHUNK][4][2];

    __device__ Sums() {
        UNROLL
        for (int c = 0; c < DEPTH / CHUNK; c++) {
            UNROLL
            for (int i = 0; i < 4; i++) at[c][i][0] = at[c][i][1] = 0.0f;
        }
    }

    // Adds the other side's rows, weighed by `room.shares`.
    __device__ void gather(Rows<const T> others, i64 first, const Heads &heads, Room &room) {
        UNROLL
        for (int c = 0; c < DEPTH / CHUNK; c++) {
            if (c * CHUNK >= heads.depth) continue;
            __syncthreads();
            UNROLL_FOUR
            for (int i = (int)threadIdx.x; i < OTHERS * CHUNK; i += THREADS) {
                const int position = i / CHUNK, number = c * CHUNK + i % CHUNK;
                const bool is_there = others.has(first + position) && number < heads.depth;
                room.values[position][i % CHUNK] = is_there ? wide(others[first + position][number]) : 0.0f;
            }
            __syncthreads();
            UNROLL_FOUR
            for (int other = 0; other < OTHERS; other++) {
                UNROLL
                for (int i = 0; i < 4; i++) {
                    const float share = room.shares[other][my_row() + i];
                    UNROLL
                    for (int j = 0; j < 2; j++) at[c][i][j] = fmaf(share, room.values[other][my_number() + j], at[c][i][j]);
                }
            }
        }
    }

    // Multiplies the sums of position `i` of the four.
    __device__ void scale(int i, float by) {
        UNROLL
        for (int c = 0; c < DEPTH / CHUNK; c++) {
            UNROLL
            for (int j = 0; j < 2; j++) at[c][i][j] *= by;
        }
    }

    // Writes the sums of position `i` of the four to `row`.
    __device__ void write(int i, T *row, i64 depth) const {
        UNROLL
        for (int c = 0; c < DEPTH / CHUNK; c++) {
            UNROLL
            for (int j = 0; j < 2; j++) {
                const int number = c * CHUNK + my_number() + j;
                if (number < depth) row[number] = stored(at[c][i][j]);
            }
        }
    }
};

template <int DEPTH>
__device__ void attend(const T *q, const T *k, const T *v, T *out, float *lse, const Key *drop, const u64 *samples, const float *hiding,
                       const Heads &heads, Room &room) {
    for_tiles<OWN>(heads, asked(heads), true, [&](const Head &head, i64 first) {
        const Rows<const T> queries = head.queries(q), keys = head.keys(k), values = head.values(v);
        const Sight sight(hiding, head);
        Mask mask(drop, samples, head);
        Sums<DEPTH> sums;
        float most[4], total[4];
        UNROLL
        for (int i = 0; i < 4; i++) most[i] = -INFINITY_F, total[i] = 0.0f;
        for (i64 others = 0; others <= sight.until((int)first + OWN - 1); others += OTHERS) {
            float scores[4][4];
            multiply(queries, first, keys, others, heads, room, scores);
            const Factors<false> factors(room, mask, [&](int i, int j) { return mask.factor(first + my_row() + i, others + my_column() + j); });
            UNROLL
            for (int i = 0; i < 4; i++) {
                const i64 query = first + my_row() + i;
                float above = most[i];
                UNROLL
                for (int j = 0; j < 4; j++) {
                    const bool is_seen = sight.sees((int)query, (int)others + my_column() + j);
                    scores[i][j] = is_seen ? scores[i][j] * heads.scale : -INFINITY_F;
                    above = larger(scores[i][j], above);
                }
                above = across(above, larger);
                // One that has seen no key yet.
                const float base = above == -INFINITY_F ? 0.0f : above, fade = expf(most[i] - base);
                float sum = 0.0f;
                UNROLL
                for (int j = 0; j < 4; j++) {
                    const float share = expf(scores[i][j] - base);
                    sum += share;
                    room.shares[my_column() + j][my_row() + i] = share * factors.at(i, j);
                }
                total[i] = total[i] * fade + sum_across(sum);
                most[i] = above;
                sums.scale(i, fade);
            }
            sums.gather(values, others, heads, room);
        }
        UNROLL
        for (int i = 0; i < 4; i++) {
            const i64 query = first + my_row() + i;
            if (!queries.has(query)) continue;
            const bool saw_none = total[i] == 0.0f && sight.may_hide_all();
            sums.scale(i, saw_none ? 0.0f : 1.0f / total[i]);
            sums.write(i, head.of_output(out)[query], heads.depth);
            if (my_column() == 0) *head.of_queries(lse)[query] = saw_none ? INFINITY_F : most[i] + logf(total[i]);
        }
    });
}

// The gradient of queries. The sum of a query's shares times their slopes is that of its output times the output's gradient:
// `levels` gets it for the keys, which come after.
template <int DEPTH>
__device__ void to_queries(const T *q, const T *k, const T *v, const T *y, const float *lse, const T *grad, float *levels, T *out,
                           const Key *drop, const u64 *samples, const float *hiding, const Heads &heads, Room &room) {
    for_tiles<OWN>(heads, asked(heads), true, [&](const Head &head, i64 first) {
        const Rows<const T> queries = head.queries(q), keys = head.keys(k), values = head.values(v);
        const Sight sight(hiding, head);
        const Rows<const T> grads = head.of_output(grad), outputs = head.of_output(y);
        Mask mask(drop, samples, head);
        Sums<DEPTH> sums;
        float base[4], level[4];
        UNROLL
        for (int i = 0; i < 4; i++) {
            const i64 query = first + my_row() + i;
            const bool is_there = queries.has(query);
            float dot = 0.0f;
            for (i64 d = threadIdx.x % 16; is_there && d < heads.depth; d += 16) dot = fmaf(wide(outputs[query][d]), wide(grads[query][d]), dot);
            level[i] = sum_across(dot);
            base[i] = is_there ? *head.of_queries(lse)[query] : 0.0f;
            if (is_there && my_column() == 0) *head.of_queries(levels)[query] = level[i];
        }
        for (i64 others = 0; others <= sight.until((int)first + OWN - 1); others += OTHERS) {
            float scores[4][4], slopes[4][4];
            multiply(queries, first, keys, others, heads, room, scores);
            multiply(grads, first, values, others, heads, room, slopes);
            const Factors<false> factors(room, mask, [&](int i, int j) { return mask.factor(first + my_row() + i, others + my_column() + j); });
            UNROLL
            for (int i = 0; i < 4; i++) {
                const i64 query = first + my_row() + i;
                UNROLL
                for (int j = 0; j < 4; j++) {
                    const bool is_seen = sight.sees((int)query, (int)others + my_column() + j);
                    const float share = expf(scores[i][j] * heads.scale - base[i]);
                    const float slope = share * (slopes[i][j] * factors.at(i, j) - level[i]);
                    room.shares[my_column() + j][my_row() + i] = is_seen ? slope : 0.0f;
                }
            }
            sums.gather(keys, others, heads, room);
        }
        UNROLL
        for (int i = 0; i < 4; i++) {
            const i64 query = first + my_row() + i;
            if (!queries.has(query)) continue;
            sums.scale(i, heads.scale);
            sums.write(i, head.rows(out, heads.gradients[QUERIES], asked(heads))[query], heads.depth);
        }
    });
}

// The gradients of keys and values.
template <int DEPTH>
__device__ void to_keys(const T *q, const T *k, const T *v, const float *lse, const T *grad, const float *levels, T *out_k, T *out_v,
                        const Key *drop, const u64 *samples, const float *hiding, const Heads &heads, Room &room) {
    for_tiles<OWN>(heads, every_key(heads), false, [&](const Head &head, i64 first) {
        const Rows<const T> queries = head.queries(q), keys = head.keys(k), values = head.values(v);
        const Sight sight(hiding, head);
        const Rows<const T> grads = head.of_output(grad);
        Mask mask(drop, samples, head);
        Sums<DEPTH> of_keys, of_values;
        const i64 since = sight.since((int)first) / OTHERS * OTHERS, begin = since > heads.from ? since : heads.from;
        for (i64 others = begin; others < asked(heads).end; others += OTHERS) {
            float scores[4][4], slopes[4][4];
            multiply(keys, first, queries, others, heads, room, scores);
            multiply(values, first, grads, others, heads, room, slopes);
            const Factors<true> factors(room, mask, [&](int i, int j) { return mask.factor(others + my_column() + j, first + my_row() + i); });
            UNROLL
            for (int j = 0; j < 4; j++) {
                const i64 query = others + my_column() + j;
                const bool is_there = queries.has(query);
                const float base = is_there ? *head.of_queries(lse)[query] : 0.0f;
                const float level = is_there ? *head.of_queries(levels)[query] : 0.0f;
                UNROLL
                for (int i = 0; i < 4; i++) {
                    const bool is_seen = sight.sees((int)query, (int)first + my_row() + i);
                    const float factor = factors.at(i, j);
                    const float share = expf(scores[i][j] * heads.scale - base);
                    slopes[i][j] = is_seen ? share * (slopes[i][j] * factor - level) : 0.0f;
                    room.shares[my_column() + j][my_row() + i] = is_seen ? share * factor : 0.0f;
                }
            }
            of_values.gather(grads, others, heads, room);
            __syncthreads();
            UNROLL
            for (int j = 0; j < 4; j++) {
                UNROLL
                for (int i = 0; i < 4; i++) room.shares[my_column() + j][my_row() + i] = slopes[i][j];
            }
            of_keys.gather(queries, others, heads, room);
        }
        UNROLL
        for (int i = 0; i < 4; i++) {
            const i64 key = first + my_row() + i;
            if (!keys.has(key)) continue;
            of_keys.scale(i, heads.scale);
            of_keys.write(i, head.rows(out_k, heads.gradients[KEYS], every_key(heads))[key], heads.depth);
            of_values.write(i, head.rows(out_v, heads.gradients[VALUES], every_key(heads))[key], heads.depth);
        }
    });
}

// One row the heads of at most so many numbers.
#define ATTENTION(DEPTH)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                     \
        attention_##DEPTH(const T *q, const T *k, const T *v, T *out, float *lse, const Key *drop, const u64 *samples,        \
                          const float *hiding, Heads heads) {                                                                 \
        __shared__ Room room;                                                                                                 \
        attend<DEPTH>(q, k, v, out, lse, drop, samples, hiding, heads, room);                                                 \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                     \
        attention_queries_##DEPTH(const T *q, const T *k, const T *v, const T *y, const float *lse, const T *grad,            \
                                  float *levels, T *out, const Key *drop, const u64 *samples, const float *hiding,            \
                                  Heads heads) {                                                                              \
        __shared__ Room room;                                                                                                 \
        to_queries<DEPTH>(q, k, v, y, lse, grad, levels, out, drop, samples, hiding, heads, room);                            \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                     \
        attention_keys_##DEPTH(const T *q, const T *k, const T *v, const float *lse, const T *grad, const float *levels,      \
                               T *out_k, T *out_v, const Key *drop, const u64 *samples, const float *hiding, Heads heads) {   \
        __shared__ Room room;                                                                                                 \
        to_keys<DEPTH>(q, k, v, lse, grad, levels, out_k, out_v, drop, samples, hiding, heads, room);                         \
    }

ATTENTION(64)
ATTENTION(128)
ATTENTION(256)
