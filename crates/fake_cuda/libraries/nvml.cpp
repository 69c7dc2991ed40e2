// A stand-in for NVML. What it sees stands in nvml.txt beside it, which is read anew for each question:
//
//     gpu BUSY USED TOTAL POWER LIMIT TEMPERATURE    percent, MiB, MiB, W, W, degrees; - is what the GPU doesn't tell
//     process PID MIB                                on the GPU above, or the part
//     part UUID USED TOTAL                           of the GPU above, which is cut into parts then
//     lost                                           the GPU above has left the bus
//     forbidden                                      who is on the GPU above isn't told, but by its parts
//
// Without that file there are two GPUs with nothing on them.

#include "fake.h"

#include <cstdio>
#include <fstream>
#include <sstream>

using fake::called;

namespace {

enum Result { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, LOST = 15 };

struct Process {
    unsigned pid;
    uint64_t bytes;
    unsigned gpu_instance, compute_instance;
};

struct Memory {
    uint64_t total, free, used;
};

struct Utilization {
    unsigned gpu, memory;
};

// What isn't told is negative.
struct Gpu {
    double busy = 0, used = 0, total = 0, power = 0, limit = 0, temperature = 0;
    std::vector<Process> processes;
    struct Part {
        std::string uuid;
        double used, total;
        std::vector<Process> processes;
    };
    std::vector<Part> parts;
    bool is_lost = false, is_forbidden = false;
};

std::vector<Gpu> seen() {
    Dl_info own;
    dladdr(reinterpret_cast<void *>(&seen), &own);
    const std::string path = own.dli_fname;
    std::ifstream file(path.substr(0, path.rfind('/')) + "/nvml.txt");
    std::stringstream lines;
    if (file) lines << file.rdbuf();
    else lines << "gpu 0 0 1024 70 700 30\ngpu 0 0 1024 70 700 30\n";
    std::vector<Gpu> gpus;
    for (std::string line; std::getline(lines, line);) {
        std::stringstream words(line);
        std::string what, word;
        words >> what;
        auto number = [&] { return words >> word, word == "-" ? -1.0 : std::stod(word); };
        if (what == "gpu") {
            gpus.emplace_back();
            for (double *to : {&gpus.back().busy, &gpus.back().used, &gpus.back().total, &gpus.back().power, &gpus.back().limit, &gpus.back().temperature}) *to = number();
        } else if (what == "process") {
            const unsigned pid = unsigned(number());
            const double mib = number();
            const Process process = {pid, mib < 0 ? ~0ull : uint64_t(mib * 1048576), ~0u, ~0u};
            gpus.back().processes.push_back(process);
            if (!gpus.back().parts.empty()) gpus.back().parts.back().processes.push_back(process);
        } else if (what == "part") {
            words >> word;
            const std::string uuid = word;
            const double used = number();
            gpus.back().parts.push_back({uuid, used, number(), {}});
        } else if (what == "lost") {
            gpus.back().is_lost = true;
        } else if (what == "forbidden") {
            gpus.back().is_forbidden = true;
        }
    }
    return gpus;
}

// A handle is 1 + the GPU's number, and in the bits from 8 on 1 + the part's.
struct Asked {
    Gpu gpu;
    size_t number;
    const Gpu::Part *part;
};

bool find(uintptr_t handle, std::vector<Gpu> &gpus, Asked &asked) {
    gpus = seen();
    const size_t number = (handle & 0xff) - 1, part = handle >> 8;
    if (number >= gpus.size() || part > gpus[number].parts.size()) return false;
    asked = {gpus[number], number, part ? &gpus[number].parts[part - 1] : nullptr};
    return true;
}

template <class F> int ask(const char *call, uintptr_t handle, F answer) {
    if (int code = called(call)) return code;
    std::vector<Gpu> gpus;
    Asked asked;
    return find(handle, gpus, asked) ? answer(asked) : INVALID_ARGUMENT;
}

int tell(unsigned *to, double value, double factor = 1) {
    if (value < 0) return NOT_SUPPORTED;
    *to = unsigned(value * factor);
    return OK;
}

int write_text(const std::string &text, char *to, unsigned room) {
    if (text.size() + 1 > room) return INSUFFICIENT_SIZE;
    memcpy(to, text.c_str(), text.size() + 1);
    return OK;
}

} // namespace

FAKE_EXPORT int nvmlInit_v2() {
    int code = called("nvmlInit_v2");
    if (!code) fake::born();
    return code;
}

FAKE_EXPORT int nvmlShutdown() {
    fake::died();
    return called("nvmlShutdown");
}

FAKE_EXPORT const char *nvmlErrorString(int code) {
    switch (code) {
        case NOT_SUPPORTED: return "Not Supported";
        case 9: return "Driver Not Loaded";
        case LOST: return "GPU is lost";
        case 18: return "Driver/library version mismatch";
    }
    return "Unknown Error";
}

