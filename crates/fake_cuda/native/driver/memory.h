// The memory of a GPU: pieces of the host's between guards. What is fresh holds garbage, what was freed is poisoned and stays
// away for a while, so that nobody gets along with either.
#pragma once
#include "chance.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>

class Memory {
public:
    std::uint64_t limit = limit_at_first(), used = 0, allocations = 0;

    // Where it lies; 0 if there isn't as much left.
    std::uint64_t allocate(std::size_t bytes, Chance &chance) {
        if (bytes > limit - used) return 0;
        char *block = (char *)std::aligned_alloc(256, (GUARD + bytes + GUARD + 255) / 256 * 256);
        std::memset(block, GUARDED, GUARD + bytes + GUARD);
        std::memset(block + GUARD, 0x60 + (int)chance.below(32), bytes);
        used += bytes;
        allocations++;
        const std::uint64_t at = (std::uint64_t)(block + GUARD);
        live[at] = bytes;
        return at;
    }

    bool free(std::uint64_t at) {
        const auto found = live.find(at);
        if (found == live.end()) return false;
        std::memset((char *)at, 0xdd, found->second);
        used -= found->second;
        away.push_back(found->first);
        away_bytes += found->second;
        live.erase(found);
        while (away_bytes > MOST_AWAY || away.size() > 256) {
            std::free((char *)away.front() - GUARD);
            away_bytes -= away_bytes / away.size();
            away.pop_front();
        }
        return true;
    }

    // Whether all these bytes lie in one piece.
    bool holds(std::uint64_t at, std::size_t bytes) const {
        const auto piece = piece_of(at);
        return piece != live.end() && at + bytes <= piece->first + piece->second;
    }

    // Whether nobody has written beside the piece that this lies in.
    bool is_whole(std::uint64_t at) const {
        const auto piece = piece_of(at);
        if (piece == live.end()) return true;
        const unsigned char *start = (const unsigned char *)piece->first;
        for (std::size_t i = 0; i < GUARD; i++) {
            if (start[piece->second + i] != GUARDED || *(start - 1 - i) != GUARDED) return false;
        }
        return true;
    }

    // Makes the guards of a piece good again.
    void mend(std::uint64_t at) {
        const auto piece = piece_of(at);
        std::memset((char *)piece->first - GUARD, GUARDED, GUARD);
        std::memset((char *)piece->first + piece->second, GUARDED, GUARD);
    }

    std::size_t n_live() const { return live.size(); }

    // The first piece that somebody has written beside, or 0.
    std::uint64_t first_damaged() const {
        for (const auto &piece : live) {
            if (!is_whole(piece.first)) return piece.first;
        }
        return 0;
    }

private:
    // PHALANX_FAKE_MEMORY=BYTES, or 1 GiB.
    static std::uint64_t limit_at_first() {
        const char *told = std::getenv("PHALANX_FAKE_MEMORY");
        return told ? std::strtoull(told, nullptr, 10) : 1ull << 30;
    }

    static const std::size_t GUARD = 512, MOST_AWAY = 16 << 20;
    static const unsigned char GUARDED = 0xfa;
    // How many bytes each piece has, by where it begins.
    std::map<std::uint64_t, std::size_t> live;
    std::deque<std::uint64_t> away;
    std::size_t away_bytes = 0;

    std::map<std::uint64_t, std::size_t>::const_iterator piece_of(std::uint64_t at) const {
        auto next = live.upper_bound(at);
        if (next == live.begin()) return live.end();
        --next;
        // Empty ends belong to a piece, too.
        return at <= next->first + next->second ? next : live.end();
    }
};
