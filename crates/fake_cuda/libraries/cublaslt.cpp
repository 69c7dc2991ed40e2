// A stand-in for cuBLASLt: matrices in columns, products summed in float64, epilogues after them.
//
// The heuristic proposes up to three algorithms, which differ in the workspace that they ask for and compute the same.

#include "fake.h"

#include <cmath>
#include <memory>

using fake::called;

namespace {

enum Status { OK = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, INVALID = 7, ARCH = 8, EXECUTION = 13, INTERNAL = 14, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, F64 = 1, F16 = 2, BF16 = 14 };
enum Compute { COMPUTE_F32 = 68, COMPUTE_F64 = 70, COMPUTE_TF32 = 77 };
enum Epilogue { DEFAULT = 1, RELU = 2, BIAS = 4, DRELU = 8, BGRAD = 16, GELU = 32, DGELU = 64, AUX = 128, BGRADA = 256, BGRADB = 512 };

struct Desc {
    int compute, scale, trans_a = 0, trans_b = 0, epilogue = DEFAULT;
    char *bias = nullptr, *aux = nullptr;
    int64_t aux_leading = 0;
};

struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t leading, stride = 0;
    int batch = 1;
};

struct Preference {
    uint64_t workspace = 0;
    uint32_t alignment[4] = {256, 256, 256, 256};
    uint32_t reductions = 7; // Any, as the library has it.
};

struct Algo {
    uint64_t data[8];
};

struct Result {
    Algo algo;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

constexpr size_t WORKSPACES[] = {1024, 0, 4096};
constexpr uint64_t MAGIC = 0x616c676f;

double get(const char *from, int type, int64_t i) {
    uint16_t half;
    float narrow;
    double wide;
    switch (type) {
        case F64: return memcpy(&wide, from + 8 * i, 8), wide;
        case F32: return memcpy(&narrow, from + 4 * i, 4), narrow;
        case F16: return memcpy(&half, from + 2 * i, 2), fake::from_f16(half);
        default: return memcpy(&half, from + 2 * i, 2), fake::from_bf16(half);
    }
}

void put(char *to, int type, int64_t i, double value) {
    float narrow = float(value);
    uint16_t half = type == F16 ? fake::to_f16(narrow) : fake::to_bf16(narrow);
    if (type == F64) memcpy(to + 8 * i, &value, 8);
    else if (type == F32) memcpy(to + 4 * i, &narrow, 4);
    else memcpy(to + 2 * i, &half, 2);
}

// As a tensor core reads a float32: with 10 bits of fraction, to the nearest.
double rounded(double x, int compute) {
    if (compute != COMPUTE_TF32) return x;
    float narrow = float(x);
    uint32_t bits;
    memcpy(&bits, &narrow, 4);
    bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    memcpy(&narrow, &bits, 4);
    return narrow;
}

double gelu_inner(double x) { return std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); }

double gelu(double x) { return 0.5 * x * (1 + std::tanh(gelu_inner(x))); }

double gelu_slope(double x) {
    double t = std::tanh(gelu_inner(x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}

struct Work {
    Desc desc;
    Layout a, b, c, d;
    const char *from_a, *from_b, *from_c;
    char *to;
    double alpha, beta;
};

size_t size_of(int type) { return type == F64 ? 8 : type == F32 ? 4 : 2; }

void multiply(const Work &w, int batch) {
    const Desc &desc = w.desc;
    int64_t m = w.d.rows, n = w.d.columns, k = desc.trans_a ? w.a.rows : w.a.columns;
    const char *a = w.from_a + batch * w.a.stride * size_of(w.a.type), *b = w.from_b + batch * w.b.stride * size_of(w.b.type);
    const char *c = w.from_c + batch * w.c.stride * size_of(w.c.type);
    char *d = w.to + batch * w.d.stride * size_of(w.d.type);
    auto at_a = [&](int64_t i, int64_t l) { return rounded(get(a, w.a.type, desc.trans_a ? l + i * w.a.leading : i + l * w.a.leading), desc.compute); };
    auto at_b = [&](int64_t l, int64_t j) { return rounded(get(b, w.b.type, desc.trans_b ? j + l * w.b.leading : l + j * w.b.leading), desc.compute); };
    int e = desc.epilogue;
    std::vector<double> sums(e & BGRADB ? n : m);
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = 0; i < m; i++) {
            double x = 0;
            for (int64_t l = 0; l < k; l++) x += at_a(i, l) * at_b(l, j);
            x = w.alpha * x + (w.beta == 0 ? 0 : w.beta * get(c, w.c.type, i + j * w.c.leading));
            if (e & BIAS) x += get(desc.bias, w.d.type, i);
            int64_t kept = i + j * desc.aux_leading;
            if (e & RELU) {
                if (e & AUX) {
                    unsigned char &byte = reinterpret_cast<unsigned char &>(desc.aux[kept / 8]);
                    byte = (byte & ~(1 << kept % 8)) | (x > 0) << kept % 8;
                }
                x = x > 0 ? x : 0;
            }
            if (e & GELU) {
                if (e & AUX) put(desc.aux, w.d.type, kept, x);
                x = gelu(x);
            }
            if (e & DRELU) x = desc.aux[kept / 8] >> kept % 8 & 1 ? x : 0;
            if (e & DGELU) x *= gelu_slope(get(desc.aux, w.d.type, kept));
            put(d, w.d.type, i + j * w.d.leading, x);
            if (e & BGRAD) sums[i] += x;
        }
    }
    if (e & BGRADA) for (int64_t i = 0; i < m; i++) for (int64_t l = 0; l < k; l++) sums[i] += at_a(i, l);
    if (e & BGRADB) for (int64_t j = 0; j < n; j++) for (int64_t l = 0; l < k; l++) sums[j] += at_b(l, j);
    if (e & (BGRAD | BGRADA | BGRADB)) for (size_t i = 0; i < sums.size(); i++) put(desc.bias, w.d.type, int64_t(i), sums[i]);
}