FAKE_EXPORT int nvmlSystemGetDriverVersion(char *to, unsigned room) {
    if (int code = called("nvmlSystemGetDriverVersion")) return code;
    return write_text("580.00.fake", to, room);
}

FAKE_EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    if (int code = called("nvmlDeviceGetCount_v2")) return code;
    *count = unsigned(seen().size());
    return OK;
}

FAKE_EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, uintptr_t *handle) {
    return ask("nvmlDeviceGetHandleByIndex_v2", index + 1, [&](Asked &asked) {
        *handle = index + 1;
        return asked.gpu.is_lost ? LOST : OK;
    });
}

FAKE_EXPORT int nvmlDeviceGetName(uintptr_t handle, char *to, unsigned room) {
    return ask("nvmlDeviceGetName", handle, [&](Asked &asked) { return write_text(asked.part ? "Fake GPU MIG 1g" : "Fake GPU", to, room); });
}

FAKE_EXPORT int nvmlDeviceGetUUID(uintptr_t handle, char *to, unsigned room) {
    return ask("nvmlDeviceGetUUID", handle, [&](Asked &asked) {
        if (asked.part) return write_text(asked.part->uuid, to, room);
        char byte[3];
        snprintf(byte, sizeof byte, "%02x", unsigned(asked.number + 1) & 0xff);
        std::string uuid = "GPU";
        for (int bytes : {4, 2, 2, 2, 6}) {
            uuid += "-";
            for (int i = 0; i < bytes; i++) uuid += byte;
        }
        return write_text(uuid, to, room);
    });
}

FAKE_EXPORT int nvmlDeviceGetMemoryInfo(uintptr_t handle, Memory *memory) {
    return ask("nvmlDeviceGetMemoryInfo", handle, [&](Asked &asked) {
        const double used = asked.part ? asked.part->used : asked.gpu.used, total = asked.part ? asked.part->total : asked.gpu.total;
        if (used < 0 || total < 0) return NOT_SUPPORTED;
        *memory = {uint64_t(total * 1048576), uint64_t((total - used) * 1048576), uint64_t(used * 1048576)};
        return OK;
    });
}

FAKE_EXPORT int nvmlDeviceGetUtilizationRates(uintptr_t handle, Utilization *to) {
    return ask("nvmlDeviceGetUtilizationRates", handle, [&](Asked &asked) { return tell(&to->gpu, asked.gpu.busy); });
}

FAKE_EXPORT int nvmlDeviceGetPowerUsage(uintptr_t handle, unsigned *to) {
    return ask("nvmlDeviceGetPowerUsage", handle, [&](Asked &asked) { return tell(to, asked.gpu.power, 1000); });
}

FAKE_EXPORT int nvmlDeviceGetEnforcedPowerLimit(uintptr_t handle, unsigned *to) {
    return ask("nvmlDeviceGetEnforcedPowerLimit", handle, [&](Asked &asked) { return tell(to, asked.gpu.limit, 1000); });
}

FAKE_EXPORT int nvmlDeviceGetTemperature(uintptr_t handle, int, unsigned *to) {
    return ask("nvmlDeviceGetTemperature", handle, [&](Asked &asked) { return tell(to, asked.gpu.temperature); });
}

FAKE_EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(uintptr_t handle, unsigned *count, Process *to) {
    return ask("nvmlDeviceGetComputeRunningProcesses_v3", handle, [&](Asked &asked) {
        if (asked.gpu.is_forbidden && !asked.part) return int(NO_PERMISSION);
        const auto &all = asked.part ? asked.part->processes : asked.gpu.processes;
        const unsigned room = *count;
        *count = unsigned(all.size());
        if (room < all.size()) return int(INSUFFICIENT_SIZE);
        std::copy(all.begin(), all.end(), to);
        return int(OK);
    });
}

FAKE_EXPORT int nvmlDeviceGetMigMode(uintptr_t handle, unsigned *now, unsigned *pending) {
    return ask("nvmlDeviceGetMigMode", handle, [&](Asked &asked) { return *now = *pending = !asked.gpu.parts.empty(), int(OK); });
}

FAKE_EXPORT int nvmlDeviceGetMaxMigDeviceCount(uintptr_t handle, unsigned *count) {
    return ask("nvmlDeviceGetMaxMigDeviceCount", handle, [&](Asked &) { return *count = 7, int(OK); });
}

FAKE_EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(uintptr_t handle, unsigned index, uintptr_t *part) {
    return ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, [&](Asked &asked) {
        if (index >= asked.gpu.parts.size()) return int(NOT_FOUND);
        *part = handle | uintptr_t(index + 1) << 8;
        return int(OK);
    });
}
