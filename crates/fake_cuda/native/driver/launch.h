// A launch: what it is given is kept until it is carried out, and then checked.
#pragma once
#include "fake.h"

namespace {

std::vector<std::size_t> sizes_of(const std::string &letters) {
    std::vector<std::size_t> sizes;
    for (std::size_t i = 0; i < letters.size();) {
        const char letter = letters[i++];
        std::size_t size = letter == 'f' ? 4 : 8;
        if (letter == 's') {
            std::size_t digits;
            size = std::stoul(letters.substr(i), &digits);
            i += digits;
        }
        sizes.push_back(size);
    }
    return sizes;
}

// The kinds of parameters, without the sizes of structs.
std::string kinds_of(const std::string &letters) {
    std::string kinds;
    for (char letter : letters) {
        if (letter < '0' || letter > '9') kinds += letter;
    }
    return kinds;
}

struct Launch {
    Gpu *gpu;
    Function function;
    unsigned blocks, threads;
    std::vector<std::vector<char>> arguments;

    // The memory that an argument names; 0 where it names none.
    std::uint64_t address(std::size_t i) const {
        std::uint64_t at = 0;
        const char kind = kinds_of(function.letters)[i];
        if (kind == 'r' || kind == 'w') std::memcpy(&at, arguments[i].data(), sizeof(at));
        return at;
    }

    void run() {
        if (gpu->met) return;
        if (!fake.modules.count(function.module)) return wrong(*gpu, LAUNCH_FAILED, function.name + " is no longer loaded");
        std::vector<void *> from;
        for (std::size_t i = 0; i < arguments.size(); i++) {
            from.push_back(arguments[i].data());
            const std::uint64_t at = address(i);
            if (at && !gpu->memory.holds(at, 0)) {
                return wrong(*gpu, ILLEGAL_ADDRESS, function.name + ": argument " + std::to_string(i) + " is no memory of this GPU");
            }
        }
        const int falling = (int)fake.garbage.below(2);
        if (const char *what = function.module->run(function.name.c_str(), blocks, threads, from.data(), falling)) {
            return wrong(*gpu, LAUNCH_FAILED, function.name + ": " + what);
        }
        for (std::size_t i = 0; i < arguments.size(); i++) {
            const std::uint64_t at = address(i);
            if (!at || gpu->memory.is_whole(at)) continue;
            gpu->memory.mend(at);
            wrong(*gpu, ILLEGAL_ADDRESS, function.name + " writes beside its argument " + std::to_string(i));
        }
    }
};

}  // namespace
