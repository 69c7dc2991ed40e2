// Memory of GPUs and of the host, and copies.
#pragma once
#include "fake.h"

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
        if (!stream->computes) fake.journal.bytes_beside += bytes;
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
        if (!stream->computes) fake.journal.bytes_beside += bytes;
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
