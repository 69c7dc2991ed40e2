// A stand-in for cuDNN's graph API: descriptors are attributes by number, a finalized graph is a list of operations over strided
// tensors, and running it is plain loops in float64.
//
// The heuristic proposes engines that must not be taken before those that may be: one that can't do it after all, one whose
// results differ from run to run, one that rounds float32 factors as a tensor core does, and a plain one. The thorough heuristic has
// a plain one as well, which needs less memory, and the last one another, which needs none.

#include "fake.h"

#include <algorithm>
#include <memory>

using fake::called;

namespace {

enum Status { OK = 0, BAD_PARAM = 2000, NOT_FINALIZED = 2004, TYPE_ERROR = 2010, NOT_SUPPORTED = 3000, PATTERN = 3001, SHAPE = 3002, EXECUTION = 5000 };
enum Data { F32 = 0, F16 = 2, BF16 = 9 };
enum AttributeType { HANDLE, DATA_TYPE, BOOLEAN, INT64, FLOAT, DOUBLE, VOID_PTR, CONVOLUTION_MODE, HEUR_MODE, NOTE = 11, POINTWISE_MODE = 14, DESCRIPTOR = 15 };
enum Kind { POINTWISE, CONVOLUTION, ENGINE, ENGINE_CONFIG, ENGINE_HEUR, PLAN, FORWARD = 10, BACKWARD_FILTER, BACKWARD_DATA, OP_POINTWISE, GRAPH = 15, PACK, TENSOR };

struct Tensor {
    int64_t id, sizes[4], strides[4], alignment;
    int type;
    bool passed_on;
};

struct Operation {
    int kind, mode = 0;
    Tensor x, w, y; // Images, kernels and outputs; of element by element: what is read, what is added, what is written.
    bool has_b = false;
    int64_t stride[2], padding[2], dilation[2];
};

using Graph = std::vector<Operation>;

struct Engine {
    std::vector<int> notes;
    int64_t workspace;
    bool works;
};

const Engine ENGINES[] = {{{}, 64, false}, {{0, 4}, 128, true}, {{0}, 2048, true}, {{1}, 0, true}, {{}, 512, true}, {{}, 0, true}, {{}, 16, true}};
const std::vector<int> OF_MODE_A = {0, 1, 2, 3, 4}, OF_MODE_B = {2, 6}, OF_FALLBACK = {5};

struct Descriptor {
    int kind;
    bool finalized = false;
    std::map<int, std::pair<int, std::vector<char>>> attributes;
    std::shared_ptr<Graph> graph; // Of graphs and what comes of them.
    int engine = -1;
};

thread_local std::string last;

int refuse(int code, const std::string &words) {
    last = words;
    return code;
}

struct Missing {
    int name;
};

template <class T> std::vector<T> all(const Descriptor *of, int name, int type) {
    auto found = of->attributes.find(name);
    if (found == of->attributes.end() || found->second.first != type) throw Missing{name};
    std::vector<T> values(found->second.second.size() / sizeof(T));
    memcpy(values.data(), found->second.second.data(), values.size() * sizeof(T));
    return values;
}

template <class T> T one(const Descriptor *of, int name, int type) {
    auto values = all<T>(of, name, type);
    if (values.size() != 1) throw Missing{name};
    return values[0];
}

// A descriptor that another one has.
Descriptor *part(const Descriptor *of, int name, int kind) {
    auto *found = one<Descriptor *>(of, name, DESCRIPTOR);
    if (found->kind != kind || !found->finalized) throw Missing{name};
    return found;
}

size_t size_of(int type) { return type == INT64 || type == DOUBLE || type == VOID_PTR || type == HANDLE || type == DESCRIPTOR ? 8 : type == BOOLEAN ? 1 : 4; }

Tensor tensor(const Descriptor *of) {
    Tensor t;
    t.id = one<int64_t>(of, 906, INT64);
    t.type = one<int>(of, 901, DATA_TYPE);
    t.alignment = one<int64_t>(of, 900, INT64);
    t.passed_on = one<char>(of, 907, BOOLEAN);
    auto sizes = all<int64_t>(of, 902, INT64), strides = all<int64_t>(of, 903, INT64);
    if (sizes.size() != 4 || strides.size() != 4) throw Missing{902};
    std::copy(sizes.begin(), sizes.end(), t.sizes);
    std::copy(strides.begin(), strides.end(), t.strides);
    return t;
}

Operation operation(const Descriptor *of) {
    Operation op{};
    op.kind = of->kind;
    if (of->kind == OP_POINTWISE) {
        auto *mode = part(of, 750, POINTWISE);
        op.mode = one<int>(mode, 0, POINTWISE_MODE);
        one<int>(mode, 1, DATA_TYPE);
        op.x = tensor(part(of, 751, TENSOR));
        op.has_b = of->attributes.count(752);
        if (op.has_b) op.w = tensor(part(of, 752, TENSOR));
        op.y = tensor(part(of, 753, TENSOR));
        if (op.has_b != (op.mode == 0)) throw Missing{752};
        return op;
    }
    int base = of->kind == FORWARD ? 700 : of->kind == BACKWARD_DATA ? 706 : 712;
    // Where images, kernels and outputs stand among the attributes of each.
    int at[3] = {4, 3, 5};
    if (one<float>(of, base, FLOAT) != 1 || one<float>(of, base + 1, FLOAT) != 0) throw Missing{base};
    auto *convolution = part(of, base + 2, CONVOLUTION);
    op.x = tensor(part(of, base + at[0], TENSOR));
    op.w = tensor(part(of, base + at[1], TENSOR));
    op.y = tensor(part(of, base + at[2], TENSOR));
    auto pair = [&](int name, int64_t *to) {
        auto values = all<int64_t>(convolution, name, INT64);
        if (values.size() != 2) throw Missing{name};
        std::copy(values.begin(), values.end(), to);
    };
    pair(103, op.stride), pair(105, op.padding), pair(102, op.dilation);
    if (all<int64_t>(convolution, 104, INT64) != all<int64_t>(convolution, 105, INT64)) throw Missing{104};
    if (one<int>(convolution, 101, CONVOLUTION_MODE) != 1 || one<int>(convolution, 100, DATA_TYPE) != F32) throw Missing{101};
    if (one<int64_t>(convolution, 106, INT64) != 2) throw Missing{106};
    for (int d = 0; d < 2; d++) {
        int64_t reach = op.dilation[d] * (op.w.sizes[2 + d] - 1) + 1;
        if (op.y.sizes[2 + d] != (op.x.sizes[2 + d] + 2 * op.padding[d] - reach) / op.stride[d] + 1) throw Missing{base + 5};
    }
    bool channels = op.x.sizes[1] % op.w.sizes[1] == 0 && op.y.sizes[1] == op.w.sizes[0] && op.x.sizes[0] == op.y.sizes[0];
    if (!channels || op.y.sizes[1] % (op.x.sizes[1] / op.w.sizes[1])) throw Missing{base + 3};
    return op;
}

// Numbers of a tensor, in memory or passed on from one operation to the next.
struct Memory {
    std::map<int64_t, char *> given;
    std::map<int64_t, std::vector<double>> passed_on;
    bool rounds = false;

