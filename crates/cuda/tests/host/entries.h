// Kernels by name, and calls of them whose arguments come as bytes: what the kernels of a program are for its driver.
#pragma once
#include "device.h"
#include "signature.h"

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

[[noreturn]] void fail(const std::string &what);

struct Argument {
    enum Kind : unsigned char { SCALAR = 0, BUFFER = 1, MISSING = 2 } kind;
    std::vector<char> bytes;
    // Where the kernel sees a buffer.
    char *at = nullptr;
};

// --- calling a kernel whose parameters the list of arguments must match

template <class A> struct Passed {
    static A take(const Argument &from) {
        if (from.kind != Argument::SCALAR || from.bytes.size() != sizeof(A)) fail("an argument that isn't what the kernel takes");
        return host_copy<A>(from.bytes.data());
    }
};

template <class A> struct Passed<A *> {
    static A *take(const Argument &from) {
        if (from.kind == Argument::SCALAR) fail("a number in the place of a buffer");
        return (A *)from.at;
    }
};

using Arguments = std::vector<Argument>;

template <class... A, std::size_t... I>
void call_with(void (*kernel)(A...), const Arguments &from, std::index_sequence<I...>) {
    kernel(Passed<A>::take(from[I])...);
}

template <class... A> void call(void (*kernel)(A...), const Arguments &from) {
    if (from.size() != sizeof...(A)) fail("another number of arguments than the kernel takes");
    call_with(kernel, from, std::index_sequence_for<A...>());
}

struct Entry {
    const char *name;
    void (*call)(const Arguments &);
    std::string (*signature)();
};

// Defined beside the kernels.
extern const Entry *const entries;
extern const std::size_t entry_count;
// How far behind a multiple of 16 bytes their buffers begin at times.
extern const std::size_t behind;
