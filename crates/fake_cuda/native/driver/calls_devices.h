// The driver, its GPUs and their contexts.
#pragma once
#include "fake.h"

// How many of the GPUs that are there a process sees: those of CUDA_VISIBLE_DEVICES, up to the first that isn't there.
inline int visible(int present) {
    const char *list = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!list) return present;
    for (int n = 0;; n++) {
        char *end;
        const long number = std::strtol(list, &end, 10);
        if (end == list || number < 0 || number >= present) return n;
        if (*end != ',') return n + 1;
        list = end + 1;
    }
}

API int cuInit(unsigned) {
    return plain("cuInit", [] {
        if (!fake.is_up) fake.n_gpus = visible(fake.n_gpus);
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
        until([] { return false; });
        return met_or(*gpu, SUCCESS);
    });
}