    static int64_t span(const Tensor &t) {
        int64_t last = 0;
        for (int d = 0; d < 4; d++) last += (t.sizes[d] - 1) * t.strides[d];
        return last + 1;
    }

    double get(const Tensor &t, int64_t at) {
        if (t.passed_on) return passed_on[t.id][at];
        const char *from = given[t.id];
        float x;
        uint16_t half;
        if (t.type == F32) memcpy(&x, from + 4 * at, 4);
        else memcpy(&half, from + 2 * at, 2), x = t.type == F16 ? fake::from_f16(half) : fake::from_bf16(half);
        if (rounds && t.type == F32) {
            uint32_t bits;
            memcpy(&bits, &x, 4);
            bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
            memcpy(&x, &bits, 4);
        }
        return x;
    }

    void put(const Tensor &t, int64_t at, double value) {
        if (t.passed_on) {
            passed_on[t.id].resize(span(t));
            passed_on[t.id][at] = value;
            return;
        }
        float x = float(value);
        uint16_t half = t.type == F16 ? fake::to_f16(x) : fake::to_bf16(x);
        if (t.type == F32) memcpy(given[t.id] + 4 * at, &x, 4);
        else memcpy(given[t.id] + 2 * at, &half, 2);
    }
};

int64_t at(const Tensor &t, int64_t n, int64_t c, int64_t h, int64_t w) {
    const int64_t i[4] = {n, c, h, w};
    int64_t sum = 0;
    for (int d = 0; d < 4; d++) sum += t.sizes[d] == 1 ? 0 : i[d] * t.strides[d];
    return sum;
}

template <class F> void each(const Tensor &t, F &&f) {
    for (int64_t n = 0; n < t.sizes[0]; n++)
    for (int64_t c = 0; c < t.sizes[1]; c++)
    for (int64_t h = 0; h < t.sizes[2]; h++)
    for (int64_t w = 0; w < t.sizes[3]; w++) f(n, c, h, w);
}

void add(double *__restrict to, double factor, const double *__restrict row, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] += factor * row[i];
}

