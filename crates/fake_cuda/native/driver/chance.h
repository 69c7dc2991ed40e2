// Numbers that a seed decides.
#pragma once
#include <cstdint>

struct Chance {
    std::uint64_t state = 1;

    std::uint64_t below(std::uint64_t n) {
        // splitmix64.
        std::uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return (z ^ (z >> 31)) % n;
    }
};
