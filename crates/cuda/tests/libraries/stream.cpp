// The least of a driver that the stand-ins need: streams, each a thread that does one piece of work after another.

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Stream {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> work;
    bool busy = false, ends = false;
    std::thread thread;

    Stream() : thread([this] { run(); }) {}

    void run() {
        std::unique_lock<std::mutex> guard(lock);
        for (;;) {
            changed.wait(guard, [&] { return ends || !work.empty(); });
            if (work.empty()) return;
            auto next = std::move(work.front());
            work.pop_front();
            busy = true;
            guard.unlock();
            next();
            guard.lock();
            busy = false;
            changed.notify_all();
        }
    }
};

thread_local int device = -1;

} // namespace

EXPORT void phalanx_fake_enqueue(void *to, void (*work)(void *), void *argument, void (*release)(void *)) {
    Stream &stream = *static_cast<Stream *>(to);
    std::lock_guard<std::mutex> guard(stream.lock);
    stream.work.push_back([=] {
        work(argument);
        release(argument);
    });
    stream.changed.notify_all();
}

EXPORT int cuCtxGetDevice(int *out) {
    *out = device;
    return device < 0;
}

EXPORT void test_set_device(int to) { device = to; }

EXPORT void *test_stream_create() { return new Stream; }

EXPORT int test_stream_idle(void *of) {
    Stream &stream = *static_cast<Stream *>(of);
    std::lock_guard<std::mutex> guard(stream.lock);
    return stream.work.empty() && !stream.busy;
}

EXPORT void test_stream_synchronize(void *of) {
    Stream &stream = *static_cast<Stream *>(of);
    std::unique_lock<std::mutex> guard(stream.lock);
    stream.changed.wait(guard, [&] { return stream.work.empty() && !stream.busy; });
}

EXPORT void test_stream_destroy(void *of) {
    Stream *stream = static_cast<Stream *>(of);
    {
        std::lock_guard<std::mutex> guard(stream->lock);
        stream->ends = true;
        stream->changed.notify_all();
    }
    stream->thread.join();
    delete stream;
}