// All three passes add a row of numbers, times one, to a row. Numbers are copied first, so that each row lies in one piece: images and
// outputs are [n][h][w][channel], kernels [group][h][w][input][output], and [output][input] where images are wanted.
void convolve(const Operation &op, Memory &memory) {
    const bool images = op.kind == BACKWARD_DATA;
    const Tensor &to = op.kind == FORWARD ? op.y : images ? op.x : op.w;
    const int64_t height = op.x.sizes[2], width = op.x.sizes[3], rows = op.y.sizes[2], columns = op.y.sizes[3], across = op.w.sizes[3];
    const int64_t per = op.w.sizes[1], groups = op.x.sizes[1] / per, outputs = op.y.sizes[1] / groups;
    std::vector<double> x, w, y;
    auto at_x = [&](int64_t n, int64_t c, int64_t h, int64_t w) { return ((n * height + h) * width + w) * groups * per + c; };
    auto at_y = [&](int64_t n, int64_t c, int64_t h, int64_t w) { return ((n * rows + h) * columns + w) * groups * outputs + c; };
    auto at_w = [&](int64_t o, int64_t i, int64_t h, int64_t w) {
        const int64_t pixel = (o / outputs * op.w.sizes[2] + h) * across + w, output = o % outputs;
        return pixel * per * outputs + (images ? output * per + i : i * outputs + output);
    };
    auto copy = [&](const Tensor &t, std::vector<double> &numbers, auto &&where) {
        numbers.resize(t.sizes[0] * t.sizes[1] * t.sizes[2] * t.sizes[3]);
        if (&t == &to) return;
        each(t, [&](auto... i) { numbers[where(i...)] = memory.get(t, at(t, i...)); });
    };
    copy(op.x, x, at_x), copy(op.w, w, at_w), copy(op.y, y, at_y);
    for (int64_t n = 0; n < op.y.sizes[0]; n++)
    for (int64_t h = 0; h < rows; h++)
    for (int64_t v = 0; v < columns; v++)
    for (int64_t kh = 0; kh < op.w.sizes[2]; kh++)
    for (int64_t kw = 0; kw < across; kw++) {
        int64_t row = h * op.stride[0] + kh * op.dilation[0] - op.padding[0], column = v * op.stride[1] + kw * op.dilation[1] - op.padding[1];
        if (row < 0 || column < 0 || row >= height || column >= width) continue;
        for (int64_t g = 0; g < groups; g++) {
            double *xs = &x[at_x(n, g * per, row, column)], *ws = &w[at_w(g * outputs, 0, kh, kw)], *ys = &y[at_y(n, g * outputs, h, v)];
            if (images) for (int64_t o = 0; o < outputs; o++) add(xs, ys[o], ws + o * per, per);
            else if (op.kind == FORWARD) for (int64_t i = 0; i < per; i++) add(ys, xs[i], ws + i * outputs, outputs);
            else for (int64_t i = 0; i < per; i++) add(ws + i * outputs, xs[i], ys, outputs);
        }
    }
    auto put = [&](const std::vector<double> &numbers, auto &&where) {
        each(to, [&](auto... i) { memory.put(to, at(to, i...), numbers[where(i...)]); });
    };
    images ? put(x, at_x) : op.kind == FORWARD ? put(y, at_y) : put(w, at_w);
}

