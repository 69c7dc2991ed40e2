// What makes the kernels of a source a module of the fake driver: what they take, and launches of them. It is compiled once, and linked
// with each source.
#include "module.h"
#include "fibers.h"

#include <cstring>
#include <mutex>

namespace {

const Entry *find(const char *name) {
    for (std::size_t i = 0; i < entry_count; i++) {
        if (std::strcmp(entries[i].name, name) == 0) return &entries[i];
    }
    return nullptr;
}

// The linker's, of the section that shared memory lies in; null without any.
extern "C" char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));

// Nobody knows what a GPU's shared memory holds when a block begins: here numbers that are none, which spoil all that comes of them.
void fill_shared_memory() {
    if (__start_shared_memory) std::memset(__start_shared_memory, 0xFF, (std::size_t)(__stop_shared_memory - __start_shared_memory));
}

struct Launch : Call {
    const Entry *entry;
    void *const *from;
    void run() const override { entry->call(from); }
    void before_block() const override { fill_shared_memory(); }
};

// Fibers and shared memory are there once, and several fake drivers of one process may have opened this module.
std::mutex one_at_a_time;

}  // namespace

// The letters of a kernel's parameters, or null.
extern "C" const char *module_signature(const char *name) {
    const Entry *entry = find(name);
    return entry ? entry->letters.c_str() : nullptr;
}

// Launches a kernel; gives null, or what went wrong.
extern "C" const char *module_run(const char *name, unsigned blocks, unsigned block_threads, void *const *from, int falling) {
    std::lock_guard<std::mutex> lock(one_at_a_time);
    Launch launch;
    launch.entry = find(name);
    launch.from = from;
    return run_grid(launch, blocks, block_threads, falling != 0);
}
