// What the program has called, how often, and which of its calls are to fail.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

struct Journal {
    // The last calls, the oldest first.
    std::vector<std::string> log;
    std::map<std::string, std::uint64_t> counts;
    // For a function: how many calls are still to come until one fails, that one included, and with which code.
    std::map<std::string, std::pair<std::uint64_t, int>> failures;
    // What the program did that a GPU would have let pass or answered with a crash.
    std::vector<std::string> damage;
    std::uint64_t bytes_up = 0, bytes_down = 0, bytes_across = 0;
    // Of those up and down: on streams that have no kernels.
    std::uint64_t bytes_beside = 0;

    // Notes a call; gives the code that it is to fail with, or 0.
    int called(const char *function) {
        counts[function]++;
        write(function);
        const auto failure = failures.find(function);
        if (failure == failures.end() || --failure->second.first > 0) return 0;
        const int code = failure->second.second;
        failures.erase(failure);
        return code;
    }

    void write(const std::string &line) {
        if (log.size() == MOST) log.erase(log.begin(), log.begin() + MOST / 2);
        log.push_back(line);
    }

private:
    static const std::size_t MOST = 1 << 14;
};
