// What tests tell the fake driver, and ask of it.
#pragma once
#include "fake.h"

API void fake_seed(std::uint64_t seed) {
    Lock lock(fake.mutex);
    fake.streams.seed(seed);
    fake.garbage.state = seed + 1;
}

API void fake_gpus(int n) {
    Lock lock(fake.mutex);
    fake.n_gpus = n;
}

API void fake_limit_memory(int gpu, std::uint64_t bytes) {
    Lock lock(fake.mutex);
    fake.gpus[gpu].memory.limit = bytes;
}

API void fake_fail(const char *function, std::uint64_t nth, int code) {
    Lock lock(fake.mutex);
    fake.journal.failures[function] = {nth, code};
}

API void fake_illegal(const char *function, std::uint64_t nth) {
    Lock lock(fake.mutex);
    illegal.function = function;
    illegal.left = (long)nth;
}

API std::uint64_t fake_calls(const char *function) {
    Lock lock(fake.mutex);
    const auto found = fake.journal.counts.find(function);
    return found == fake.journal.counts.end() ? 0 : found->second;
}

API std::uint64_t fake_count(const char *what) {
    Lock lock(fake.mutex);
    const std::string name = what;
    std::uint64_t pieces = 0, bytes = 0, waiting = 0;
    for (const Gpu &gpu : fake.gpus) pieces += gpu.memory.n_live(), bytes += gpu.memory.used;
    for (const Stream *stream : fake.streams.order()) waiting += stream->queue.size();
    if (name == "pieces") return pieces;
    if (name == "bytes") return bytes;
    if (name == "pinned") return fake.pinned.size();
    if (name == "streams") return fake.streams.all.size();
    if (name == "events") return fake.events.size();
    if (name == "graphs") return fake.graphs.size() + fake.execs.size();
    if (name == "modules") return fake.modules.size();
    if (name == "waiting") return waiting;
    if (name == "bytes_up") return fake.journal.bytes_up;
    if (name == "bytes_down") return fake.journal.bytes_down;
    if (name == "bytes_beside") return fake.journal.bytes_beside;
    if (name == "bytes_across") return fake.journal.bytes_across;
    return ~0ull;
}

// Writes the lines of the log, or of what was found to be damaged, one after the other; gives how long they are.
API std::size_t fake_text(const char *what, char *out, std::size_t room) {
    Lock lock(fake.mutex);
    std::string all;
    const bool is_log = std::string(what) == "log";
    for (const std::string &line : is_log ? fake.journal.log : fake.journal.damage) all += line + "\n";
    for (const Gpu &gpu : fake.gpus) {
        if (!is_log && gpu.memory.first_damaged()) all += "somebody has written beside memory of GPU " + std::to_string(gpu.index) + "\n";
    }
    std::memcpy(out, all.data(), std::min(room, all.size()));
    return all.size();
}