// Whether matrices and description belong together.
bool fits(const Desc &desc, const Layout &a, const Layout &b, const Layout &c, const Layout &d) {
    auto [m, k] = desc.trans_a ? std::pair(a.columns, a.rows) : std::pair(a.rows, a.columns);
    auto [k2, n] = desc.trans_b ? std::pair(b.columns, b.rows) : std::pair(b.rows, b.columns);
    bool sizes = m == d.rows && n == d.columns && k == k2 && c.rows == m && c.columns == n && m && n && k;
    for (const Layout *one : {&a, &b, &c, &d}) sizes = sizes && one->leading >= int64_t(one->rows) && one->batch == d.batch && one->type == d.type;
    bool types = d.type == F64 ? desc.compute == COMPUTE_F64 && desc.scale == F64 : desc.compute != COMPUTE_F64 && desc.scale == F32;
    bool kept = !(desc.epilogue & AUX) || (desc.aux && desc.aux_leading >= int64_t(m) && desc.aux_leading % (desc.epilogue & (RELU | DRELU) ? 128 : 8) == 0);
    bool vector = !(desc.epilogue & (BIAS | BGRAD | BGRADA | BGRADB)) || desc.bias;
    return sizes && types && kept && vector;
}

template <class T, class... Args> int make(const char *function, T **out, Args... args) {
    if (int code = called(function)) return code;
    *out = new T{args...};
    fake::born();
    return OK;
}

template <class T> int end(const char *function, T *what) {
    int code = called(function);
    if (!what) return INVALID;
    delete what;
    fake::died();
    return code;
}

template <class T> int set(T &to, const void *from, size_t bytes) {
    if (bytes != sizeof to) return INVALID;
    memcpy(&to, from, bytes);
    return OK;
}

} // namespace

FAKE_EXPORT size_t cublasLtGetVersion() { return 130100; }

FAKE_EXPORT const char *cublasLtGetStatusName(int status) {
    switch (status) {
        case OK: return "CUBLAS_STATUS_SUCCESS";
        case NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
        case INVALID: return "CUBLAS_STATUS_INVALID_VALUE";
        case ARCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
        case EXECUTION: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case INTERNAL: return "CUBLAS_STATUS_INTERNAL_ERROR";
        case NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
        default: return "CUBLAS_STATUS_UNKNOWN";
    }
}

FAKE_EXPORT const char *cublasLtGetStatusString(int status) { return status == OK ? "success" : "the stand-in says no"; }

FAKE_EXPORT int cublasLtCreate(int **handle) { return make("cublasLtCreate", handle); }
FAKE_EXPORT int cublasLtDestroy(int *handle) { return end("cublasLtDestroy", handle); }

FAKE_EXPORT int cublasLtMatmulDescCreate(Desc **desc, int compute, int scale) {
    int code = make("cublasLtMatmulDescCreate", desc);
    if (code == OK) (*desc)->compute = compute, (*desc)->scale = scale;
    return code;
}

FAKE_EXPORT int cublasLtMatmulDescDestroy(Desc *desc) { return end("cublasLtMatmulDescDestroy", desc); }

