// Runs launches that are described on standard input and writes what their buffers then hold, and a point. Each is made in a process of
// its own, so that none sees what one before has left in shared memory. It is made twice, with blocks and threads in rising and in
// falling order, on buffers that begin at multiples of 16 bytes and on some that begin `behind` bytes later, and must come to the same
// bits. Buffers are exactly as long as they should be, so that the address sanitizer sees every access
// beside them.
#include "entries.h"
#include "fibers.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

[[noreturn]] void fail(const std::string &what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(3);
}

namespace {

struct Launch : Call {
    const Entry *entry;
    const Arguments *with;
    void run() const override { entry->call(*with); }
};

void launch(const Entry &entry, const Arguments &with, unsigned blocks, unsigned block_threads, bool falling) {
    Launch launch;
    launch.entry = &entry;
    launch.with = &with;
    if (const char *wrong = run_grid(launch, blocks, block_threads, falling)) fail(wrong);
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

// Fresh memory for each buffer, filled as asked, which begins so many bytes behind a multiple of 16.
void place_buffers(Arguments &all, std::size_t later) {
    for (Argument &argument : all) {
        if (argument.kind != Argument::BUFFER) continue;
        argument.at = (char *)std::malloc(later + argument.bytes.size()) + later;
        std::copy(argument.bytes.begin(), argument.bytes.end(), argument.at);
    }
}

const Entry &find(const std::string &name) {
    for (std::size_t i = 0; i < entry_count; i++) {
        if (name == entries[i].name) return entries[i];
    }
    fail("no kernel " + name);
}

void answer(const Entry &entry, unsigned blocks, unsigned block_threads, Arguments rising) {
    Arguments falling = rising;
    place_buffers(rising, 0);
    launch(entry, rising, blocks, block_threads, false);
    place_buffers(falling, behind);
    launch(entry, falling, blocks, block_threads, true);
    for (std::size_t i = 0; i < rising.size(); i++) {
        const Argument &a = rising[i], &b = falling[i];
        if (a.kind != Argument::BUFFER) continue;
        if (!std::equal(a.at, a.at + a.bytes.size(), b.at)) fail("the order of threads, or where buffers begin, shows in buffer " + std::to_string(i));
        std::fwrite(a.at, 1, a.bytes.size(), stdout);
    }
    std::fputc('.', stdout);
    std::fflush(stdout);
}

// Whether there is another request.
bool is_asked() {
    const int next = std::getc(stdin);
    return next != EOF && std::ungetc(next, stdin) == next;
}

}  // namespace

int main(int count, char **) {
    if (count > 1) {
        for (std::size_t i = 0; i < entry_count; i++) std::printf("%s %s\n", entries[i].name, entries[i].signature().c_str());
        return 0;
    }
    while (is_asked()) {
        const std::vector<char> name = bytes(number<std::uint32_t>());
        const Entry &entry = find(std::string(name.begin(), name.end()));
        const unsigned blocks = number<std::uint32_t>(), block_threads = number<std::uint32_t>();
        Arguments with = arguments();
        const pid_t child = fork();
        if (child < 0) fail("no process for a launch");
        if (child == 0) {
            answer(entry, blocks, block_threads, std::move(with));
            _exit(0);
        }
        int status = 0;
        if (waitpid(child, &status, 0) != child) fail("a launch whose process is gone");
        if (status != 0) return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    return 0;
}
