// Causal self-attention as in attention.cu, of floats of 16 bits, by the units that multiply small matrices of them: for heads of
// a multiple of 8 numbers, at most 128. Every product is summed in float. Scores and all that is made of them stay float until they
// are multiplied with rows: shares and slopes are rounded then. What dropout multiplies the shares by that it keeps comes after, in float,
// since it may be more than 16 bits can hold.
//
// A block has 64 positions as its own, 16 a warp, whose rows each warp keeps in registers as left factors. The other side's rows come
// to shared memory tile by tile, two tiles at a time: while one is worked on, the next one is on its way. What a warp makes of its
// scores is a left factor where it is, so nothing goes through shared memory but those rows.
#include "fragments.cuh"
#include "heads.cuh"

const int OWN = 64;
const int OWN_OF_WARP = 16;
const int THREADS = 128;
// Keeps eight neighbouring rows apart in the banks of shared memory, still multiples of 16 bytes.
const int GAP = 8;
const float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Positions of the other side in a tile: so many that tiles of either size of heads take the same room.
template <int DEPTH> constexpr int others_of = 4096 / DEPTH;

template <int DEPTH> struct Tile {
    alignas(16) T at[others_of<DEPTH>][DEPTH + GAP];

    // Has rows from `first` on come, filled up with zeros to whole fragments.
    __device__ void load(Rows<const T> rows, int first, const Heads &heads) {
        for (int i = (int)threadIdx.x; i < others_of<DEPTH> * (DEPTH / 8); i += THREADS) {
            const int position = i / (DEPTH / 8), number = i % (DEPTH / 8) * 8;
            if (number >= ((int)heads.depth + 15) / 16 * 16) continue;
            const bool is_there = rows.has(first + position) && number < heads.depth;
            copy_later(&at[position][number], is_there ? rows[first + position] + number : rows.at, is_there);
        }
    }
};

// The rows of the other side that a block works on, and those that come next.
template <int DEPTH> struct Room {
    Tile<DEPTH> first[2];
    Tile<DEPTH> second[2];
};

// Calls `work` with each tile of the other side from `begin` to `limit` or where there are no more, if there are any: its first
// position, and its rows of two kinds.
template <int DEPTH, class Work>
__device__ void for_others(Rows<const T> first, Rows<const T> second, int begin, i64 limit, const Heads &heads, Room<DEPTH> &room, Work work) {
    const int OTHERS = others_of<DEPTH>, end = (int)(limit < first.of.end ? limit : first.of.end);
    if (begin >= end) return;
    int now = 0;
    room.first[now].load(first, begin, heads);
    room.second[now].load(second, begin, heads);
    close_copies();
    for (int others = begin; others < end; others += OTHERS, now = 1 - now) {
        if (others + OTHERS < end) {
            room.first[1 - now].load(first, others + OTHERS, heads);
            room.second[1 - now].load(second, others + OTHERS, heads);
        }
        close_copies();
        wait_for_copies<1>();
        __syncthreads();
        work(others, room.first[now], room.second[now]);
        __syncthreads();
    }
}

// The first position of a warp's own, and the last.
__device__ inline int first_of_warp(int first) { return first + (int)threadIdx.x / 32 * OWN_OF_WARP; }
__device__ inline int last_of_warp(int first) { return first_of_warp(first) + OWN_OF_WARP - 1; }
// The first position that a lane has of its warp's; the other one is eight on.
__device__ inline int my_position(int first) { return first_of_warp(first) + my_row(); }

__device__ inline u32 two_of(Rows<const T> rows, int position, int number, const Heads &heads) {
    return rows.has(position) && number < heads.depth ? *(const u32 *)(rows[position] + number) : 0;
}

__device__ inline float low_of(u32 pair) { return wide(T{(u16)pair}); }
__device__ inline float high_of(u32 pair) { return wide(T{(u16)(pair >> 16)}); }

