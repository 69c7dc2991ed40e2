// The driver, its GPUs and their contexts.
#pragma once
#include "fake.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

// A GPU's bytes are all its number and 1: what stands in for NVML knows it by the same.
inline Visible whole(int device) {
    Visible one = {device, {}};
    std::memset(one.uuid, device + 1, sizeof one.uuid);
    return one;
}

// The 16 bytes that are written in a text, which may have hyphens between them.
inline bool read_uuid(const std::string &text, unsigned char *bytes) {
    std::string digits;
    for (char c : text) {
        if (std::isxdigit((unsigned char)c)) digits += c;
    }
    if (digits.size() != 32) return false;
    for (int i = 0; i < 16; i++) bytes[i] = (unsigned char)std::stoi(digits.substr((std::size_t)i * 2, 2), nullptr, 16);
    return true;
}

// As CUDA's manual has it: numbers or UUIDs, up to the first that is none; of parts of a GPU the first, alone.
inline std::vector<Visible> visible_gpus() {
    std::vector<Visible> all;
    for (int i = 0; i < fake.n_gpus; i++) all.push_back(whole(i));
    const char *told = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!told) return all;
    std::vector<Visible> seen;
    std::stringstream list(told);
    for (std::string name; std::getline(list, name, ',');) {
        Visible one = {0, {}};
        if (name.rfind("MIG-", 0) == 0) {
            return read_uuid(name.substr(4), one.uuid) ? std::vector<Visible>{one} : seen;
        } else if (name.rfind("GPU-", 0) == 0) {
            if (!read_uuid(name.substr(4), one.uuid) || one.uuid[0] > fake.n_gpus) return seen;
            seen.push_back(whole(one.uuid[0] - 1));
        } else {
            char *end = nullptr;
            const long number = std::strtol(name.c_str(), &end, 10);
            if (end == name.c_str() || number < 0 || number >= fake.n_gpus) return seen;
            seen.push_back(whole((int)number));
        }
    }
    return seen;
}

API int cuInit(unsigned) {
    return plain("cuInit", [] {
        fake.is_up = true;
        fake.visible = visible_gpus();
        return fake.visible.empty() ? NO_DEVICE : SUCCESS;
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
    return after_init("cuDeviceGetCount", [&] { return *count = (int)fake.visible.size(), SUCCESS; });
}

API int cuDeviceGet(int *device, int ordinal) {
    return after_init("cuDeviceGet", [&] {
        if (ordinal < 0 || ordinal >= (int)fake.visible.size()) return INVALID_DEVICE;
        *device = fake.visible[(std::size_t)ordinal].device;
        return SUCCESS;
    });
}

API int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    return after_init("cuDeviceGetUuid_v2", [&] {
        for (const Visible &one : fake.visible) {
            if (one.device == device) return std::memcpy(uuid, one.uuid, sizeof one.uuid), SUCCESS;
        }
        return INVALID_DEVICE;
    });
}

API int cuDeviceGetName(char *name, int length, int device) {
    return after_init("cuDeviceGetName", [&] {
        std::strncpy(name, "Fake GPU", (std::size_t)length);
        return device < fake.n_gpus ? SUCCESS : INVALID_DEVICE;
    });
}

API int cuDeviceGetPCIBusId(char *id, int length, int device) {
    return after_init("cuDeviceGetPCIBusId", [&] {
        std::snprintf(id, (std::size_t)length, "0000:%02x:00.0", device + 1);
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

API int cuCtxGetDevice(int *device) {
    return in_context("cuCtxGetDevice", [&] { return *device = current->index, SUCCESS; });
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
        // Streams of other GPUs may wait for what only this thread will give one of these.
        until([&] {
            const auto &all = fake.streams.order();
            return std::all_of(all.begin(), all.end(), [&](const Stream *stream) { return fake.gpus + stream->device != gpu || stream->queue.empty(); });
        });
        return met_or(*gpu, SUCCESS);
    });
}
