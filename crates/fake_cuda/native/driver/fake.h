// All that the fake driver knows, and what every call begins with: it is written down, it may be told to fail, and it may not be
// allowed.
#pragma once
#include "codes.h"
#include "journal.h"
#include "memory.h"
#include "streams.h"

#include <dlfcn.h>

#include <chrono>
#include <fstream>
#include <mutex>
#include <sstream>

namespace {

struct Gpu {
    Memory memory;
    // The error that work of this GPU has met; every later call gives it, too.
    int met = 0;
    unsigned retained = 0;
    int index = 0;
};

struct Module {
    int device;
    const char *(*signature)(const char *);
    const char *(*run)(const char *, unsigned, unsigned, void *const *, int);
};

struct Function {
    Module *module;
    std::string name, letters;
    // Bytes of each parameter.
    std::vector<std::size_t> sizes;
};

struct Exec {
    std::shared_ptr<const Nodes> nodes;
};

const int MOST_GPUS = 8;

// A GPU that a program sees.
struct Visible {
    int device;
    unsigned char uuid[16];
};

// Held by whoever is in a call. Calls are made of calls, and whoever waits in one lets others in for a moment.
class Turn {
public:
    void lock() { mutex.lock(), depth++; }

    void unlock() { depth--, mutex.unlock(); }

    void let_others() {
        const int held = depth;
        for (int i = 0; i < held; i++) unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(20));
        for (int i = 0; i < held; i++) lock();
    }

private:
    std::recursive_mutex mutex;
    int depth = 0;
};

struct Fake {
    Turn mutex;
    bool is_up = false;
    int n_gpus = 2;
    // What CUDA_VISIBLE_DEVICES leaves of them, in its order; read when the driver is initialised.
    std::vector<Visible> visible;
    Gpu gpus[MOST_GPUS];
    Journal journal;
    Streams streams;
    Chance garbage;
    std::set<std::shared_ptr<Event>> events;
    std::set<Module *> modules;
    std::set<Function *> functions;
    std::set<Nodes *> graphs;
    std::set<Exec *> execs;
    std::map<void *, std::size_t> pinned;
    std::vector<std::shared_ptr<Capture>> captures;
};

// Never taken down: its destructors would run while others still call it.
Fake &fake = *new Fake;

thread_local Gpu *current = nullptr;
// The mode of cuThreadExchangeStreamCaptureMode.
enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
thread_local int own_mode = GLOBAL;

using Lock = std::lock_guard<Turn>;

// Which call's work comes upon memory that isn't there once it is done: PHALANX_FAKE_ILLEGAL="FUNCTION NTH", or as a test says.
struct Illegal {
    std::string function;
    long left = 0;

    Illegal() {
        if (const char *told = std::getenv("PHALANX_FAKE_ILLEGAL")) std::istringstream(told) >> function >> left;
    }

    bool is(const char *name) { return name == function && --left == 0; }
};

Illegal illegal;
// Whether the next work that this thread gives a stream is such.
thread_local bool next_is_illegal = false;

// A call that needs nothing.
template <class Body> int plain(const char *name, Body body) {
    Lock lock(fake.mutex);
    if (int code = fake.journal.called(name)) return code;
    if (illegal.is(name)) next_is_illegal = true;
    return body();
}

// A call that needs cuInit.
template <class Body> int after_init(const char *name, Body body) {
    return plain(name, [&] { return fake.is_up ? (int)body() : (int)NOT_INITIALIZED; });
}

// A GPU meets this once that file is there, whoever uses it: PHALANX_FAKE_FAULT="GPU CODE FILE".
struct Fault {
    int gpu = -1, code = 0;
    std::string file;

    Fault() {
        if (const char *told = std::getenv("PHALANX_FAKE_FAULT")) std::istringstream(told) >> gpu >> code >> file;
    }

    bool is_met_by(const Gpu &other) const { return other.index == gpu && std::ifstream(file).good(); }
};

const Fault fault;

// A call that needs a current context, and gives the error that the GPU has met.
template <class Body> int in_context(const char *name, Body body) {
    return after_init(name, [&] {
        if (!current || !current->retained) return (int)INVALID_CONTEXT;
        if (!current->met && fault.is_met_by(*current)) current->met = fault.code;
        if (current->met) return current->met;
        return (int)body();
    });
}

