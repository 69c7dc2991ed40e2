// What attention's kernels know of heads. Queries, keys and values lie side by side, (B, T, 3, H, D). The queries of some positions
// are asked, Q of them one after the other, and what comes of them is (B, Q, H, D); a head of a sample is a row of D numbers at each
// position in them, and nothing is copied to bring its rows together. Of each query that is asked there is one more number, (B, H, Q).
#pragma once
#include "grid.cuh"
#include "key.cuh"

struct Heads {
    i64 batch;
    i64 time;
    i64 heads;
    i64 depth;
    // The first position whose query is asked, and how many are.
    i64 from;
    i64 asking;
    // Which of all heads that have masks is the first one here.
    i64 first;
    // Random bits below this drop a share.
    i64 threshold;
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

__device__ inline Positions every(const Heads &heads) { return {0, heads.time}; }
__device__ inline Positions asked(const Heads &heads) { return {heads.from, heads.from + heads.asking}; }

enum Group { QUERIES, KEYS, VALUES };

// Head `i` of all samples' heads.
struct Head {
    const Heads &all;
    i64 sample;
    i64 head;

    __device__ Head(const Heads &all, i64 i) : all(all), sample(i / all.heads), head(i % all.heads) {}

    // Of queries those that are asked.
    template <class P> __device__ Rows<P> of_three(P *packed, Group group) const {
        const i64 width = all.heads * all.depth;
        const Positions of = group == QUERIES ? asked(all) : every(all);
        return {packed + ((sample * all.time + of.begin) * 3 + (i64)group) * width + head * all.depth, 3 * width, of};
    }

    template <class P> __device__ Rows<P> of_one(P *packed) const {
        const i64 width = all.heads * all.depth;
        return {packed + sample * all.asking * width + head * all.depth, width, asked(all)};
    }

    // The number of each query that is asked.
    template <class P> __device__ Rows<P> of_queries(P *numbers) const {
        return {numbers + (sample * all.heads + head) * all.asking, 1, asked(all)};
    }
};

// What dropout multiplies a head's shares by. The mask is that of dropout for shares (B, heads, T, T), so it doesn't depend on how
// the work is cut into tiles.
struct Mask {
    bool drops;
    u64 seed;
    u64 stream;
    // The place of the head's first share among its sample's.
    u64 start;
    u64 time;
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
        start = (u64)((all.first + head.head) * all.time * all.time);
        time = (u64)all.time;
        threshold = (u32)all.threshold;
        keep = all.keep;
        block = ~(u64)0;
        words = {};
    }

    // What the share that a query has of a key is multiplied by.
    __device__ float factor(i64 query, i64 key) { return drops && is_dropped(query, key) ? 0.0f : keep; }

    // Whether it is dropped, where any are.
    __device__ bool is_dropped(i64 query, i64 key) {
        const u64 at = start + (u64)query * time + (u64)key;
        if (at / 4 != block) {
            block = at / 4;
            words = philox(seed, stream, block);
        }
        // Chosen like this, the words stay in registers.
        const u32 low = at & 1 ? words.word[1] : words.word[0], high = at & 1 ? words.word[3] : words.word[2];
        return (at & 2 ? high : low) < threshold;
    }

    // Whether four keys from a multiple of four on have one block of numbers to themselves, for every query.
    __device__ bool has_whole_blocks() const { return time % 4 == 0; }

    // Which of the four keys are kept that `key` is one of, a bit each, where they have a block to themselves.
    __device__ u32 kept_of_four(i64 query, i64 key) const {
        const Words four = philox(seed, stream, (start + (u64)query * time + (u64)key) / 4);
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
