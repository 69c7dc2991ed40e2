// The keys of dropout.
#pragma once
#include "philox.cuh"

// What a dropout is a function of, but for the samples' numbers. It lies in device memory, so that a captured graph can be played
// again in another step.
struct Key {
    u64 seed;
    u64 step;
    u64 layer;
};

__device__ inline u64 mixed(const Key &key) {
    const Words w = philox(key.seed, key.layer, key.step);
    const u64 low = (u64)w.word[2] << 32 | w.word[3];
    return ((u64)w.word[0] << 32 | w.word[1]) ^ (low << 17 | low >> 47);
}