bool is_stream(Stream *stream) { return fake.streams.all.count(stream) != 0; }

std::shared_ptr<Event> event_of(Event *event) {
    for (const auto &known : fake.events) {
        if (known.get() == event) return known;
    }
    return nullptr;
}

// A call about a stream.
template <class Body> int on_stream(const char *name, Stream *stream, Body body) {
    return in_context(name, [&] {
        if (!is_stream(stream) || fake.gpus + stream->device != current) return (int)INVALID_HANDLE;
        return (int)body();
    });
}

// What is refused to a thread that captures, unless it says that it knows what it does.
template <class Body> int not_in_capture(const char *name, Body body) {
    return in_context(name, [&] {
        bool refused = false;
        for (const auto &capture : fake.captures) {
            const bool own = capture->thread == std::this_thread::get_id() && capture->mode != RELAXED;
            const bool of_another = capture->mode == GLOBAL && own_mode == GLOBAL;
            if (own_mode == RELAXED || !(own || of_another)) continue;
            capture->is_invalid = true;
            refused = true;
        }
        return refused ? (int)STREAM_CAPTURE_UNSUPPORTED : (int)body();
    });
}

// A call that waits for a stream or looks at it.
template <class Body> int looking(const char *name, Stream *stream, Body body) {
    return not_in_capture(name, [&] {
        if (!is_stream(stream) || fake.gpus + stream->device != current) return (int)INVALID_HANDLE;
        if (stream->capture) {
            stream->capture->is_invalid = true;
            return (int)STREAM_CAPTURE_UNSUPPORTED;
        }
        return (int)body();
    });
}

// A call that waits for an event or looks at it.
template <class Body> int about_event(const char *name, Event *which, Body body) {
    Lock lock(fake.mutex);
    const auto event = event_of(which);
    if (event && event->capture) return in_context(name, [&] { return event->capture->is_invalid = true, (int)CAPTURED_EVENT; });
    return not_in_capture(name, [&] { return event ? (int)body(event) : (int)INVALID_HANDLE; });
}

// What the streams' work has met, or `otherwise`.
int met_or(Gpu &gpu, int otherwise) { return gpu.met ? gpu.met : otherwise; }

// Lets streams go on until it is so; false where nothing is left that could bring it about. What they wait for may come from
// other threads.
template <class Reached> bool until(Reached reached) {
    while (!reached()) {
        const Step step = fake.streams.step();
        if (step == Step::NOTHING) return false;
        if (step == Step::WAITS) fake.mutex.let_others();
    }
    return true;
}

void wrong(Gpu &gpu, int code, const std::string &what) {
    fake.journal.damage.push_back(what);
    if (!gpu.met) gpu.met = code;
}

// Gives a stream some work, or its capture a node.
int put_work(Stream *stream, Work work) {
    if (next_is_illegal) {
        next_is_illegal = false;
        Gpu *gpu = fake.gpus + stream->device;
        work = [gpu] { return wrong(*gpu, ILLEGAL_ADDRESS, "an access to memory that isn't there, as told"), true; };
    }
    if (stream->capture) {
        Capture &capture = *stream->capture;
        if (capture.is_invalid) return STREAM_CAPTURE_INVALIDATED;
        capture.nodes.push_back({std::move(work), stream->tail});
        stream->tail = {(int)capture.nodes.size() - 1};
        return SUCCESS;
    }
    stream->queue.push_back({nullptr, [work] { return work() ? Step::DONE : Step::WAITS; }});
    // A real queue isn't endless, either.
    while (stream->queue.size() > 4096 && fake.streams.step() == Step::PART) {
    }
    return SUCCESS;
}

// The same for what is done at once.
template <class Body> int put(Stream *stream, Body body) {
    return put_work(stream, [body] { return body(), true; });
}

std::string own_folder() {
    Dl_info info;
    dladdr((void *)&own_folder, &info);
    const std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

}  // namespace

// A function that the library exports.
#define API extern "C" __attribute__((visibility("default")))