// A warp's own rows as left factors.
template <int DEPTH> struct Own {
    Left at[DEPTH / 16];

    __device__ Own(Rows<const T> rows, int first, const Heads &heads) {
        const int position = my_position(first);
        UNROLL
        for (int c = 0; c < DEPTH / 16; c++) {
            UNROLL
            for (int i = 0; i < 4; i++) at[c].at[i] = two_of(rows, position + i % 2 * 8, c * 16 + i / 2 * 8 + my_column(), heads);
        }
    }
};

// Of each of a warp's own positions and each of a tile's: 16 rows of sums, eight columns a fragment.
template <int DEPTH> struct Products {
    static const int COUNT = others_of<DEPTH> / 8;
    float at[COUNT][4];

    // The products of rows.
    __device__ Products(const Own<DEPTH> &own, const Tile<DEPTH> &others, const Heads &heads) {
        UNROLL
        for (int n = 0; n < COUNT; n++) {
            UNROLL
            for (int i = 0; i < 4; i++) at[n][i] = 0.0f;
        }
        // Rows are columns of the right factor: 16 of them at a time, of 16 numbers.
        const int row = my_lane() % 8 + my_lane() / 16 * 8, number = my_lane() / 8 % 2 * 8;
        UNROLL
        for (int c = 0; c < DEPTH / 16; c++) {
            if (c * 16 >= heads.depth) continue;
            UNROLL
            for (int n = 0; n < COUNT; n += 2) {
                u32 right[4];
                load_matrices<false>(&others.at[n * 8 + row][c * 16 + number], right);
                multiply_add(at[n], own.at[c], right[0], right[1]);
                multiply_add(at[n + 1], own.at[c], right[2], right[3]);
            }
        }
    }

    // How many numbers a lane has: those of its first row, then those of the other one, neighbours one after the other.
    static const int SIZE = 4 * COUNT;

    __device__ float &operator[](int i) { return at[i / 2 % COUNT][row_of(i) * 2 + i % 2]; }

    // Which of the two rows a number is of.
    static __device__ int row_of(int i) { return i / (2 * COUNT); }

    // Which position of the tile's.
    static __device__ int other_of(int i) { return i / 2 % COUNT * 8 + my_column() + i % 2; }
};

// A query and a key.
struct Seen {
    int query;
    int key;
};

// Which of a lane's numbers are kept, a bit each: all of them where nothing is dropped. `place` gives the query and the key of a
// number. Bits, since random numbers made in the midst of an unrolled loop would take all registers.
//
// A block of random numbers is that of four neighbouring keys, which so many lanes `SHARE`, `STEP` apart from one to the next. Each makes
// every so manieth block for all of them.
template <int SIZE, int SHARE, int STEP, class Place> __device__ u32 kept_of(Mask &mask, Place place) {
    if (!mask.drops) return ~0u;
    u32 kept = 0;
    if (!mask.has_whole_blocks()) {
        NO_UNROLL
        for (int i = 0; i < SIZE; i++) {
            const Seen at = place(i);
            kept |= (u32)!mask.is_dropped(at.query, at.key) << i;
        }
        return kept;
    }
    // A lane's own numbers of each block, and which of those that share it this one is.
    const int OWN_OF_FOUR = 4 / SHARE, mine = my_lane() / STEP % SHARE;
    u32 made = 0;
    NO_UNROLL
    for (int four = 0; four < SIZE / 4; four++) {
        const Seen at = place((four * SHARE + mine) * OWN_OF_FOUR);
        made |= mask.kept_of_four(at.query, at.key) << four * 4;
    }
    UNROLL
    for (int apart = 0; apart < SHARE; apart++) {
        const u32 theirs = apart == 0 ? made : of_lane(made, apart * STEP);
        UNROLL
        for (int four = 0; four < SIZE / 4; four++) {
            const u32 bits = theirs >> (four * 4 + mine * OWN_OF_FOUR) & ((1u << OWN_OF_FOUR) - 1);
            kept |= bits << (four * SHARE + (mine ^ apart)) * OWN_OF_FOUR;
        }
    }
    return kept;
}