void element_by_element(const Operation &op, Memory &memory) {
    each(op.y, [&](auto... i) {
        const double x = memory.get(op.x, at(op.x, i...));
        memory.put(op.y, at(op.y, i...), op.has_b ? x + memory.get(op.w, at(op.w, i...)) : std::max(x, 0.0));
    });
}

int finalize(Descriptor *d) {
    switch (d->kind) {
        case TENSOR: tensor(d); break;
        case FORWARD: case BACKWARD_DATA: case BACKWARD_FILTER: case OP_POINTWISE: operation(d); break;
        case GRAPH:
            one<void *>(d, 800, HANDLE);
            d->graph = std::make_shared<Graph>();
            for (auto *op : all<Descriptor *>(d, 801, DESCRIPTOR)) {
                if (!op->finalized) throw Missing{801};
                d->graph->push_back(operation(op));
            }
            break;
        case ENGINE_HEUR: d->graph = part(d, 201, GRAPH)->graph; one<int>(d, 200, HEUR_MODE); break;
        case PLAN: {
            one<void *>(d, 400, HANDLE);
            auto *config = part(d, 401, ENGINE_CONFIG);
            d->graph = config->graph;
            d->engine = config->engine;
            if (!ENGINES[d->engine].works) return refuse(SHAPE, "the engine can't do it after all");
            break;
        }
        case PACK: {
            auto ids = all<int64_t>(d, 1000, INT64);
            if (all<void *>(d, 1001, VOID_PTR).size() != ids.size()) throw Missing{1001};
            one<void *>(d, 1003, VOID_PTR);
        }
    }
    d->finalized = true;
    return OK;
}

} // namespace

FAKE_EXPORT size_t cudnnGetVersion() { return 91300; }

FAKE_EXPORT const char *cudnnGetErrorString(int status) {
    switch (status) {
        case OK: return "CUDNN_STATUS_SUCCESS";
        case 1001: return "CUDNN_STATUS_NOT_INITIALIZED";
        case BAD_PARAM: return "CUDNN_STATUS_BAD_PARAM";
        case NOT_FINALIZED: return "CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED";
        case TYPE_ERROR: return "CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE";
        case NOT_SUPPORTED: return "CUDNN_STATUS_NOT_SUPPORTED";
        case PATTERN: return "CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN";
        case SHAPE: return "CUDNN_STATUS_NOT_SUPPORTED_SHAPE";
        case 4003: return "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED";
        case EXECUTION: return "CUDNN_STATUS_EXECUTION_FAILED";
        default: return "CUDNN_STATUS_UNKNOWN";
    }
}

FAKE_EXPORT void cudnnGetLastErrorString(char *to, size_t room) {
    size_t n = std::min(last.size(), room - 1);
    memcpy(to, last.data(), n);
    to[n] = 0;
}

struct Handle {
    void *stream = nullptr;
};

FAKE_EXPORT int cudnnCreate(Handle **handle) {
    if (int code = called("cudnnCreate")) return refuse(code, "told to fail");
    *handle = new Handle;
    fake::born();
    return OK;
}

FAKE_EXPORT int cudnnDestroy(Handle *handle) {
    int code = called("cudnnDestroy");
    delete handle;
    fake::died();
    return code;
}

FAKE_EXPORT int cudnnSetStream(Handle *handle, void *stream) {
    if (int code = called("cudnnSetStream")) return refuse(code, "told to fail");
    handle->stream = stream;
    return OK;
}

FAKE_EXPORT int cudnnBackendCreateDescriptor(int kind, Descriptor **out) {
    if (int code = called("cudnnBackendCreateDescriptor", std::to_string(kind))) return refuse(code, "told to fail");
    *out = new Descriptor{kind, false, {}, nullptr, -1};
    fake::born();
    return OK;
}

FAKE_EXPORT int cudnnBackendDestroyDescriptor(Descriptor *d) {
    int code = called("cudnnBackendDestroyDescriptor");
    delete d;
    fake::died();
    return code;
}

FAKE_EXPORT int cudnnBackendSetAttribute(Descriptor *d, int name, int type, int64_t count, const void *values) {
    if (int code = called("cudnnBackendSetAttribute", std::to_string(name))) return refuse(code, "told to fail");
    if (d->finalized) return refuse(BAD_PARAM, "attribute " + std::to_string(name) + " of what is finalized");
    const char *from = static_cast<const char *>(values);
    d->attributes[name] = {type, std::vector<char>(from, from + count * size_of(type))};
    return OK;
}

