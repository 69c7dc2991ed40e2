// A driver without a GPU: the functions of libcuda that this project calls, over the host's memory, and functions `fake_*` by
// which tests look into it. It does what CUDA's manual says, as late as that allows, and refuses what the manual forbids.
#include "codes.h"
#include "journal.h"
#include "memory.h"
#include "streams.h"

#include <dlfcn.h>

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
    std::set<std::string> names;
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

struct Fake {
    std::recursive_mutex mutex;
    bool is_up = false;
    int n_gpus = 2;
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

using Lock = std::lock_guard<std::recursive_mutex>;

// A call that needs nothing.
template <class Body> int plain(const char *name, Body body) {
    Lock lock(fake.mutex);
    if (int code = fake.journal.called(name)) return code;
    return body();
}

// A call that needs cuInit.
template <class Body> int after_init(const char *name, Body body) {
    return plain(name, [&] { return fake.is_up ? (int)body() : (int)NOT_INITIALIZED; });
}

// A call that needs a current context, and gives the error that the GPU has met.
template <class Body> int in_context(const char *name, Body body) {
    return after_init(name, [&] {
        if (!current || !current->retained) return (int)INVALID_CONTEXT;
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

// Gives a stream some work, or its capture a node.
int put(Stream *stream, Work work) {
    if (stream->capture) {
        Capture &capture = *stream->capture;
        if (capture.is_invalid) return STREAM_CAPTURE_INVALIDATED;
        capture.nodes.push_back({std::move(work), stream->tail});
        stream->tail = {(int)capture.nodes.size() - 1};
        return SUCCESS;
    }
    stream->queue.push_back({nullptr, [work] { return work(), true; }});
    // A real queue isn't endless, either.
    while (stream->queue.size() > 4096 && fake.streams.step()) {
    }
    return SUCCESS;
}

void wrong(Gpu &gpu, int code, const std::string &what) {
    fake.journal.damage.push_back(what);
    if (!gpu.met) gpu.met = code;
}

std::string own_folder() {
    Dl_info info;
    dladdr((void *)&own_folder, &info);
    const std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

// --- kernels

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

#define API extern "C" __attribute__((visibility("default")))

// --- the driver and its GPUs

API int cuInit(unsigned) {
    return plain("cuInit", [] {
        fake.is_up = true;
        return fake.n_gpus ? SUCCESS : NO_DEVICE;
    });
}

API int cuDriverGetVersion(int *version) {
    return plain("cuDriverGetVersion", [&] { return *version = 13000, SUCCESS; });
}

API int cuGetErrorName(int code, const char **name) {
    for (const Words &words : WORDS) {
        if (words.code == code) return *name = words.name, SUCCESS;
    }
    return *name = nullptr, INVALID_VALUE;
}

API int cuGetErrorString(int code, const char **meaning) {
    for (const Words &words : WORDS) {
        if (words.code == code) return *meaning = words.meaning, SUCCESS;
    }
    return *meaning = nullptr, INVALID_VALUE;
}

API int cuDeviceGetCount(int *count) {
    return after_init("cuDeviceGetCount", [&] { return *count = fake.n_gpus, SUCCESS; });
}

API int cuDeviceGet(int *device, int ordinal) {
    return after_init("cuDeviceGet", [&] {
        *device = ordinal;
        return ordinal >= 0 && ordinal < fake.n_gpus ? SUCCESS : INVALID_DEVICE;
    });
}

API int cuDeviceGetName(char *name, int length, int device) {
    return after_init("cuDeviceGetName", [&] {
        std::strncpy(name, "Fake GPU", (std::size_t)length);
        return device < fake.n_gpus ? SUCCESS : INVALID_DEVICE;
    });
}

API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return after_init("cuDeviceGetAttribute", [&] {
        if (device >= fake.n_gpus) return INVALID_DEVICE;
        switch (attribute) {
            case 16: return *value = 132, SUCCESS;
            case 75: return *value = 9, SUCCESS;
            case 76: return *value = 0, SUCCESS;
        }
        return INVALID_VALUE;
    });
}

API int cuDevicePrimaryCtxRetain(Gpu **context, int device) {
    return after_init("cuDevicePrimaryCtxRetain", [&] {
        if (device < 0 || device >= fake.n_gpus) return INVALID_DEVICE;
        *context = fake.gpus + device;
        (*context)->index = device;
        (*context)->retained++;
        return SUCCESS;
    });
}

API int cuDevicePrimaryCtxRelease_v2(int device) {
    return after_init("cuDevicePrimaryCtxRelease_v2", [&] {
        if (!fake.gpus[device].retained) return INVALID_CONTEXT;
        fake.gpus[device].retained--;
        return SUCCESS;
    });
}

API int cuCtxSetCurrent(Gpu *context) {
    return after_init("cuCtxSetCurrent", [&] { return current = context, SUCCESS; });
}

API int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    return in_context("cuCtxGetStreamPriorityRange", [&] { return *least = 0, *greatest = -5, SUCCESS; });
}

API int cuCtxSynchronize() {
    return in_context("cuCtxSynchronize", [] {
        Gpu *gpu = current;
        bool is_captured = false;
        for (const auto &capture : fake.captures) {
            if (fake.gpus + capture->origin->device == gpu) is_captured = capture->is_invalid = true;
        }
        if (is_captured) return (int)STREAM_CAPTURE_UNSUPPORTED;
        while (fake.streams.step()) {
        }
        return met_or(*gpu, SUCCESS);
    });
}

// --- memory

API int cuMemGetInfo_v2(std::size_t *free, std::size_t *total) {
    return in_context("cuMemGetInfo_v2", [&] {
        *free = current->memory.limit - current->memory.used;
        *total = current->memory.limit;
        return SUCCESS;
    });
}

API int cuMemAlloc_v2(std::uint64_t *at, std::size_t bytes) {
    return not_in_capture("cuMemAlloc_v2", [&] {
        if (!bytes) return INVALID_VALUE;
        *at = current->memory.allocate(bytes, fake.garbage);
        return *at ? SUCCESS : OUT_OF_MEMORY;
    });
}

// The real one may wait for work that still uses it, or not.
API int cuMemFree_v2(std::uint64_t at) {
    return not_in_capture("cuMemFree_v2", [&] {
        if (!current->memory.is_whole(at)) fake.journal.damage.push_back("somebody has written beside memory that is now freed");
        return current->memory.free(at) ? SUCCESS : INVALID_VALUE;
    });
}

API int cuMemHostAlloc(void **at, std::size_t bytes, unsigned) {
    return not_in_capture("cuMemHostAlloc", [&] {
        *at = std::malloc(bytes);
        std::memset(*at, 0x5c, bytes);
        fake.pinned[*at] = bytes;
        return SUCCESS;
    });
}

API int cuMemFreeHost(void *at) {
    return not_in_capture("cuMemFreeHost", [&] {
        const auto found = fake.pinned.find(at);
        if (found == fake.pinned.end()) return INVALID_VALUE;
        // It stays mapped, so that work that still uses it finds nonsense and does no harm.
        std::memset(at, 0xdd, found->second);
        fake.pinned.erase(found);
        return SUCCESS;
    });
}

API int cuMemcpyHtoDAsync_v2(std::uint64_t to, const void *from, std::size_t bytes, Stream *stream) {
    return on_stream("cuMemcpyHtoDAsync_v2", stream, [&] {
        Gpu *gpu = current;
        if (!gpu->memory.holds(to, bytes)) return (int)INVALID_VALUE;
        fake.journal.bytes_up += bytes;
        return put(stream, [=] {
            if (!gpu->memory.holds(to, bytes)) return wrong(*gpu, ILLEGAL_ADDRESS, "a copy to memory that is freed");
            std::memcpy((void *)to, from, bytes);
        });
    });
}

API int cuMemcpyDtoHAsync_v2(void *to, std::uint64_t from, std::size_t bytes, Stream *stream) {
    return on_stream("cuMemcpyDtoHAsync_v2", stream, [&] {
        Gpu *gpu = current;
        if (!gpu->memory.holds(from, bytes)) return (int)INVALID_VALUE;
        fake.journal.bytes_down += bytes;
        return put(stream, [=] {
            if (!gpu->memory.holds(from, bytes)) return wrong(*gpu, ILLEGAL_ADDRESS, "a copy of memory that is freed");
            std::memcpy(to, (const void *)from, bytes);
        });
    });
}

API int cuMemcpyDtoDAsync_v2(std::uint64_t to, std::uint64_t from, std::size_t bytes, Stream *stream) {
    return on_stream("cuMemcpyDtoDAsync_v2", stream, [&] {
        Gpu *gpu = current;
        if (!gpu->memory.holds(from, bytes) || !gpu->memory.holds(to, bytes)) return (int)INVALID_VALUE;
        fake.journal.bytes_across += bytes;
        return put(stream, [=] {
            if (!gpu->memory.holds(from, bytes) || !gpu->memory.holds(to, bytes)) {
                return wrong(*gpu, ILLEGAL_ADDRESS, "a copy of memory that is freed");
            }
            std::memmove((void *)to, (const void *)from, bytes);
        });
    });
}

API int cuMemsetD8Async(std::uint64_t at, unsigned char value, std::size_t bytes, Stream *stream) {
    return on_stream("cuMemsetD8Async", stream, [&] {
        Gpu *gpu = current;
        if (!gpu->memory.holds(at, bytes)) return (int)INVALID_VALUE;
        return put(stream, [=] {
            if (!gpu->memory.holds(at, bytes)) return wrong(*gpu, ILLEGAL_ADDRESS, "a fill of memory that is freed");
            std::memset((void *)at, value, bytes);
        });
    });
}

// --- streams

API int cuStreamCreateWithPriority(Stream **stream, unsigned flags, int) {
    return in_context("cuStreamCreateWithPriority", [&] {
        // Only streams that don't wait for the default stream are known here.
        if (flags != 1) return INVALID_VALUE;
        *stream = new Stream{current->index, {}, nullptr, {}};
        fake.streams.add(*stream);
        return SUCCESS;
    });
}

// What it was given is still carried out, whenever that may be.
API int cuStreamDestroy_v2(Stream *stream) {
    return on_stream("cuStreamDestroy_v2", stream, [&] {
        fake.streams.remove(stream);
        return SUCCESS;
    });
}

API int cuStreamSynchronize(Stream *stream) {
    return looking("cuStreamSynchronize", stream, [&] {
        Gpu *gpu = current;
        if (!fake.streams.until([&] { return stream->queue.empty(); })) return (int)UNKNOWN;
        return met_or(*gpu, SUCCESS);
    });
}

API int cuStreamQuery(Stream *stream) {
    return looking("cuStreamQuery", stream, [&] {
        fake.streams.step();
        return met_or(*current, stream->queue.empty() ? SUCCESS : NOT_READY);
    });
}

API int cuStreamIsCapturing(Stream *stream, int *status) {
    return on_stream("cuStreamIsCapturing", stream, [&] {
        *status = !stream->capture ? 0 : stream->capture->is_invalid ? 2 : 1;
        return SUCCESS;
    });
}

// --- events

API int cuEventCreate(Event **event, unsigned flags) {
    return in_context("cuEventCreate", [&] {
        const auto made = std::make_shared<Event>(Event{!(flags & 2), nullptr, nullptr, {}});
        fake.events.insert(made);
        *event = made.get();
        return SUCCESS;
    });
}

API int cuEventDestroy_v2(Event *event) {
    return in_context("cuEventDestroy_v2", [&] { return fake.events.erase(event_of(event)) ? SUCCESS : INVALID_HANDLE; });
}

API int cuEventRecord(Event *which, Stream *stream) {
    return on_stream("cuEventRecord", stream, [&] {
        const auto event = event_of(which);
        if (!event) return (int)INVALID_HANDLE;
        if (stream->capture) {
            if (stream->capture->is_invalid) return (int)STREAM_CAPTURE_INVALIDATED;
            event->capture = stream->capture;
            event->tail = stream->tail;
            return (int)SUCCESS;
        }
        const auto mark = std::make_shared<Mark>();
        event->capture = nullptr;
        event->mark = mark;
        return put(stream, [mark] {
            mark->is_done = true;
            mark->ms = fake.streams.ms;
        });
    });
}

API int cuStreamWaitEvent(Stream *stream, Event *which, unsigned) {
    return on_stream("cuStreamWaitEvent", stream, [&] {
        const auto event = event_of(which);
        if (!event) return (int)INVALID_HANDLE;
        if (stream->capture && stream->capture->is_invalid) return (int)STREAM_CAPTURE_INVALIDATED;
        if (event->capture) {
            if (event->capture->is_invalid) return (int)STREAM_CAPTURE_INVALIDATED;
            if (stream->capture && stream->capture != event->capture) {
                stream->capture->is_invalid = event->capture->is_invalid = true;
                return (int)STREAM_CAPTURE_MERGE;
            }
            if (!stream->capture) {
                stream->capture = event->capture;
                stream->capture->joined.insert(stream);
                stream->tail.clear();
            }
            stream->tail.insert(stream->tail.end(), event->tail.begin(), event->tail.end());
            return (int)SUCCESS;
        }
        if (!event->mark) return (int)SUCCESS;
        if (stream->capture) {
            stream->capture->is_invalid = true;
            return (int)STREAM_CAPTURE_ISOLATION;
        }
        stream->queue.push_back({event->mark, [] { return true; }});
        return (int)SUCCESS;
    });
}

API int cuEventQuery(Event *which) {
    return about_event("cuEventQuery", which, [&](const std::shared_ptr<Event> &event) {
        fake.streams.step();
        return met_or(*current, !event->mark || event->mark->is_done ? SUCCESS : NOT_READY);
    });
}

API int cuEventSynchronize(Event *which) {
    return about_event("cuEventSynchronize", which, [&](const std::shared_ptr<Event> &event) {
        Gpu *gpu = current;
        if (event->mark && !fake.streams.until([&] { return event->mark->is_done; })) return (int)UNKNOWN;
        return met_or(*gpu, SUCCESS);
    });
}

API int cuEventElapsedTime_v2(float *ms, Event *start, Event *end) {
    return in_context("cuEventElapsedTime_v2", [&] {
        const auto from = event_of(start), to = event_of(end);
        if (!from || !to || !from->has_time || !to->has_time || !from->mark || !to->mark) return INVALID_HANDLE;
        if (!from->mark->is_done || !to->mark->is_done) return NOT_READY;
        *ms = (float)(to->mark->ms - from->mark->ms);
        return SUCCESS;
    });
}

// --- modules and launches

API int cuModuleLoadData(Module **module, const void *image) {
    return not_in_capture("cuModuleLoadData", [&] {
        std::istringstream text((const char *)image);
        std::string magic, file, element, architecture;
        text >> magic >> file >> element >> architecture;
        if (magic != "fake-cubin") return INVALID_IMAGE;
        if (architecture != "sm_90") return NO_BINARY_FOR_GPU;
        std::string folder;
        std::getline(std::ifstream(own_folder() + "/modules") >> std::ws, folder);
        void *library = dlopen((folder + "/" + file + "-" + element + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) return FILE_NOT_FOUND;
        *module = new Module{current->index, nullptr, nullptr, {}};
        (*module)->signature = (const char *(*)(const char *))dlsym(library, "module_signature");
        (*module)->run = (const char *(*)(const char *, unsigned, unsigned, void *const *, int))dlsym(library, "module_run");
        fake.modules.insert(*module);
        return SUCCESS;
    });
}

API int cuModuleUnload(Module *module) {
    return not_in_capture("cuModuleUnload", [&] {
        if (!fake.modules.erase(module)) return INVALID_HANDLE;
        for (auto function = fake.functions.begin(); function != fake.functions.end();) {
            const bool is_its = (*function)->module == module;
            if (is_its) delete *function;
            function = is_its ? fake.functions.erase(function) : std::next(function);
        }
        // The thing itself stays: a launch that comes too late finds out by its address.
        return SUCCESS;
    });
}

API int cuModuleGetFunction(Function **function, Module *module, const char *name) {
    return not_in_capture("cuModuleGetFunction", [&] {
        if (!fake.modules.count(module)) return INVALID_HANDLE;
        const char *letters = module->signature(name);
        if (!letters) return NOT_FOUND;
        *function = new Function{module, name, letters, sizes_of(letters)};
        fake.functions.insert(*function);
        return SUCCESS;
    });
}

API int cuLaunchKernel(Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                       Stream *stream, void **parameters, void **extra) {
    return on_stream("cuLaunchKernel", stream, [&] {
        if (!fake.functions.count(function) || function->module->device != stream->device) return (int)INVALID_HANDLE;
        const bool one_dimension = gy == 1 && gz == 1 && by == 1 && bz == 1 && !shared && !extra;
        if (!one_dimension || !gx || !bx || bx > 1024) return (int)INVALID_VALUE;
        auto launch = std::make_shared<Launch>(Launch{current, *function, gx, bx, {}});
        for (std::size_t i = 0; i < function->sizes.size(); i++) {
            const char *from = (const char *)parameters[i];
            launch->arguments.emplace_back(from, from + function->sizes[i]);
        }
        fake.journal.write("launch " + function->name);
        return put(stream, [launch] { launch->run(); });
    });
}

// --- graphs

API int cuThreadExchangeStreamCaptureMode(int *mode) {
    return plain("cuThreadExchangeStreamCaptureMode", [&] { return std::swap(*mode, own_mode), SUCCESS; });
}

API int cuStreamBeginCapture_v2(Stream *stream, int mode) {
    return on_stream("cuStreamBeginCapture_v2", stream, [&] {
        if (stream->capture) return ILLEGAL_STATE;
        stream->capture = std::make_shared<Capture>();
        stream->capture->origin = stream;
        stream->capture->thread = std::this_thread::get_id();
        stream->capture->mode = mode;
        stream->capture->joined.insert(stream);
        stream->tail.clear();
        fake.captures.push_back(stream->capture);
        return SUCCESS;
    });
}

API int cuStreamEndCapture(Stream *stream, Nodes **graph) {
    return on_stream("cuStreamEndCapture", stream, [&] {
        *graph = nullptr;
        const auto capture = stream->capture;
        if (!capture || capture->origin != stream) return ILLEGAL_STATE;
        if (capture->mode != RELAXED && capture->thread != std::this_thread::get_id()) {
            return capture->is_invalid = true, STREAM_CAPTURE_WRONG_THREAD;
        }
        const std::set<int> joined = ancestors(capture->nodes, stream->tail);
        bool is_joined = true;
        for (Stream *other : capture->joined) {
            for (int node : other->tail) is_joined = is_joined && joined.count(node);
            other->capture = nullptr;
            other->tail.clear();
        }
        for (std::size_t i = fake.captures.size(); i-- > 0;) {
            if (fake.captures[i] == capture) fake.captures.erase(fake.captures.begin() + (long)i);
        }
        if (capture->is_invalid) return STREAM_CAPTURE_INVALIDATED;
        if (!is_joined) return STREAM_CAPTURE_UNJOINED;
        *graph = new Nodes(capture->nodes);
        fake.graphs.insert(*graph);
        return SUCCESS;
    });
}

API int cuGraphDestroy(Nodes *graph) {
    return in_context("cuGraphDestroy", [&] {
        if (!fake.graphs.erase(graph)) return INVALID_HANDLE;
        delete graph;
        return SUCCESS;
    });
}

API int cuGraphInstantiateWithFlags(Exec **exec, Nodes *graph, unsigned long long) {
    return not_in_capture("cuGraphInstantiateWithFlags", [&] {
        if (!fake.graphs.count(graph)) return INVALID_HANDLE;
        *exec = new Exec{std::make_shared<const Nodes>(*graph)};
        fake.execs.insert(*exec);
        return SUCCESS;
    });
}

API int cuGraphExecDestroy(Exec *exec) {
    return in_context("cuGraphExecDestroy", [&] {
        if (!fake.execs.erase(exec)) return INVALID_HANDLE;
        delete exec;
        return SUCCESS;
    });
}

API int cuGraphLaunch(Exec *exec, Stream *stream) {
    return on_stream("cuGraphLaunch", stream, [&] {
        if (!fake.execs.count(exec)) return (int)INVALID_HANDLE;
        if (stream->capture) return stream->capture->is_invalid = true, (int)STREAM_CAPTURE_UNSUPPORTED;
        const auto run = std::make_shared<Run>(exec->nodes);
        stream->queue.push_back({nullptr, [run] { return run->step(fake.streams.chance); }});
        return (int)SUCCESS;
    });
}

// --- what tests ask

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