// Neighbouring lanes have a query's neighbouring keys, two of them each; as keys are a block's own, lanes of neighbouring rows have
// them, one each.
template <int SIZE, class Place> __device__ u32 kept_of_keys(Mask &mask, Place place) { return kept_of<SIZE, 2, 1>(mask, place); }
template <int SIZE, class Place> __device__ u32 kept_of_own_keys(Mask &mask, Place place) { return kept_of<SIZE, 4, 4>(mask, place); }

// Sums of rows of numbers for each of a warp's own positions.
template <int DEPTH> struct Sums {
    float at[DEPTH / 8][4];

    __device__ Sums() {
        UNROLL
        for (int c = 0; c < DEPTH / 8; c++) {
            UNROLL
            for (int i = 0; i < 4; i++) at[c][i] = 0.0f;
        }
    }

    // Adds the other side's rows, weighed.
    __device__ void gather(const Products<DEPTH> &weights, const Tile<DEPTH> &others, const Heads &heads) {
        const int row = my_lane() % 16, number = my_lane() / 16 * 8;
        UNROLL
        for (int n = 0; n < Products<DEPTH>::COUNT; n += 2) {
            const Left left = left_of(weights.at[n], weights.at[n + 1]);
            UNROLL
            for (int c = 0; c < DEPTH / 16; c++) {
                if (c * 16 >= heads.depth) continue;
                u32 right[4];
                load_matrices<true>(&others.at[n * 8 + row][c * 16 + number], right);
                multiply_add(at[2 * c], left, right[0], right[1]);
                multiply_add(at[2 * c + 1], left, right[2], right[3]);
            }
        }
    }

    // Multiplies those of each of the two rows.
    __device__ void scale(const float (&by)[2]) {
        UNROLL
        for (int c = 0; c < DEPTH / 8; c++) {
            UNROLL
            for (int i = 0; i < 4; i++) at[c][i] *= by[i / 2];
        }
    }

    __device__ void write(Rows<T> rows, int first, const Heads &heads) const {
        UNROLL
        for (int row = 0; row < 2; row++) {
            const int position = my_position(first) + row * 8;
            if (!rows.has(position)) continue;
            UNROLL
            for (int c = 0; c < DEPTH / 8; c++) {
                if (c * 8 < heads.depth) *(u32 *)(rows[position] + c * 8 + my_column()) = pair_of(at[c][row * 2], at[c][row * 2 + 1]);
            }
        }
    }
};

// What `join` makes of a row's values, of which four neighbouring lanes have a part each.
template <class Join> __device__ float across(float value, Join join) {
    value = join(value, of_lane(value, 2));
    return join(value, of_lane(value, 1));
}

__device__ inline float sum_across(float value) {
    return across(value, [](float a, float b) { return a + b; });
}

template <int DEPTH>
__device__ void attend(const T *qkv, T *out, float *lse, const Key *drop, const u64 *samples, const Heads &heads, Room<DEPTH> &room) {
    typedef Products<DEPTH> Scores;
    for_tiles<OWN>(heads, asked(heads), true, [&](const Head &head, i64 of_tile) {
        const int first = (int)of_tile;
        const Own<DEPTH> queries(head.of_three(qkv, QUERIES), first, heads);
        Mask mask(drop, samples, head);
        Sums<DEPTH> sums;
        // Of scores times log2(e), whose powers of 2 are their exponentials.
        float most[2] = {-INFINITY_F, -INFINITY_F}, total[2] = {0.0f, 0.0f};
        const float factor = heads.scale * LOG2_E;
        const int mine = my_position(first), time = (int)heads.time;
        const Rows<float> lses = head.of_queries(lse);
        for_others<DEPTH>(head.of_three(qkv, KEYS), head.of_three(qkv, VALUES), 0, first + OWN, heads, room,
                          [&](int others, const Tile<DEPTH> &keys, const Tile<DEPTH> &values) {
            if (others > last_of_warp(first)) return;
            Scores scores(queries, keys, heads);
            float above[2] = {most[0], most[1]};
            UNROLL
            for (int i = 0; i < Scores::SIZE; i++) {
                const int row = Scores::row_of(i), key = others + Scores::other_of(i);
                scores[i] = key <= mine + row * 8 && key < time ? scores[i] * factor : -INFINITY_F;
                above[row] = larger(scores[i], above[row]);
            }
            float fade[2];
            UNROLL
            for (int row = 0; row < 2; row++) {
                above[row] = across(above[row], larger);
                fade[row] = exp2f(most[row] - above[row]);
                most[row] = above[row];
                total[row] *= fade[row];
            }
            sums.scale(fade);
            const u32 kept = kept_of_keys<Scores::SIZE>(mask, [=](int i) {
                return Seen{mine + Scores::row_of(i) * 8, others + Scores::other_of(i)};
            });
            UNROLL
            for (int i = 0; i < Scores::SIZE; i++) {
                const float share = exp2f(scores[i] - most[Scores::row_of(i)]);
                total[Scores::row_of(i)] += share;
                scores[i] = kept >> i & 1 ? share : 0.0f;
            }
            sums.gather(scores, values, heads);
        });
        float per[2];
        UNROLL
        for (int row = 0; row < 2; row++) {
            total[row] = sum_across(total[row]);
            per[row] = mask.keep / total[row];
            const int query = mine + row * 8;
            if (lses.has(query) && my_column() == 0) *lses[query] = (most[row] + log2f(total[row])) * LN_2;
        }
        sums.scale(per);
        sums.write(head.of_one(out), first, heads);
    });
}