FAKE_EXPORT int cudnnBackendFinalize(Descriptor *d) {
    if (int code = called("cudnnBackendFinalize", std::to_string(d->kind))) return refuse(code, "told to fail");
    try {
        return finalize(d);
    } catch (Missing missing) {
        return refuse(BAD_PARAM, "attribute " + std::to_string(missing.name) + " of descriptor " + std::to_string(d->kind) + " is missing or wrong");
    }
}

FAKE_EXPORT int cudnnBackendGetAttribute(Descriptor *d, int name, int type, int64_t most, int64_t *count, void *values) {
    if (int code = called("cudnnBackendGetAttribute", std::to_string(name))) return refuse(code, "told to fail");
    *count = 0;
    if (name == 202 && type == DESCRIPTOR && d->finalized) {
        int mode = one<int>(d, 200, HEUR_MODE);
        for (int engine : mode == 3 ? OF_MODE_A : mode == 1 ? OF_MODE_B : OF_FALLBACK) {
            if (*count == most) break;
            Descriptor *config = static_cast<Descriptor **>(values)[(*count)++];
            if (config->kind != ENGINE_CONFIG) return refuse(BAD_PARAM, "no configuration to fill");
            config->graph = d->graph;
            config->engine = engine;
            config->finalized = true;
        }
        return OK;
    }
    if (name == 300 && type == DESCRIPTOR && d->kind == ENGINE_CONFIG) {
        Descriptor *engine = static_cast<Descriptor **>(values)[0];
        engine->engine = d->engine;
        engine->finalized = true;
        *count = 1;
        return OK;
    }
    if (name == 1303 && type == NOTE && d->kind == ENGINE) {
        for (int note : ENGINES[d->engine].notes) static_cast<int *>(values)[(*count)++] = note;
        return OK;
    }
    if (name == 402 && type == INT64 && d->kind == PLAN) {
        *static_cast<int64_t *>(values) = ENGINES[d->engine].workspace;
        *count = 1;
        return OK;
    }
    return refuse(BAD_PARAM, "no attribute " + std::to_string(name) + " to be had");
}

FAKE_EXPORT int cudnnBackendExecute(Handle *handle, Descriptor *plan, Descriptor *pack) {
    if (int code = called("cudnnBackendExecute", "engine=" + std::to_string(plan->engine))) return refuse(code, "told to fail");
    if (plan->kind != PLAN || pack->kind != PACK || !plan->finalized || !pack->finalized) return refuse(NOT_FINALIZED, "plan and pack");
    auto ids = all<int64_t>(pack, 1000, INT64);
    auto pointers = all<char *>(pack, 1001, VOID_PTR);
    char *workspace = one<char *>(pack, 1003, VOID_PTR);
    const Engine &engine = ENGINES[plan->engine];
    if (engine.workspace && !workspace) return refuse(BAD_PARAM, "no workspace");
    Memory memory;
    memory.rounds = std::count(engine.notes.begin(), engine.notes.end(), 0);
    for (size_t i = 0; i < ids.size(); i++) memory.given[ids[i]] = pointers[i];
    for (const Operation &op : *plan->graph)
        for (const Tensor *t : {&op.x, &op.w, &op.y}) {
            if (t->passed_on || (op.kind == OP_POINTWISE && t == &op.w && !op.has_b)) continue;
            char *at = memory.given[t->id];
            if (!at || reinterpret_cast<uintptr_t>(at) % t->alignment) return refuse(2003, "tensor " + std::to_string(t->id));
        }
    const bool taken = fake::enqueue(handle->stream, [graph = plan->graph, memory, workspace, bytes = engine.workspace]() mutable {
        // What an engine leaves in its workspace is nobody's business.
        if (bytes) memset(workspace, 0x77, bytes);
        for (const Operation &op : *graph) op.kind == OP_POINTWISE ? element_by_element(op, memory) : convolve(op, memory);
        return true;
    });
    return taken ? OK : refuse(5000, "the stream takes no work");
}
