// Kernels by name: what the kernels of a module are for what runs them.
#pragma once
#include "device.h"
#include "signature.h"

#include <cstddef>
#include <string>
#include <utility>

template <class... A, std::size_t... I>
void call_with(void (*kernel)(A...), void *const *from, std::index_sequence<I...>) {
    kernel(host_copy<A>(from[I])...);
}

template <class... A> void call(void (*kernel)(A...), void *const *from) {
    call_with(kernel, from, std::index_sequence_for<A...>());
}

struct Entry {
    const char *name;
    void (*call)(void *const *);
    std::string letters;
};

// Defined beside the kernels, and seen by nobody outside of their module.
extern const Entry *const entries __attribute__((visibility("hidden")));
extern const std::size_t entry_count __attribute__((visibility("hidden")));
