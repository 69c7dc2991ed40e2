// Attention as in attention.cu, of floats of 16 bits, by the units that multiply small matrices of them: for heads of
// a multiple of 8 numbers, at most 128. Every product is summed in float. Scores and all that is made of them stay float until they
// are multiplied with rows: shares and slopes are rounded then. What dropout multiplies the shares by that it keeps comes after, in float,
// since it may be more than 16 bits can hold.
//
// A block has 64 positions as its own, 16 a warp, whose rows each warp keeps in registers as left factors. The other side's rows come
// to shared memory tile by tile, two tiles at a time: while one is worked on, the next one is on its way. What a warp makes of its
// scores is a left factor where it is, so nothing goes through shared memory but those rows.
//
// The units for products and the threads' own arithmetic take about as long, so what is done to each score is as little as can be: which
// keys a query sees is looked at only where a tile and a warp's own positions overlap, or the tile is cut short, and which shares are
// dropped only where any are. Of a warp's own rows those that aren't there are zeros, and nobody sees what comes of them. Products of
// rows are made of 16 positions of a tile's at a time, so that a thread needs few registers, and a multiprocessor has room for more of
// them. `PLAIN` is what most do: heads have just as many numbers as the kernel is for, no share is dropped, and no mask hides a key.
#include "fragments.cuh"
#include "heads.cuh"

const int OWN = 64;
const int OWN_OF_WARP = 16;
const int THREADS = 128;
// Keeps eight neighbouring rows apart in the banks of shared memory, still multiples of 16 bytes.
const int GAP = 8;

// Positions of the other side in a tile: so many that tiles of either size of heads take the same room.
template <int DEPTH> constexpr int others_of = 4096 / DEPTH;

// Whether a head has numbers from this one on.
template <int DEPTH, bool PLAIN> __device__ bool has_numbers(int number, const Heads &heads) { return PLAIN || number < (int)heads.depth; }

template <int DEPTH> struct Tile {
    alignas(16) T at[others_of<DEPTH>][DEPTH + GAP];
};

// A number of each of a tile's positions.
template <int DEPTH> struct Numbers {
    alignas(8) float at[others_of<DEPTH>];
};

// Rows of one side on their way to tiles, one after the other. A thread brings eight numbers of every so manieth position.
template <int DEPTH, bool PLAIN> struct Way {
    static const int STEP = THREADS / (DEPTH / 8), TIMES = others_of<DEPTH> / STEP;
    const T *at;
    i64 step;
    // Its first position among the tile's, its first number, and how many positions there are from that position on.
    int mine;
    int number;
    int left;

    __device__ Way(Rows<const T> rows, int first)
        : step(rows.step), mine((int)threadIdx.x / (DEPTH / 8)), number((int)threadIdx.x % (DEPTH / 8) * 8) {
        at = rows[first + mine] + number;
        left = (int)rows.of.end - first - mine;
    }

    // Has the rows of a tile come, filled up with zeros to whole fragments, and goes on to the next one's.
    __device__ void load(Tile<DEPTH> &tile, const Heads &heads) {
        if (has_numbers<DEPTH, PLAIN>(number / 16 * 16, heads)) {
            const bool has_own = has_numbers<DEPTH, PLAIN>(number, heads);
            UNROLL
            for (int i = 0; i < TIMES; i++) copy_later(&tile.at[mine + i * STEP][number], at + i * STEP * step, has_own && i * STEP < left);
        }
        at += others_of<DEPTH> * step;
        left -= others_of<DEPTH>;
    }
};

// The rows of the other side that a block works on, and those that come next.
template <int DEPTH> struct Room {
    Tile<DEPTH> first[2];
    Tile<DEPTH> second[2];
};

// The same with two numbers of each.
template <int DEPTH> struct RoomOfQueries {
    Room<DEPTH> rows;
    Numbers<DEPTH> bases[2];
    Numbers<DEPTH> levels[2];
};

