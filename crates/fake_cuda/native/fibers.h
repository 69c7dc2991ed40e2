// Runs the blocks of a grid, one after the other, on the thread that asks for it. The threads of a block are fibers: each runs
// until it waits for others or ends. A fiber whose thread has ended goes on with the next thread, so that a kernel without a
// barrier needs a single one.
#pragma once
#include "device.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <deque>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
extern "C" void __sanitizer_start_switch_fiber(void **save, const void *bottom, std::size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void *save, const void **bottom, std::size_t *size);
#else
static void __sanitizer_start_switch_fiber(void **, const void *, std::size_t) {}
static void __sanitizer_finish_switch_fiber(void *, const void **, std::size_t *) {}
#endif

Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

const std::size_t STACK = 256 << 10;

struct Fiber {
    ucontext_t context;
    char *stack;
    void *fake = nullptr;
};

enum class State { READY, AT_BLOCK, AT_WARP, ENDED };

struct Copy {
    void *to;
    const void *from;
    std::size_t bytes;
};

struct Thread {
    State state;
    Fiber *on;
    std::uint64_t slot;
    // Copies that aren't in a group yet, and groups that weren't waited for.
    std::vector<Copy> copies;
    std::deque<std::vector<Copy>> groups;
};

// A kernel with its arguments.
struct Call {
    virtual void run() const = 0;
};

std::vector<Thread> threads;
// What the lanes of each warp saw of each other at last.
std::vector<std::uint64_t> seen;
// Fibers that no thread is on.
std::vector<Fiber *> idle;
ucontext_t scheduler;
void *scheduler_fake;
const void *scheduler_stack;
std::size_t scheduler_size;
const Call *running;
bool is_falling;
// How many threads of the block have started, and the one that runs.
unsigned started, current;

unsigned in_order(unsigned i) { return is_falling ? blockDim.x - 1 - i : i; }

void to_scheduler(Fiber &from) {
    __sanitizer_start_switch_fiber(&from.fake, scheduler_stack, scheduler_size);
    swapcontext(&from.context, &scheduler);
    __sanitizer_finish_switch_fiber(from.fake, &scheduler_stack, &scheduler_size);
}

void resume(Fiber &fiber) {
    __sanitizer_start_switch_fiber(&scheduler_fake, fiber.stack, STACK);
    swapcontext(&scheduler, &fiber.context);
    __sanitizer_finish_switch_fiber(scheduler_fake, nullptr, nullptr);
}

void wait_for_others(State state) {
    threads[current].state = state;
    to_scheduler(*threads[current].on);
}

// What a fiber does: thread after thread, as long as there are any that haven't started.
void body() {
    Fiber &me = *idle.back();
    idle.pop_back();
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
    for (;;) {
        while (started < blockDim.x) {
            current = threadIdx.x = in_order(started++);
            threads[current].on = &me;
            running->run();
            threads[current].state = State::ENDED;
        }
        idle.push_back(&me);
        to_scheduler(me);
        idle.pop_back();
    }
}

bool make_fiber() {
    Fiber *fiber = new Fiber;
    fiber->stack = (char *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fiber->stack == MAP_FAILED) return false;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack;
    fiber->context.uc_stack.ss_size = STACK;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, body, 0);
    idle.push_back(fiber);
    return true;
}

bool all_are(State state, unsigned first, unsigned end) {
    for (unsigned i = first; i < end; i++) {
        if (threads[i].state != state) return false;
    }
    return true;
}

// Lets go on who waits for others that have all come; gives whether anybody may go on.
bool release() {
    const unsigned n = blockDim.x;
    bool any = false;
    if (all_are(State::AT_BLOCK, 0, n)) {
        for (Thread &thread : threads) thread.state = State::READY;
        return true;
    }
    for (unsigned warp = 0; warp < n; warp += 32) {
        const unsigned end = warp + 32 < n ? warp + 32 : n;
        if (!all_are(State::AT_WARP, warp, end)) continue;
        for (unsigned i = warp; i < end; i++) {
            seen[i] = threads[i].slot;
            threads[i].state = State::READY;
        }
        any = true;
    }
    return any;
}

// Null, or what went wrong.
const char *run_block() {
    const unsigned n = blockDim.x;
    started = 0;
    for (Thread &thread : threads) {
        thread.state = State::READY;
        thread.copies.clear();
        thread.groups.clear();
    }
    while (started < n) {
        if (idle.empty() && !make_fiber()) return "no memory for a fiber's stack";
        resume(*idle.back());
    }
    while (release()) {
        for (unsigned i = 0; i < n; i++) {
            const unsigned thread = in_order(i);
            if (threads[thread].state != State::READY) continue;
            current = threadIdx.x = thread;
            resume(*threads[thread].on);
        }
    }
    if (!all_are(State::ENDED, 0, n)) return "threads wait for others that have ended or wait elsewhere";
    for (Thread &thread : threads) {
        for (const std::vector<Copy> &group : thread.groups) {
            if (!group.empty()) return "a thread ends before its copies have come";
        }
        if (!thread.copies.empty()) return "a thread ends with copies in no group";
    }
    return nullptr;
}

// Runs a grid with its blocks and threads in rising or in falling order; gives null, or what went wrong.
const char *run_grid(const Call &call, unsigned blocks, unsigned block_threads, bool falling) {
    running = &call;
    is_falling = falling;
    gridDim.x = blocks;
    blockDim.x = block_threads;
    threads.resize(block_threads);
    seen.resize((block_threads + 31) / 32 * 32);
    for (unsigned i = 0; i < blocks; i++) {
        blockIdx.x = falling ? blocks - 1 - i : i;
        if (const char *wrong = run_block()) return wrong;
    }
    return nullptr;
}

}  // namespace

void __syncthreads() { wait_for_others(State::AT_BLOCK); }

const std::uint64_t *host_exchange(std::uint64_t slot) {
    threads[current].slot = slot;
    wait_for_others(State::AT_WARP);
    return &seen[current / 32 * 32];
}

void host_copy_later(void *to, const void *from, std::size_t bytes) { threads[current].copies.push_back({to, from, bytes}); }

void host_close_copies() {
    Thread &thread = threads[current];
    thread.groups.push_back(std::move(thread.copies));
    thread.copies.clear();
}

void host_wait_for_copies(std::size_t left) {
    std::deque<std::vector<Copy>> &groups = threads[current].groups;
    for (; groups.size() > left; groups.pop_front()) {
        for (const Copy &copy : groups.front()) {
            if (copy.from) {
                std::memcpy(copy.to, copy.from, copy.bytes);
            } else {
                std::memset(copy.to, 0, copy.bytes);
            }
        }
    }
}