FAKE_EXPORT int cublasLtMatmulDescSetAttribute(Desc *desc, int attribute, const void *value, size_t bytes) {
    if (int code = called("cublasLtMatmulDescSetAttribute", std::to_string(attribute))) return code;
    switch (attribute) {
        case 3: return set(desc->trans_a, value, bytes);
        case 4: return set(desc->trans_b, value, bytes);
        case 7: return set(desc->epilogue, value, bytes);
        case 8: return set(desc->bias, value, bytes);
        case 11: return set(desc->aux, value, bytes);
        case 12: return set(desc->aux_leading, value, bytes);
        default: return INVALID;
    }
}

FAKE_EXPORT int cublasLtMatrixLayoutCreate(Layout **layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    return make("cublasLtMatrixLayoutCreate", layout, type, rows, columns, leading);
}

FAKE_EXPORT int cublasLtMatrixLayoutDestroy(Layout *layout) { return end("cublasLtMatrixLayoutDestroy", layout); }

FAKE_EXPORT int cublasLtMatrixLayoutSetAttribute(Layout *layout, int attribute, const void *value, size_t bytes) {
    if (int code = called("cublasLtMatrixLayoutSetAttribute", std::to_string(attribute))) return code;
    return attribute == 5 ? set(layout->batch, value, bytes) : attribute == 6 ? set(layout->stride, value, bytes) : int(INVALID);
}

FAKE_EXPORT int cublasLtMatmulPreferenceCreate(Preference **preference) { return make("cublasLtMatmulPreferenceCreate", preference); }
FAKE_EXPORT int cublasLtMatmulPreferenceDestroy(Preference *preference) { return end("cublasLtMatmulPreferenceDestroy", preference); }

FAKE_EXPORT int cublasLtMatmulPreferenceSetAttribute(Preference *preference, int attribute, const void *value, size_t bytes) {
    uint32_t alignment = 0;
    if (bytes == 4) memcpy(&alignment, value, 4);
    std::string detail = std::to_string(attribute) + (bytes == 4 ? " " + std::to_string(alignment) : "");
    if (int code = called("cublasLtMatmulPreferenceSetAttribute", detail)) return code;
    if (attribute == 1) return set(preference->workspace, value, bytes);
    if (attribute == 3) return set(preference->reductions, value, bytes);
    return attribute >= 5 && attribute <= 8 ? set(preference->alignment[attribute - 5], value, bytes) : int(INVALID);
}

FAKE_EXPORT int cublasLtMatmulAlgoGetHeuristic(int *handle, Desc *desc, Layout *a, Layout *b, Layout *c, Layout *d, Preference *preference, int most, Result *results, int *found) {
    if (int code = called("cublasLtMatmulAlgoGetHeuristic", "most=" + std::to_string(most))) return code;
    *found = 0;
    // Parts of sums aren't to be added up in 16 bits.
    if (preference->reductions & ~2u) return INVALID;
    if (!handle || !fits(*desc, *a, *b, *c, *d)) return INVALID;
    for (uint64_t i = 0; i < 3 && *found < most; i++) {
        if (WORKSPACES[i] > preference->workspace) continue;
        results[(*found)++] = Result{Algo{{MAGIC, i}}, WORKSPACES[i], OK, 1, {}};
    }
    return *found ? OK : NOT_SUPPORTED;
}

FAKE_EXPORT int cublasLtMatmul(int *handle, Desc *desc, const void *alpha, const void *a, Layout *of_a, const void *b, Layout *of_b, const void *beta, const void *c, Layout *of_c, void *d, Layout *of_d, const Algo *algo, void *workspace, size_t bytes, void *stream) {
    std::string detail = "algo=" + std::to_string(algo->data[1]) + " workspace=" + std::to_string(bytes) + " epilogue=" + std::to_string(desc->epilogue);
    if (int code = called("cublasLtMatmul", detail)) return code;
    if (!handle || !fits(*desc, *of_a, *of_b, *of_c, *of_d) || algo->data[0] != MAGIC) return INVALID;
    size_t needed = WORKSPACES[algo->data[1]];
    if (bytes < needed || (needed && !workspace)) return INVALID;
    auto factor = [&](const void *from) { return get(static_cast<const char *>(from), desc->scale, 0); };
    Work work{*desc, *of_a, *of_b, *of_c, *of_d, static_cast<const char *>(a), static_cast<const char *>(b), static_cast<const char *>(c), static_cast<char *>(d), factor(alpha), factor(beta)};
    const bool taken = fake::enqueue(stream, [=] {
        // What an algorithm leaves in its workspace is nobody's business.
        if (needed) memset(workspace, 0x77, needed);
        for (int i = 0; i < work.d.batch; i++) multiply(work, i);
        return true;
    });
    return taken ? OK : EXECUTION;
}
