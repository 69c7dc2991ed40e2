// Runs the blocks of a grid, one after the other, on the thread that asks for it. The threads of a block are fibers: each runs
// until it waits for others or ends. A fiber whose thread has ended goes on with the next thread, so that a kernel without a
// barrier needs a single one.
//
// In rising order all warps go on in turns, from one operation of a warp to the next, and copies come as late as they may. In falling
// order each warp goes on alone as far as it can, to the next barrier of the block, and copies come as soon as they may. So a warp is far
// behind another or beside it, and what is copied is there or not: a kernel that comes to the same in both doesn't rely on either.
#pragma once
#include "device.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdlib>
#include <deque>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
extern "C" void __sanitizer_start_switch_fiber(void **save, const void *bottom, std::size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void *save, const void **bottom, std::size_t *size);
// The library's jumps tell the sanitizer that they leave frames behind for good. The compiler's own tell nobody.
using Place = void *[5];
#define STAND_AT(place) __builtin_setjmp(place)
#define JUMP_TO(place) __builtin_longjmp(place, 1)
#define UNSEEN __attribute__((noinline, no_sanitize("address")))
#else
static void __sanitizer_start_switch_fiber(void **, const void *, std::size_t) {}
static void __sanitizer_finish_switch_fiber(void *, const void **, std::size_t *) {}
using Place = jmp_buf;
#define STAND_AT(place) _setjmp(place)
#define JUMP_TO(place) _longjmp(place, 1)
#define UNSEEN
#endif

Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

const std::size_t STACK = 256 << 10;

struct Fiber {
    ucontext_t context;
    // Where it went away from, once it has begun.
    Place at;
    bool has_begun = false;
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
    // What it has come to with the lanes of its warp, and what it has brought.
    Together what;
    int number;
    std::uint64_t slot;
    // Copies that aren't in a group yet, and groups that weren't waited for.
    std::vector<Copy> copies;
    std::deque<std::vector<Copy>> groups;
};

// A kernel with its arguments.
struct Call {
    virtual void run() const = 0;
    // Called before the threads of a block begin.
    virtual void before_block() const {}
};

std::vector<Thread> threads;
// What the lanes of each warp saw of each other at last.
std::vector<std::uint64_t> seen;
// Fibers that no thread is on.
std::vector<Fiber *> idle;
const void *scheduler_stack;
std::size_t scheduler_size;
const Call *running;
bool is_falling;
// How many threads of the block have started, how many may, and the one that runs.
unsigned started, startable, current;
// Whether lanes of a warp have come to different operations.
bool went_apart;

unsigned in_order(unsigned i) { return is_falling ? blockDim.x - 1 - i : i; }

// A context takes the mask of signals along, by a call of the system each time, and a sanitizer clears what it knows of the whole stack of
// one that is swapped: either is most of what a kernel with barriers takes. So a fiber begins as a context and goes on by jumps.
Place scheduler_at;
void *scheduler_fake;

[[noreturn]] UNSEEN void begin(Fiber &fiber) {
    fiber.has_begun = true;
    setcontext(&fiber.context);
    std::abort();
}

[[noreturn]] UNSEEN void jump(Place &to) { JUMP_TO(to); }

UNSEEN void leave(Fiber &from) {
    if (STAND_AT(from.at) == 0) jump(scheduler_at);
}

UNSEEN void enter(Fiber &fiber) {
    if (STAND_AT(scheduler_at) != 0) return;
    if (fiber.has_begun) jump(fiber.at);
    begin(fiber);
}

void to_scheduler(Fiber &from) {
    __sanitizer_start_switch_fiber(&from.fake, scheduler_stack, scheduler_size);
    leave(from);
    __sanitizer_finish_switch_fiber(from.fake, &scheduler_stack, &scheduler_size);
}