// Calls `work` with each tile of the other side from `begin` to `limit` or where there are no more, if there are any: its first
// position, and its rows of two kinds; `beside(others, which)` has what else is wanted of them come.
template <int DEPTH, bool PLAIN, class Beside, class Work>
__device__ void for_others(Rows<const T> first, Rows<const T> second, int begin, i64 limit, const Heads &heads, Room<DEPTH> &room,
                           Beside beside, Work work) {
    const int OTHERS = others_of<DEPTH>, end = (int)(limit < first.of.end ? limit : first.of.end);
    if (begin >= end) return;
    int now = 0;
    Way<DEPTH, PLAIN> firsts(first, begin), seconds(second, begin);
    firsts.load(room.first[now], heads);
    seconds.load(room.second[now], heads);
    beside(begin, now);
    close_copies();
    for (int others = begin; others < end; others += OTHERS, now = 1 - now) {
        if (others + OTHERS < end) {
            firsts.load(room.first[1 - now], heads);
            seconds.load(room.second[1 - now], heads);
            beside(others + OTHERS, 1 - now);
        }
        close_copies();
        wait_for_copies<1>();
        __syncthreads();
        work(others, now);
        __syncthreads();
    }
}

// The first position of a warp's own, and the last.
__device__ inline int first_of_warp(int first) { return first + my_warp() * OWN_OF_WARP; }
__device__ inline int last_of_warp(int first) { return first_of_warp(first) + OWN_OF_WARP - 1; }
// The first position that a lane has of its warp's; the other one is eight on.
__device__ inline int my_position(int first) { return first_of_warp(first) + my_row(); }

__device__ inline float low_of(u32 pair) { return wide(T{(u16)pair}); }
__device__ inline float high_of(u32 pair) { return wide(T{(u16)(pair >> 16)}); }

// A warp's own rows as left factors.
template <int DEPTH, bool PLAIN> struct Own {
    Left at[DEPTH / 16];

    __device__ Own(Rows<const T> rows, int first, const Heads &heads) {
        const int position = my_position(first);
        UNROLL
        for (int i = 0; i < 4; i++) {
            const bool is_there = rows.has(position + i % 2 * 8);
            const T *mine = rows[position + i % 2 * 8] + i / 2 * 8 + my_column();
            UNROLL
            for (int c = 0; c < DEPTH / 16; c++) {
                const bool has = is_there && has_numbers<DEPTH, PLAIN>(c * 16 + i / 2 * 8, heads);
                at[c].at[i] = has ? *(const u32 *)(mine + c * 16) : 0;
            }
        }
    }
};

// The sum of the products of two rows' numbers, in each lane of those that have a row; both are left factors.
template <int DEPTH, bool PLAIN> __device__ void add_products(const Own<DEPTH, PLAIN> &x, const Own<DEPTH, PLAIN> &y, float (&sums)[2]) {
    UNROLL
    for (int c = 0; c < DEPTH / 16; c++) {
        UNROLL
        for (int i = 0; i < 4; i++) {
            const u32 a = x.at[c].at[i], b = y.at[c].at[i];
            sums[i % 2] = fmaf(low_of(a), low_of(b), fmaf(high_of(a), high_of(b), sums[i % 2]));
        }
    }
}

// Of each of a warp's own positions and 16 of a tile's, the k-th: 16 rows of sums, eight columns a fragment.
struct Products {
    float at[2][4];

    Products() = default;

    // The products of rows.
    template <int DEPTH, bool PLAIN>
    __device__ Products(const Own<DEPTH, PLAIN> &own, const Tile<DEPTH> &others, int k, const Heads &heads) {
        UNROLL
        for (int i = 0; i < 8; i++) at[i / 4][i % 4] = 0.0f;
        // Rows are columns of the right factor.
        const T *mine = &others.at[my_lane() % 8 + my_lane() / 16 * 8][my_lane() / 8 % 2 * 8] + k * 16 * (DEPTH + GAP);
        UNROLL
        for (int c = 0; c < DEPTH / 16; c++) {
            if (!has_numbers<DEPTH, PLAIN>(c * 16, heads)) continue;
            u32 right[4];
            load_matrices<false>(mine + c * 16, right);
            multiply_add(at[0], own.at[c], right[0], right[1]);
            multiply_add(at[1], own.at[c], right[2], right[3]);
        }
    }

    // Calls `work` with each of a lane's numbers, which of its two rows it is of, and which of the 16 positions.
    template <class Work> __device__ void each(Work work) {
        UNROLL
        for (int i = 0; i < 8; i++) work(at[i / 4][i % 4], i % 4 / 2, i / 4 * 8 + my_column() + i % 2);
    }

    // Puts `number` in the place of those that `is_hidden` says.
    template <class Hidden> __device__ void hide(float number, Hidden is_hidden) {
        each([&](float &mine, int row, int other) {
            if (is_hidden(row, other)) mine = number;
        });
    }
};

