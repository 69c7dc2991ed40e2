// Runs one launch that is described on standard input and writes what its buffers then hold. Each launch is made twice, with
// blocks and threads in rising and in falling order, and must come to the same bits. Buffers are exactly as long as they should
// be, so that the address sanitizer sees every access beside them.
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

extern "C" void __sanitizer_start_switch_fiber(void **save, const void *bottom, std::size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void *save, const void **bottom, std::size_t *size);

Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

[[noreturn]] void fail(const std::string &what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(3);
}

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
        A value;
        std::memcpy(&value, from.bytes.data(), sizeof(A));
        return value;
    }
    static std::string letter() {
        if (std::is_floating_point<A>::value) return sizeof(A) == 8 ? "d" : "f";
        return std::is_integral<A>::value && sizeof(A) == 8 ? "l" : "s" + std::to_string(sizeof(A));
    }
};

template <class A> struct Passed<A *> {
    static A *take(const Argument &from) {
        if (from.kind == Argument::SCALAR) fail("a number in the place of a buffer");
        return (A *)from.at;
    }
    static std::string letter() { return std::is_const<A>::value ? "r" : "w"; }
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

template <class... A> std::string signature(void (*)(A...)) {
    std::string letters;
    int unused[] = {0, (letters += Passed<A>::letter(), 0)...};
    (void)unused;
    return letters;
}

struct Entry {
    const char *name;
    void (*call)(const Arguments &);
    std::string (*signature)();
};

#define ENTRY(NAME) {#NAME, [](const Arguments &from) { call(NAME, from); }, [] { return signature(NAME); }},
const Entry entries[] = {
    ENTRIES
};

// --- the threads of a block

const std::size_t STACK = 256 << 10;

enum class State { READY, AT_BLOCK, AT_WARP, ENDED };

struct Fiber {
    ucontext_t context;
    char *stack = nullptr;
    void *fake = nullptr;
    State state = State::ENDED;
    std::uint64_t slot = 0;
};

std::vector<Fiber> fibers;
std::vector<std::uint64_t> seen;
ucontext_t scheduler;
void *scheduler_fake;
const void *scheduler_stack;
std::size_t scheduler_size;
unsigned current;
const Entry *running;
const Arguments *running_with;

void leave(State state) {
    Fiber &me = fibers[current];
    me.state = state;
    __sanitizer_start_switch_fiber(state == State::ENDED ? nullptr : &me.fake, scheduler_stack, scheduler_size);
    swapcontext(&me.context, &scheduler);
    __sanitizer_finish_switch_fiber(me.fake, nullptr, nullptr);
}

void body() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
    running->call(*running_with);
    leave(State::ENDED);
}

void resume(unsigned thread) {
    current = thread;
    threadIdx.x = thread;
    Fiber &fiber = fibers[thread];
    __sanitizer_start_switch_fiber(&scheduler_fake, fiber.stack, STACK);
    swapcontext(&scheduler, &fiber.context);
    __sanitizer_finish_switch_fiber(scheduler_fake, nullptr, nullptr);
}

void start(Fiber &fiber) {
    if (!fiber.stack) {
        fiber.stack = (char *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (fiber.stack == MAP_FAILED) fail("no memory for a fiber's stack");
    }
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    fiber.fake = nullptr;
    fiber.state = State::READY;
    makecontext(&fiber.context, body, 0);
}

bool all_are(State state, unsigned first, unsigned end) {
    for (unsigned i = first; i < end; i++) {
        if (fibers[i].state != state) return false;
    }
    return true;
}

// Lets go on who waits for others that have all come; gives whether anybody may go on.
bool release() {
    const unsigned n = blockDim.x;
    bool any = false;
    if (all_are(State::AT_BLOCK, 0, n)) {
        for (Fiber &fiber : fibers) fiber.state = State::READY;
        return true;
    }
    for (unsigned warp = 0; warp < n; warp += 32) {
        const unsigned end = warp + 32 < n ? warp + 32 : n;
        if (!all_are(State::AT_WARP, warp, end)) continue;
        for (unsigned i = warp; i < end; i++) {
            seen[i] = fibers[i].slot;
            fibers[i].state = State::READY;
        }
        any = true;
    }
    return any;
}

void run_block(bool falling) {
    const unsigned n = blockDim.x;
    for (Fiber &fiber : fibers) start(fiber);
    do {
        for (unsigned i = 0; i < n; i++) {
            const unsigned thread = falling ? n - 1 - i : i;
            if (fibers[thread].state == State::READY) resume(thread);
        }
    } while (release());
    if (!all_are(State::ENDED, 0, n)) fail("threads wait for others that have ended or wait elsewhere");
}

void run_grid(const Entry &entry, const Arguments &with, bool falling) {
    running = &entry;
    running_with = &with;
    fibers.resize(blockDim.x);
    seen.resize((blockDim.x + 31) / 32 * 32);
    for (unsigned i = 0; i < gridDim.x; i++) {
        blockIdx.x = falling ? gridDim.x - 1 - i : i;
        run_block(falling);
    }
}

// --- the request

template <class N> N number() {
    N value;
    if (std::fread(&value, sizeof(N), 1, stdin) != 1) fail("a request that is cut off");
    return value;
}

std::vector<char> bytes(std::size_t n) {
    std::vector<char> out(n);
    if (std::fread(out.data(), 1, n, stdin) != n) fail("a request that is cut off");
    return out;
}

Arguments arguments() {
    Arguments out(number<std::uint32_t>());
    for (Argument &argument : out) {
        argument.kind = (Argument::Kind)number<unsigned char>();
        argument.bytes = bytes(number<std::uint64_t>());
    }
    return out;
}

// Fresh memory for each buffer, filled as asked.
void place_buffers(Arguments &all) {
    for (Argument &argument : all) {
        if (argument.kind != Argument::BUFFER) continue;
        argument.at = (char *)std::malloc(argument.bytes.size());
        std::copy(argument.bytes.begin(), argument.bytes.end(), argument.at);
    }
}

const Entry &find(const std::string &name) {
    for (const Entry &entry : entries) {
        if (name == entry.name) return entry;
    }
    fail("no kernel " + name);
}

}  // namespace

void __syncthreads() { leave(State::AT_BLOCK); }

const std::uint64_t *host_exchange(std::uint64_t slot) {
    fibers[current].slot = slot;
    leave(State::AT_WARP);
    return &seen[current / 32 * 32];
}

int main(int count, char **) {
    if (count > 1) {
        for (const Entry &entry : entries) std::printf("%s %s\n", entry.name, entry.signature().c_str());
        return 0;
    }
    const std::vector<char> name = bytes(number<std::uint32_t>());
    const Entry &entry = find(std::string(name.begin(), name.end()));
    gridDim.x = number<std::uint32_t>();
    blockDim.x = number<std::uint32_t>();
    Arguments rising = arguments(), falling = rising;
    place_buffers(rising);
    run_grid(entry, rising, false);
    place_buffers(falling);
    run_grid(entry, falling, true);
    for (std::size_t i = 0; i < rising.size(); i++) {
        const Argument &a = rising[i], &b = falling[i];
        if (a.kind != Argument::BUFFER) continue;
        if (!std::equal(a.at, a.at + a.bytes.size(), b.at)) fail("the order of threads shows in buffer " + std::to_string(i));
        std::fwrite(a.at, 1, a.bytes.size(), stdout);
    }
    return 0;
}
