// What attention's kernels know of heads. A head of a sample is a row of D numbers at each position, wherever its queries, keys and values
// lie: nothing is copied to bring rows together. The queries of some positions are asked, Q of them one after the other, and what comes
// of them is (B, Q, H, D). Of each query that is asked there is one more number, (B, H, Q).
#pragma once
#include "grid.cuh"
#include "key.cuh"

// How far apart rows lie, from one sample, one head and one position to the next.
struct Apart {
    i64 sample;
    i64 head;
    i64 position;
};

enum Group { QUERIES, KEYS, VALUES };

struct Heads {
    i64 batch;
    i64 heads;
    i64 depth;
    // Positions that have keys.
    i64 keys;
    // The first position whose query is asked, and how many are.
    i64 from;
    i64 asking;
    // Whether no query sees a later key: else they see all.
    i64 causal;
    // How many queries have masks of dropout.
    i64 dropping;
    // Which of all heads that have such masks is the first one here.
    i64 first;
    // Random bits below this drop a share.
    i64 threshold;
    // By group.
    Apart given[3];
    Apart gradients[3];
    // Of what says which keys are hidden, if any may be, and there from one key to the next.
    Apart hiding;
    i64 hiding_of_key;
    // What the others are multiplied by; 1 where none is dropped.
    float keep;
    // What scores are multiplied by.
    float scale;
};

// Some positions, one after the other.
struct Positions {
    i64 begin;
    i64 end;

    __device__ bool has(i64 position) const { return begin <= position && position < end; }
};

// A head's numbers at each of some positions.
template <class P> struct Rows {
    // Those of the first.
    P *at;
    i64 step;
    Positions of;

    __device__ P *operator[](i64 position) const { return at + (position - of.begin) * step; }
    __device__ bool has(i64 position) const { return of.has(position); }
};

__device__ inline Positions every_key(const Heads &heads) { return {0, heads.keys}; }
__device__ inline Positions asked(const Heads &heads) { return {heads.from, heads.from + heads.asking}; }

// Head `i` of all samples' heads.
struct Head {
    const Heads &all;
    i64 sample;
    i64 head;

    __device__ Head(const Heads &all, i64 i) : all(all), sample(i / all.heads), head(i % all.heads) {}

    template <class P> __device__ Rows<P> rows(P *first, const Apart &apart, Positions of) const {
        return {first + sample * apart.sample + head * apart.head, apart.position, of};
    }

    __device__ Rows<const T> queries(const T *first) const { return rows(first, all.given[QUERIES], asked(all)); }
    __device__ Rows<const T> keys(const T *first) const { return rows(first, all.given[KEYS], every_key(all)); }
    __device__ Rows<const T> values(const T *first) const { return rows(first, all.given[VALUES], every_key(all)); }

    template <class P> __device__ Rows<P> of_output(P *first) const {
        const i64 width = all.heads * all.depth;
        return rows(first, {all.asking * width, all.depth, width}, asked(all));
    }

    // The number of each query that is asked.
    template <class P> __device__ Rows<P> of_queries(P *numbers) const {
        return rows(numbers, {all.heads * all.asking, all.asking, 1}, asked(all));
    }
};

// Which keys a head's queries see.
struct Sight {
    // A number for each query that is asked and each key, 0 where it is hidden; nowhere where none is.
    const float *hiding;
    i64 of_query;
    i64 of_key;
    Positions asked;
    int last;
    // How much further than itself a query sees: nothing, or so far that it is everything.
    int further;

    __device__ Sight(const float *hiding, const Head &head)
        : hiding(hiding ? hiding + head.sample * head.all.hiding.sample + head.head * head.all.hiding.head : nullptr),
          of_query(head.all.hiding.position), of_key(head.all.hiding_of_key), asked(::asked(head.all)), last((int)head.all.keys - 1),
          further(head.all.causal ? 0 : 1 << 30) {}

    // Whether a query may see no key at all.
    __device__ bool may_hide_all() const { return hiding || last < 0; }
    // The last key that a query sees by where it stands.
    __device__ int until(int query) const { return query + further < last ? query + further : last; }
    // The first position whose query sees a key, or one before all.
    __device__ int since(int key) const { return key - further; }

    // Whether a tile of keys that ends before `end` has any that one of the queries from `first` on doesn't see by where they stand.
    __device__ bool has_edge(int end, int first) const { return end - 1 > until(first); }

    // Whether the mask, if there is one, shows a query that is asked a key.
    __device__ bool shows(int query, int key) const {
        if (!hiding) return true;
        return asked.has(query) && key <= last && hiding[(query - asked.begin) * of_query + key * of_key] != 0.0f;
    }

    // Whether a query that is asked sees a key; none is seen by those that aren't.
    __device__ bool sees(int query, int key) const { return asked.has(query) && key <= until(query) && shows(query, key); }
};

// What dropout multiplies a head's shares by. The mask is that of dropout for shares (B, heads, queries, keys), so it doesn't depend on how
// the work is cut into tiles.
struct Mask {
    bool drops;
    u64 seed;
    u64 stream;
    // The place of the head's first share among its sample's.
    u64 start;
    u64 keys;
    u32 threshold;
    float keep;
    // Four numbers at a time are made, and neighbouring keys share them.
    u64 block;
    Words words;

    __device__ Mask(const Key *drop, const u64 *samples, const Head &head) {
        const Heads &all = head.all;
        drops = drop != nullptr;
        seed = drops ? mixed(*drop) : 0;
        stream = drops ? samples[head.sample] : 0;
        start = (u64)((all.first + head.head) * all.dropping * all.keys);
        keys = (u64)all.keys;
        threshold = (u32)all.threshold;
        keep = all.keep;
        block = ~(u64)0;
        words = {};
    }

    // What the share that a query has of a key is multiplied by.
    __device__ float factor(i64 query, i64 key) { return drops && is_dropped(query, key) ? 0.0f : keep; }

    // Whether it is dropped, where any are.
    __device__ bool is_dropped(i64 query, i64 key) {
        const u64 at = start + (u64)query * keys + (u64)key;
        if (at / 4 != block) {
            block = at / 4;
            words = philox(seed, stream, block);
        }
        // Chosen like this, the words stay in registers.
        const u32 low = at & 1 ? words.word[1] : words.word[0], high = at & 1 ? words.word[3] : words.word[2];
        return (at & 2 ? high : low) < threshold;
    }

    // Whether four keys from a multiple of four on have one block of numbers to themselves, for every query.
    __device__ bool has_whole_blocks() const { return keys % 4 == 0; }

    // Which of the four keys are kept that `key` is one of, a bit each, where they have a block to themselves.
    __device__ u32 kept_of_four(i64 query, i64 key) const {
        const Words four = philox(seed, stream, (start + (u64)query * keys + (u64)key) / 4);
        u32 kept = 0;
        UNROLL
        for (int i = 0; i < 4; i++) kept |= (u32)(four.word[i] >= threshold) << i;
        return kept;
    }
};

// Calls `work` for each tile of each head that the block has to do, of `OWN` of these positions, with the first of them.
// Those of late positions come first where they have the most to look at (`late_first`), else last.
template <int OWN, class Work> __device__ void for_tiles(const Heads &heads, Positions of, bool late_first, Work work) {
    const i64 n_heads = heads.batch * heads.heads, n_tiles = (of.end - of.begin + OWN - 1) / OWN;
    for (i64 i = blockIdx.x; i < n_heads * n_tiles; i += gridDim.x) {
        const i64 tile = i / n_heads;
        work(Head(heads, i % n_heads), of.begin + (late_first ? n_tiles - 1 - tile : tile) * OWN);
    }
}