// The numbers that a lane has of a whole tile: those of its first row, then those of the other one, neighbours one after the other.
template <int DEPTH> struct Lane {
    // Of how many times eight positions.
    static const int COUNT = others_of<DEPTH> / 8;
    static const int SIZE = 4 * COUNT;

    // Which of the two rows a number is of.
    static __device__ int row_of(int i) { return i / (2 * COUNT); }

    // Which position of the tile's.
    static __device__ int other_of(int i) { return i / 2 % COUNT * 8 + my_column() + i % 2; }

    // Puts `number` in the place of those that aren't kept, a bit each, of the k-th products.
    static __device__ void put(float number, Products &products, int k, u32 kept) {
        UNROLL
        for (int i = 0; i < 8; i++) {
            const int which = i % 4 / 2 * 2 * COUNT + (2 * k + i / 4) * 2 + i % 2;
            if (!(kept >> which & 1)) products.at[i / 4][i % 4] = number;
        }
    }

    static __device__ void drop(Products &products, int k, u32 kept) { put(0.0f, products, k, kept); }
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

// Which of them the mask shows, where there is one, as bits for the same reason.
template <int SIZE, class Place> __device__ u32 shown_of(const Sight &sight, Place place) {
    if (!sight.hiding) return ~0u;
    u32 shown = 0;
    UNROLL_FOUR
    for (int i = 0; i < SIZE; i++) {
        const Seen at = place(i);
        shown |= (u32)sight.shows(at.query, at.key) << i;
    }
    return shown;
}

// Whether nothing of a tile that a warp has is to be done, since the mask shows none of it to any lane.
__device__ inline bool is_out_of_sight(const Sight &sight, u32 shown) {
    if (!sight.hiding) return false;
    for (int step = 16; step > 0; step /= 2) shown |= of_lane(shown, step);
    return shown == 0;
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

    // Adds rows of the other side, the k-th 16, weighed.
    template <bool PLAIN> __device__ void gather(const Products &weights, const Tile<DEPTH> &others, int k, const Heads &heads) {
        const T *mine = &others.at[my_lane() % 16][my_lane() / 16 * 8] + k * 16 * (DEPTH + GAP);
        const Left left = left_of(weights.at[0], weights.at[1]);
        UNROLL
        for (int c = 0; c < DEPTH / 16; c++) {
            if (!has_numbers<DEPTH, PLAIN>(c * 16, heads)) continue;
            u32 right[4];
            load_matrices<true>(mine + c * 16, right);
            multiply_add(at[2 * c], left, right[0], right[1]);
            multiply_add(at[2 * c + 1], left, right[2], right[3]);
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

    template <bool PLAIN> __device__ void write(Rows<T> rows, int first, const Heads &heads) const {
        const int mine = my_position(first);
        UNROLL
        for (int row = 0; row < 2; row++) {
            const int position = mine + row * 8;
            if (!rows.has(position)) continue;
            T *to = rows[position] + my_column();
            UNROLL
            for (int c = 0; c < DEPTH / 8; c++) {
                if (has_numbers<DEPTH, PLAIN>(c * 8, heads)) *(u32 *)(to + c * 8) = pair_of(at[c][row * 2], at[c][row * 2 + 1]);
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

template <int DEPTH, bool PLAIN>
__device__ void attend(const T *q, const T *k, const T *v, T *out, float *lse, const Key *drop, const u64 *samples, const float *hiding,
                       const Heads &heads, Room<DEPTH> &room) {
    const int MANY = others_of<DEPTH> / 16;
    for_tiles<OWN>(heads, asked(heads), true, [&](const Head &head, i64 of_tile) {
        const int first = (int)of_tile;
        const Own<DEPTH, PLAIN> queries(head.queries(q), first, heads);
        const Sight sight(PLAIN ? nullptr : hiding, head);
        Mask mask(PLAIN ? nullptr : drop, samples, head);
        Sums<DEPTH> sums;
        // The largest of scores; powers of 2 of scores times the factor are their exponentials.
        float most[2] = {-INFINITY_F, -INFINITY_F}, total[2] = {0.0f, 0.0f};
        const float factor = heads.scale * LOG2_E;
        const int mine = my_position(first), until[2] = {sight.until(mine), sight.until(mine + 8)};
        for_others<DEPTH, PLAIN>(head.keys(k), head.values(v), 0, sight.until(first + OWN - 1) + 1, heads, room, [](int, int) {},
                                 [&](int others, int now) {
            if (others > sight.until(last_of_warp(first))) return;
            const auto place = [=](int i) { return Seen{mine + Lane<DEPTH>::row_of(i) * 8, others + Lane<DEPTH>::other_of(i)}; };
            const u32 shown = shown_of<Lane<DEPTH>::SIZE>(sight, place);
            if (is_out_of_sight(sight, shown)) return;
            Products scores[MANY];
            float above[2] = {most[0], most[1]}, base[2], fade[2];
            UNROLL
            for (int k = 0; k < MANY; k++) scores[k] = Products(queries, room.first[now], k, heads);
            if (sight.has_edge(others + others_of<DEPTH>, first_of_warp(first))) {
                UNROLL
                for (int k = 0; k < MANY; k++) {
                    scores[k].hide(-INFINITY_F, [=](int row, int other) { return others + k * 16 + other > until[row]; });
                }
            }
            if (sight.hiding) {
                UNROLL
                for (int k = 0; k < MANY; k++) Lane<DEPTH>::put(-INFINITY_F, scores[k], k, shown);
            }
            UNROLL
            for (int k = 0; k < MANY; k++) scores[k].each([&](float score, int row, int) { above[row] = fmaxf(above[row], score); });
            UNROLL
            for (int row = 0; row < 2; row++) {
                above[row] = across(above[row], [](float a, float b) { return fmaxf(a, b); });
                // One that has seen no key yet has no largest.
                base[row] = !PLAIN && above[row] == -INFINITY_F ? 0.0f : above[row];
                fade[row] = power_of_2((most[row] - base[row]) * factor);
                most[row] = above[row];
                total[row] *= fade[row];
            }
            sums.scale(fade);
            UNROLL
            for (int k = 0; k < MANY; k++) {
                scores[k].each([&](float &score, int row, int) {
                    // The largest counts 1 exactly, however large it is.
                    score = power_of_2((score - base[row]) * factor);
                    total[row] += score;
                });
            }
            if (mask.drops) {
                const u32 kept = kept_of_keys<Lane<DEPTH>::SIZE>(mask, place);
                UNROLL
                for (int k = 0; k < MANY; k++) Lane<DEPTH>::drop(scores[k], k, kept);
            }
            UNROLL
            for (int k = 0; k < MANY; k++) sums.template gather<PLAIN>(scores[k], room.second[now], k, heads);
        });
        const Rows<float> lses = head.of_queries(lse);
        float per[2];
        UNROLL
        for (int row = 0; row < 2; row++) {
            total[row] = sum_across(total[row]);
            const bool saw_none = !PLAIN && total[row] == 0.0f && sight.may_hide_all();
            per[row] = saw_none ? 0.0f : mask.keep / total[row];
            const int query = mine + row * 8;
            if (lses.has(query) && my_column() == 0) {
                *lses[query] = saw_none ? INFINITY_F : (most[row] * factor + log2f(total[row])) * LN_2;
            }
        }
        sums.scale(per);
        sums.template write<PLAIN>(head.of_output(out), first, heads);
    });
}

// The gradient of queries; `levels` as in attention.cu.
template <int DEPTH, bool PLAIN>
__device__ void to_queries(const T *q, const T *k, const T *v, const T *y, const float *lse, const T *grad, float *levels, T *out,
                           const Key *drop, const u64 *samples, const float *hiding, const Heads &heads, Room<DEPTH> &room) {
    const int MANY = others_of<DEPTH> / 16;
    for_tiles<OWN>(heads, asked(heads), true, [&](const Head &head, i64 of_tile) {
        const int first = (int)of_tile;
        const Own<DEPTH, PLAIN> queries(head.queries(q), first, heads), grads(head.of_output(grad), first, heads);
        const Sight sight(PLAIN ? nullptr : hiding, head);
        Mask mask(PLAIN ? nullptr : drop, samples, head);
        Sums<DEPTH> sums;
        const float factor = heads.scale * LOG2_E;
        const int mine = my_position(first), until[2] = {sight.until(mine), sight.until(mine + 8)};
        float base[2], level[2] = {0.0f, 0.0f};
        add_products(Own<DEPTH, PLAIN>(head.of_output(y), first, heads), grads, level);
        const Rows<float> of_levels = head.of_queries(levels);
        UNROLL
        for (int row = 0; row < 2; row++) {
            const int query = mine + row * 8;
            const bool is_there = of_levels.has(query);
            level[row] = sum_across(level[row]);
            base[row] = is_there ? *head.of_queries(lse)[query] * LOG2_E : 0.0f;
            if (is_there && my_column() == 0) *of_levels[query] = level[row];
            level[row] *= 1.0f / mask.keep;
        }
        for_others<DEPTH, PLAIN>(head.keys(k), head.values(v), 0, sight.until(first + OWN - 1) + 1, heads, room, [](int, int) {},
                                 [&](int others, int now) {
            if (others > sight.until(last_of_warp(first))) return;
            const bool is_edge = sight.has_edge(others + others_of<DEPTH>, first_of_warp(first));
            const auto place = [=](int i) { return Seen{mine + Lane<DEPTH>::row_of(i) * 8, others + Lane<DEPTH>::other_of(i)}; };
            const u32 shown = shown_of<Lane<DEPTH>::SIZE>(sight, place);
            if (is_out_of_sight(sight, shown)) return;
            const u32 kept = kept_of_keys<Lane<DEPTH>::SIZE>(mask, place);
            UNROLL
            for (int k = 0; k < MANY; k++) {
                Products scores(queries, room.first[now], k, heads), slopes(grads, room.second[now], k, heads);
                if (mask.drops) Lane<DEPTH>::drop(slopes, k, kept);
                UNROLL
                for (int i = 0; i < 8; i++) {
                    const int row = i % 4 / 2;
                    float &slope = slopes.at[i / 4][i % 4];
                    slope = power_of_2(fmaf(scores.at[i / 4][i % 4], factor, -base[row])) * (slope - level[row]);
                }
                if (is_edge) {
                    slopes.hide(0.0f, [=](int row, int other) { return others + k * 16 + other > until[row]; });
                }
                if (sight.hiding) Lane<DEPTH>::put(0.0f, slopes, k, shown);
                sums.template gather<PLAIN>(slopes, room.first[now], k, heads);
            }
        });
        const float scale = heads.scale * mask.keep, scales[2] = {scale, scale};
        sums.scale(scales);
        sums.template write<PLAIN>(head.rows(out, heads.gradients[QUERIES], asked(heads)), first, heads);
    });
}

// The gradients of keys and values.
template <int DEPTH, bool PLAIN>
__device__ void to_keys(const T *q, const T *k, const T *v, const float *lse, const T *grad, const float *levels, T *out_k, T *out_v,
                        const Key *drop, const u64 *samples, const float *hiding, const Heads &heads, RoomOfQueries<DEPTH> &room) {
    const int MANY = others_of<DEPTH> / 16;
    for_tiles<OWN>(heads, every_key(heads), false, [&](const Head &head, i64 of_tile) {
        const int first = (int)of_tile;
        const Own<DEPTH, PLAIN> keys(head.keys(k), first, heads), values(head.values(v), first, heads);
        const Sight sight(PLAIN ? nullptr : hiding, head);
        Mask mask(PLAIN ? nullptr : drop, samples, head);
        Sums<DEPTH> of_keys, of_values;
        const float factor = heads.scale * LOG2_E, less = 1.0f / mask.keep;
        const int mine = my_position(first), from = (int)heads.from, end = (int)asked(heads).end;
        const int first_since = sight.since(first), since = sight.since(mine);
        const Rows<const float> bases = head.of_queries(lse), of_levels = head.of_queries(levels);
        const auto beside = [&](int others, int which) {
            const int i = (int)threadIdx.x;
            if (i >= others_of<DEPTH>) return;
            const bool is_there = bases.has(others + i);
            copy_number_later(&room.bases[which].at[i], bases[others + i], is_there);
            copy_number_later(&room.levels[which].at[i], of_levels[others + i], is_there);
        };
        for_others<DEPTH, PLAIN>(head.queries(q), head.of_output(grad), first_since > from ? first_since : from, end, heads, room.rows, beside,
                                 [&](int others, int now) {
            if (others + others_of<DEPTH> <= sight.since(first_of_warp(first))) return;
            const Tile<DEPTH> &queries = room.rows.first[now], &grads = room.rows.second[now];
            const bool is_edge = others < sight.since(last_of_warp(first)) || others + others_of<DEPTH> > end;
            const auto place = [=](int i) { return Seen{others + Lane<DEPTH>::other_of(i), mine + Lane<DEPTH>::row_of(i) * 8}; };
            const u32 shown = shown_of<Lane<DEPTH>::SIZE>(sight, place);
            if (is_out_of_sight(sight, shown)) return;
            const u32 kept = kept_of_own_keys<Lane<DEPTH>::SIZE>(mask, place);
            UNROLL
            for (int k = 0; k < MANY; k++) {
                Products shares(keys, queries, k, heads), slopes(values, grads, k, heads);
                if (mask.drops) Lane<DEPTH>::drop(slopes, k, kept);
                UNROLL
                for (int i = 0; i < 8; i++) {
                    const int other = k * 16 + i / 4 * 8 + my_column() + i % 2;
                    const float base = room.bases[now].at[other] * LOG2_E, level = room.levels[now].at[other] * less;
                    float &share = shares.at[i / 4][i % 4], &slope = slopes.at[i / 4][i % 4];
                    share = power_of_2(fmaf(share, factor, -base));
                    slope = share * (slope - level);
                }
                if (mask.drops) Lane<DEPTH>::drop(shares, k, kept);
                if (is_edge) {
                    // Infinite keys make a query that isn't there no number.
                    const auto hides = [=](int row, int other) {
                        const int query = others + k * 16 + other;
                        return query < since + row * 8 || query >= end;
                    };
                    shares.hide(0.0f, hides);
                    slopes.hide(0.0f, hides);
                }
                if (sight.hiding) {
                    Lane<DEPTH>::put(0.0f, shares, k, shown);
                    Lane<DEPTH>::put(0.0f, slopes, k, shown);
                }
                of_values.template gather<PLAIN>(shares, grads, k, heads);
                of_keys.template gather<PLAIN>(slopes, queries, k, heads);
            }
        });
        const float scale = heads.scale * mask.keep, of_scores[2] = {scale, scale}, of_shares[2] = {mask.keep, mask.keep};
        of_keys.scale(of_scores);
        of_values.scale(of_shares);
        of_keys.template write<PLAIN>(head.rows(out_k, heads.gradients[KEYS], every_key(heads)), first, heads);
        of_values.template write<PLAIN>(head.rows(out_v, heads.gradients[VALUES], every_key(heads)), first, heads);
    });
}

// One row the heads of at most so many numbers, and how many blocks of each kernel a multiprocessor is to have room for, in registers: as
// many as leave what most do without a number in slower memory, but for a few bytes. What most do has kernels of its own, since the others
// want more registers.
#define ATTENTION(DEPTH, ATTEND, TO_QUERIES, TO_KEYS)          \
    KIND(DEPTH, , false, ATTEND, TO_QUERIES, TO_KEYS)          \
    KIND(DEPTH, plain_, true, ATTEND, TO_QUERIES, TO_KEYS)

#define KIND(DEPTH, NAME, PLAIN, ATTEND, TO_QUERIES, TO_KEYS)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, ATTEND) halves_attention_##NAME##DEPTH(                                \
        const T *q, const T *k, const T *v, T *out, float *lse, const Key *drop, const u64 *samples, const float *hiding,        \
        Heads heads) {                                                                                                           \
        __shared__ Room<DEPTH> room;                                                                                             \
        attend<DEPTH, PLAIN>(q, k, v, out, lse, drop, samples, hiding, heads, room);                                             \
    }                                                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, TO_QUERIES) halves_attention_queries_##NAME##DEPTH(                    \
        const T *q, const T *k, const T *v, const T *y, const float *lse, const T *grad, float *levels, T *out, const Key *drop, \
        const u64 *samples, const float *hiding, Heads heads) {                                                                  \
        __shared__ Room<DEPTH> room;                                                                                             \
        to_queries<DEPTH, PLAIN>(q, k, v, y, lse, grad, levels, out, drop, samples, hiding, heads, room);                        \
    }                                                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, TO_KEYS) halves_attention_keys_##NAME##DEPTH(                          \
        const T *q, const T *k, const T *v, const float *lse, const T *grad, const float *levels, T *out_k, T *out_v,            \
        const Key *drop, const u64 *samples, const float *hiding, Heads heads) {                                                 \
        __shared__ RoomOfQueries<DEPTH> room;                                                                                    \
        to_keys<DEPTH, PLAIN>(q, k, v, lse, grad, levels, out_k, out_v, drop, samples, hiding, heads, room);                     \
    }

ATTENTION(64, 4, 4, 3)
ATTENTION(128, 3, 2, 2)