// The gradient of queries; `levels` as in attention.cu.
template <int DEPTH>
__device__ void to_queries(const T *qkv, const T *y, const float *lse, const T *grad, float *levels, T *out, const Key *drop,
                           const u64 *samples, const Heads &heads, Room<DEPTH> &room) {
    typedef Products<DEPTH> Scores;
    for_tiles<OWN>(heads, asked(heads), true, [&](const Head &head, i64 of_tile) {
        const int first = (int)of_tile;
        const Rows<const T> outputs = head.of_one(y), of_outputs = head.of_one(grad);
        const Own<DEPTH> queries(head.of_three(qkv, QUERIES), first, heads), grads(of_outputs, first, heads);
        Mask mask(drop, samples, head);
        Sums<DEPTH> sums;
        const float factor = heads.scale * LOG2_E;
        const int mine = my_position(first);
        float base[2], level[2];
        const float less = 1.0f / mask.keep;
        UNROLL
        for (int row = 0; row < 2; row++) {
            const int query = mine + row * 8;
            float dot = 0.0f;
            for (int number = my_column(); number < heads.depth; number += 8) {
                const u32 x = two_of(outputs, query, number, heads), g = two_of(of_outputs, query, number, heads);
                dot = fmaf(low_of(x), low_of(g), fmaf(high_of(x), high_of(g), dot));
            }
            level[row] = sum_across(dot);
            const bool is_there = outputs.has(query);
            base[row] = is_there ? *head.of_queries(lse)[query] * LOG2_E : 0.0f;
            if (is_there && my_column() == 0) *head.of_queries(levels)[query] = level[row];
        }
        for_others<DEPTH>(head.of_three(qkv, KEYS), head.of_three(qkv, VALUES), 0, first + OWN, heads, room,
                          [&](int others, const Tile<DEPTH> &keys, const Tile<DEPTH> &values) {
            if (others > last_of_warp(first)) return;
            Scores scores(queries, keys, heads), slopes(grads, values, heads);
            const u32 kept = kept_of_keys<Scores::SIZE>(mask, [=](int i) {
                return Seen{mine + Scores::row_of(i) * 8, others + Scores::other_of(i)};
            });
            UNROLL
            for (int i = 0; i < Scores::SIZE; i++) {
                const int row = Scores::row_of(i), query = mine + row * 8;
                const bool is_seen = others + Scores::other_of(i) <= query && outputs.has(query);
                const float share = exp2f(scores[i] * factor - base[row]);
                const float slope = kept >> i & 1 ? slopes[i] : 0.0f;
                slopes[i] = is_seen ? share * (slope - level[row] * less) : 0.0f;
            }
            sums.gather(slopes, keys, heads);
        });
        const float scale = heads.scale * mask.keep, scales[2] = {scale, scale};
        sums.scale(scales);
        sums.write(head.of_three(out, QUERIES), first, heads);
    });
}

