// A compiler that compiles nothing: what it makes of a program is a line that tells the fake driver which file it was, for which
// type of elements and which architecture.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Program {
    std::string file, element, architecture, result, log;
    bool has_text;
};

std::mutex mutex;
// How many programs were compiled, and what the next one fails with.
std::uint64_t n_compiled = 0;
std::string next_log;
bool fails_next = false;
std::vector<int> known = {80, 90};

// What follows `start` in `text`.
bool rest_of(const std::string &text, const std::string &start, std::string &out) {
    if (text.compare(0, start.size(), start) != 0) return false;
    out = text.substr(start.size());
    return true;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }

API int nvrtcGetNumSupportedArchs(int *n) { return *n = (int)known.size(), 0; }
API int nvrtcGetSupportedArchs(int *out) { return std::copy(known.begin(), known.end(), out), 0; }

API const char *nvrtcGetErrorString(int code) {
    return code == 0 ? "NVRTC_SUCCESS" : code == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_INVALID_INPUT";
}

API int nvrtcCreateProgram(Program **program, const char *text, const char *name, int, const char *const *, const char *const *) {
    *program = new Program{name, "", "", "", "", std::strlen(text) > 0};
    return 0;
}

API int nvrtcDestroyProgram(Program **program) {
    delete *program;
    *program = nullptr;
    return 0;
}

API int nvrtcCompileProgram(Program *program, int n, const char *const *options) {
    std::lock_guard<std::mutex> lock(mutex);
    n_compiled++;
    for (int i = 0; i < n; i++) {
        rest_of(options[i], "--define-macro=ELEMENT=", program->element);
        rest_of(options[i], "--gpu-architecture=", program->architecture);
    }
    if (!program->has_text || program->element.empty() || program->architecture.empty()) return 3;
    program->log = next_log;
    next_log.clear();
    if (fails_next) return fails_next = false, 6;
    program->result = "fake-cubin " + program->file + " " + program->element + " " + program->architecture + "\n";
    return 0;
}

API int nvrtcGetProgramLogSize(Program *program, std::size_t *size) { return *size = program->log.size() + 1, 0; }
API int nvrtcGetProgramLog(Program *program, char *out) {
    return std::memcpy(out, program->log.c_str(), program->log.size() + 1), 0;
}
API int nvrtcGetCUBINSize(Program *program, std::size_t *size) { return *size = program->result.size() + 1, 0; }
API int nvrtcGetCUBIN(Program *program, char *out) {
    return std::memcpy(out, program->result.c_str(), program->result.size() + 1), 0;
}
API int nvrtcGetPTXSize(Program *program, std::size_t *size) { return nvrtcGetCUBINSize(program, size); }
API int nvrtcGetPTX(Program *program, char *out) { return nvrtcGetCUBIN(program, out); }

// --- what tests ask

API std::uint64_t fake_compilations() {
    std::lock_guard<std::mutex> lock(mutex);
    return n_compiled;
}

// From here on the compiler, when it is opened, knows this architecture alone.
API void fake_know(int architecture) {
    std::lock_guard<std::mutex> lock(mutex);
    known = {architecture};
}

// The next compilation says this and fails.
API void fake_fail_compilation(const char *log) {
    std::lock_guard<std::mutex> lock(mutex);
    next_log = log;
    fails_next = true;
}
