// What the stand-ins for NVIDIA's libraries share: streams, a record of calls, errors on demand, and numbers of 16 bits.
//
// Memory is the host's, at the addresses that are given. Work is handed to the fake driver that lies in the same folder, whose
// streams do it later.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

// ---- streams ----

using Enqueue = int (*)(void *stream, int (*work)(void *), void *argument, void (*release)(void *));

// A function of the driver beside this library, or null where that isn't open.
inline void *of_driver(const char *name) {
    static void *const driver = [] {
        Dl_info own;
        dladdr(reinterpret_cast<void *>(&of_driver), &own);
        const std::string path = own.dli_fname;
        return dlopen((path.substr(0, path.rfind('/')) + "/libcuda.so.1").c_str(), RTLD_NOW | RTLD_NOLOAD);
    }();
    return driver ? dlsym(driver, name) : nullptr;
}

// Hands work to a stream, which asks again where it gives false. Whether the stream takes it.
inline bool enqueue(void *stream, std::function<bool()> work) {
    using Work = std::function<bool()>;
    auto to_stream = reinterpret_cast<Enqueue>(of_driver("phalanx_fake_enqueue"));
    auto call = [](void *work) { return int((*static_cast<Work *>(work))()); };
    auto release = [](void *work) { delete static_cast<Work *>(work); };
    return to_stream && to_stream(stream, call, new Work(std::move(work)), release) == 0;
}

// Whether what a stream is given becomes part of a graph.
inline bool is_capturing(void *stream) {
    auto ask = reinterpret_cast<int (*)(void *, int *)>(of_driver("cuStreamIsCapturing"));
    int status = 0;
    return ask && ask(stream, &status) == 0 && status != 0;
}

// Has streams go on by themselves from now on.
inline void go_on() {
    if (auto begin = reinterpret_cast<void (*)()>(of_driver("phalanx_fake_goes_on"))) begin();
}

// The GPU that is current on this thread, or -1 where there is none.
inline int current_device() {
    auto get = reinterpret_cast<int (*)(int *)>(of_driver("cuCtxGetDevice"));
    int device = -1;
    return get && get(&device) == 0 ? device : -1;
}

// ---- the record ----

struct Record {
    std::mutex lock;
    std::map<std::string, long> counts;
    std::map<std::string, std::map<long, int>> failures; // By function and number of the call.
    std::vector<std::string> log;
    long live = 0;
};

inline Record &record() {
    static Record *record = new Record;
    return *record;
}

// The log is kept for the first calls; the counts go on.
constexpr size_t MOST_LINES = 20000;

// Whether what this call gives a stream comes upon memory that isn't there: PHALANX_FAKE_ILLEGAL="FUNCTION NTH".
inline bool is_illegal(const std::string &function, long nth) {
    static const std::pair<std::string, long> told = [] {
        std::pair<std::string, long> told;
        if (const char *text = std::getenv("PHALANX_FAKE_ILLEGAL")) std::istringstream(text) >> told.first >> told.second;
        return told;
    }();
    return function == told.first && nth == told.second;
}

// Takes note of a call; the code that it is to fail with, or 0.
inline int called(const std::string &function, const std::string &detail = "") {
    Record &r = record();
    std::lock_guard<std::mutex> guard(r.lock);
    long nth = ++r.counts[function];
    if (r.log.size() < MOST_LINES) r.log.push_back(function + (detail.empty() ? "" : " " + detail));
    if (is_illegal(function, nth)) {
        if (auto tell = reinterpret_cast<void (*)()>(of_driver("phalanx_fake_next_is_illegal"))) tell();
    }
    auto of = r.failures.find(function);
    if (of == r.failures.end()) return 0;
    auto code = of->second.find(nth);
    return code == of->second.end() ? 0 : code->second;
}

// Counts things that must be ended: descriptors, handles, communicators.
inline void born() {
    std::lock_guard<std::mutex> guard(record().lock);
    record().live++;
}

inline void died() {
    std::lock_guard<std::mutex> guard(record().lock);
    record().live--;
}

// ---- numbers ----

inline float from_bf16(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

inline uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_f16(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return float(half);
}

inline uint16_t to_f16(float x) {
    _Float16 half = _Float16(x);
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}

} // namespace fake

// How often a function was called since the start or the last reset.
FAKE_EXPORT long phalanx_fake_calls(const char *function) {
    std::lock_guard<std::mutex> guard(fake::record().lock);
    return fake::record().counts[function];
}

// The `nth` call of a function from now on fails with `code`, 1 being the next.
FAKE_EXPORT void phalanx_fake_fail(const char *function, long nth, int code) {
    fake::Record &r = fake::record();
    std::lock_guard<std::mutex> guard(r.lock);
    r.failures[function][r.counts[function] + nth] = code;
}

// How many things live that must be ended.
FAKE_EXPORT long phalanx_fake_live() {
    std::lock_guard<std::mutex> guard(fake::record().lock);
    return fake::record().live;
}

// The calls, a line each, as far as there is room; the bytes that there are in all.
FAKE_EXPORT size_t phalanx_fake_log(char *to, size_t room) {
    fake::Record &r = fake::record();
    std::lock_guard<std::mutex> guard(r.lock);
    std::string text;
    for (const std::string &line : r.log) text += line + "\n";
    if (to) memcpy(to, text.data(), text.size() < room ? text.size() : room);
    return text.size();
}

// Forgets calls and failures to come; what lives goes on.
FAKE_EXPORT void phalanx_fake_reset() {
    fake::Record &r = fake::record();
    std::lock_guard<std::mutex> guard(r.lock);
    r.counts.clear();
    r.failures.clear();
    r.log.clear();
}