// The gradients of keys and values.
template <int DEPTH>
__device__ void to_keys(const T *qkv, const float *lse, const T *grad, const float *levels, T *out, const Key *drop, const u64 *samples,
                        const Heads &heads, Room<DEPTH> &room) {
    typedef Products<DEPTH> Scores;
    for_tiles<OWN>(heads, every(heads), false, [&](const Head &head, i64 of_tile) {
        const int first = (int)of_tile;
        const Own<DEPTH> keys(head.of_three(qkv, KEYS), first, heads), values(head.of_three(qkv, VALUES), first, heads);
        Mask mask(drop, samples, head);
        Sums<DEPTH> of_keys, of_values;
        const float factor = heads.scale * LOG2_E, less = 1.0f / mask.keep;
        const int mine = my_position(first), from = (int)heads.from;
        const Rows<const float> bases = head.of_queries(lse), of_levels = head.of_queries(levels);
        for_others<DEPTH>(head.of_three(qkv, QUERIES), head.of_one(grad), first > from ? first : from, heads.time, heads, room,
                          [&](int others, const Tile<DEPTH> &queries, const Tile<DEPTH> &grads) {
            if (others + others_of<DEPTH> <= first_of_warp(first)) return;
            Scores shares(keys, queries, heads), slopes(values, grads, heads);
            const u32 kept = kept_of_own_keys<Scores::SIZE>(mask, [=](int i) {
                return Seen{others + Scores::other_of(i), mine + Scores::row_of(i) * 8};
            });
            UNROLL
            for (int j = 0; j < Scores::SIZE / 2; j++) {
                const int query = others + Scores::other_of(j);
                const bool is_there = bases.has(query);
                const float base = is_there ? *bases[query] * LOG2_E : 0.0f, level = is_there ? *of_levels[query] * less : 0.0f;
                UNROLL
                for (int row = 0; row < 2; row++) {
                    const int i = row * (Scores::SIZE / 2) + j;
                    const bool is_seen = mine + row * 8 <= query && is_there, is_kept = kept >> i & 1;
                    const float share = is_seen ? exp2f(shares[i] * factor - base) : 0.0f;
                    slopes[i] = is_seen ? share * ((is_kept ? slopes[i] : 0.0f) - level) : 0.0f;
                    shares[i] = is_kept ? share : 0.0f;
                }
            }
            of_values.gather(shares, grads, heads);
            of_keys.gather(slopes, queries, heads);
        });
        const float scale = heads.scale * mask.keep, of_scores[2] = {scale, scale}, of_shares[2] = {mask.keep, mask.keep};
        of_keys.scale(of_scores);
        of_values.scale(of_shares);
        of_keys.write(head.of_three(out, KEYS), first, heads);
        of_values.write(head.of_three(out, VALUES), first, heads);
    });
}

// One row the heads of at most so many numbers.
#define ATTENTION(DEPTH)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) halves_attention_##DEPTH(                                            \
        const T *qkv, T *out, float *lse, const Key *drop, const u64 *samples, Heads heads) {                                  \
        __shared__ Room<DEPTH> room;                                                                                           \
        attend<DEPTH>(qkv, out, lse, drop, samples, heads, room);                                                              \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) halves_attention_queries_##DEPTH(                                    \
        const T *qkv, const T *y, const float *lse, const T *grad, float *levels, T *out, const Key *drop, const u64 *samples, \
        Heads heads) {                                                                                                         \
        __shared__ Room<DEPTH> room;                                                                                           \
        to_queries<DEPTH>(qkv, y, lse, grad, levels, out, drop, samples, heads, room);                                         \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) halves_attention_keys_##DEPTH(                                       \
        const T *qkv, const float *lse, const T *grad, const float *levels, T *out, const Key *drop, const u64 *samples,       \
        Heads heads) {                                                                                                         \
        __shared__ Room<DEPTH> room;                                                                                           \
        to_keys<DEPTH>(qkv, lse, grad, levels, out, drop, samples, heads, room);                                               \
    }

ATTENTION(64)
ATTENTION(128)