void resume(Fiber &fiber) {
    __sanitizer_start_switch_fiber(&scheduler_fake, fiber.stack, STACK);
    enter(fiber);
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
        while (started < startable) {
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

// Threads that follow each other.
struct Range {
    unsigned first, end;
};

bool all_are(State state, Range range) {
    for (unsigned i = range.first; i < range.end; i++) {
        if (threads[i].state != state) return false;
    }
    return true;
}

// Warp `i` of the block, in order.
Range warp_in_order(unsigned i) {
    const unsigned n = blockDim.x, warps = (n + 31) / 32, first = (is_falling ? warps - 1 - i : i) * 32;
    return {first, first + 32 < n ? first + 32 : n};
}

// Starts so many threads more; gives whether there is memory for them.
bool start(unsigned count) {
    startable = started + count;
    while (started < startable) {
        if (idle.empty() && !make_fiber()) return false;
        resume(*idle.back());
    }
    return true;
}

// Lets the lanes of a warp go on where all of them have come to one operation; gives whether they have.
bool meet(Range warp) {
    if (!all_are(State::AT_WARP, warp)) return false;
    const Thread &one = threads[warp.first];
    for (unsigned i = warp.first; i < warp.end; i++) {
        went_apart = went_apart || threads[i].what != one.what || threads[i].number != one.number;
        seen[i] = threads[i].slot;
        threads[i].state = State::READY;
    }
    return !went_apart;
}

// Lets go on who waits at the block's barrier, if all do.
bool pass_barrier() {
    if (!all_are(State::AT_BLOCK, {0, blockDim.x})) return false;
    for (Thread &thread : threads) thread.state = State::READY;
    return true;
}

// Runs those threads of a warp that may go on until they wait or end.
void go_on(Range warp) {
    for (unsigned i = warp.first; i < warp.end; i++) {
        const unsigned thread = is_falling ? warp.end - 1 - (i - warp.first) : i;
        if (threads[thread].state != State::READY) continue;
        current = threadIdx.x = thread;
        resume(*threads[thread].on);
    }
}

// Runs a warp until its lanes can't go on without others.
void go_alone(Range warp) {
    while (meet(warp)) go_on(warp);
}

// Runs a block whose warps go on alone; gives whether there was memory for it.
bool run_alone(unsigned warps) {
    for (unsigned i = 0; i < warps; i++) {
        const Range warp = warp_in_order(i);
        if (!start(warp.end - warp.first)) return false;
        go_alone(warp);
    }
    while (pass_barrier()) {
        for (unsigned i = 0; i < warps; i++) {
            go_on(warp_in_order(i));
            go_alone(warp_in_order(i));
        }
    }
    return true;
}

// Runs a block whose warps go on in turns; gives whether there was memory for it.
bool run_in_turns(unsigned warps) {
    if (!start(blockDim.x)) return false;
    for (bool any = true; any;) {
        any = pass_barrier();
        for (unsigned i = 0; i < warps; i++) any = meet(warp_in_order(i)) || any;
        for (unsigned i = 0; i < warps; i++) go_on(warp_in_order(i));
    }
    return true;
}

// Null, or what went wrong.
const char *run_block() {
    started = 0;
    went_apart = false;
    for (Thread &thread : threads) {
        thread.state = State::READY;
        thread.copies.clear();
        thread.groups.clear();
    }
    const unsigned warps = (blockDim.x + 31) / 32;
    if (!(is_falling ? run_alone(warps) : run_in_turns(warps))) return "no memory for a fiber's stack";
    if (went_apart) return "lanes of a warp meet at different operations";
    if (!all_are(State::ENDED, {0, blockDim.x})) return "threads wait for others that have ended or wait elsewhere";
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
        call.before_block();
        blockIdx.x = falling ? blocks - 1 - i : i;
        if (const char *wrong = run_block()) return wrong;
    }
    return nullptr;
}

}  // namespace

void __syncthreads() { wait_for_others(State::AT_BLOCK); }

const std::uint64_t *host_exchange(Together what, int number, std::uint64_t slot) {
    Thread &thread = threads[current];
    thread.what = what;
    thread.number = number;
    thread.slot = slot;
    wait_for_others(State::AT_WARP);
    return &seen[current / 32 * 32];
}

static void make(const Copy &copy) {
    if (copy.from) {
        std::memcpy(copy.to, copy.from, copy.bytes);
    } else {
        std::memset(copy.to, 0, copy.bytes);
    }
}

void host_copy_later(void *to, const void *from, std::size_t bytes) {
    const Copy copy{to, from, bytes};
    if (is_falling) make(copy);
    threads[current].copies.push_back(copy);
}

void host_close_copies() {
    Thread &thread = threads[current];
    thread.groups.push_back(std::move(thread.copies));
    thread.copies.clear();
}

void host_wait_for_copies(std::size_t left) {
    std::deque<std::vector<Copy>> &groups = threads[current].groups;
    for (; groups.size() > left; groups.pop_front()) {
        if (is_falling) continue;
        for (const Copy &copy : groups.front()) make(copy);
    }
}
