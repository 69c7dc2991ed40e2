// Streams and events.
#pragma once
#include "fake.h"

API int cuStreamCreateWithPriority(Stream **stream, unsigned flags, int) {
    return in_context("cuStreamCreateWithPriority", [&] {
        // Only streams that don't wait for the default stream are known here.
        if (flags != 1) return INVALID_VALUE;
        *stream = new Stream{current->index, {}, false, nullptr, {}};
        fake.streams.add(*stream);
        return SUCCESS;
    });
}

// What it was given is still carried out, whenever that may be.
API int cuStreamDestroy_v2(Stream *stream) {
    return on_stream("cuStreamDestroy_v2", stream, [&] {
        fake.streams.remove(stream);
        return SUCCESS;
    });
}

API int cuStreamSynchronize(Stream *stream) {
    return looking("cuStreamSynchronize", stream, [&] {
        Gpu *gpu = current;
        if (!until([&] { return stream->queue.empty(); })) return (int)UNKNOWN;
        return met_or(*gpu, SUCCESS);
    });
}

API int cuStreamQuery(Stream *stream) {
    return looking("cuStreamQuery", stream, [&] {
        fake.streams.step();
        return met_or(*current, stream->queue.empty() ? SUCCESS : NOT_READY);
    });
}

API int cuStreamIsCapturing(Stream *stream, int *status) {
    return on_stream("cuStreamIsCapturing", stream, [&] {
        *status = !stream->capture ? 0 : stream->capture->is_invalid ? 2 : 1;
        return SUCCESS;
    });
}

API int cuEventCreate(Event **event, unsigned flags) {
    return in_context("cuEventCreate", [&] {
        const auto made = std::make_shared<Event>(Event{!(flags & 2), nullptr, nullptr, {}});
        fake.events.insert(made);
        *event = made.get();
        return SUCCESS;
    });
}

API int cuEventDestroy_v2(Event *event) {
    return in_context("cuEventDestroy_v2", [&] { return fake.events.erase(event_of(event)) ? SUCCESS : INVALID_HANDLE; });
}

API int cuEventRecord(Event *which, Stream *stream) {
    return on_stream("cuEventRecord", stream, [&] {
        const auto event = event_of(which);
        if (!event) return (int)INVALID_HANDLE;
        if (stream->capture) {
            if (stream->capture->is_invalid) return (int)STREAM_CAPTURE_INVALIDATED;
            event->capture = stream->capture;
            event->tail = stream->tail;
            return (int)SUCCESS;
        }
        const auto mark = std::make_shared<Mark>();
        event->capture = nullptr;
        event->mark = mark;
        return put(stream, [mark] {
            mark->is_done = true;
            mark->ms = fake.streams.ms;
        });
    });
}

API int cuStreamWaitEvent(Stream *stream, Event *which, unsigned) {
    return on_stream("cuStreamWaitEvent", stream, [&] {
        const auto event = event_of(which);
        if (!event) return (int)INVALID_HANDLE;
        if (stream->capture && stream->capture->is_invalid) return (int)STREAM_CAPTURE_INVALIDATED;
        if (event->capture) {
            if (event->capture->is_invalid) return (int)STREAM_CAPTURE_INVALIDATED;
            if (stream->capture && stream->capture != event->capture) {
                stream->capture->is_invalid = event->capture->is_invalid = true;
                return (int)STREAM_CAPTURE_MERGE;
            }
            if (!stream->capture) {
                stream->capture = event->capture;
                stream->capture->joined.insert(stream);
                stream->tail.clear();
            }
            stream->tail.insert(stream->tail.end(), event->tail.begin(), event->tail.end());
            return (int)SUCCESS;
        }
        if (!event->mark) return (int)SUCCESS;
        if (stream->capture) {
            stream->capture->is_invalid = true;
            return (int)STREAM_CAPTURE_ISOLATION;
        }
        stream->queue.push_back({event->mark, [] { return Step::DONE; }});
        return (int)SUCCESS;
    });
}

API int cuEventQuery(Event *which) {
    return about_event("cuEventQuery", which, [&](const std::shared_ptr<Event> &event) {
        fake.streams.step();
        return met_or(*current, !event->mark || event->mark->is_done ? SUCCESS : NOT_READY);
    });
}

API int cuEventSynchronize(Event *which) {
    return about_event("cuEventSynchronize", which, [&](const std::shared_ptr<Event> &event) {
        Gpu *gpu = current;
        if (event->mark && !until([&] { return event->mark->is_done; })) return (int)UNKNOWN;
        return met_or(*gpu, SUCCESS);
    });
}

API int cuEventElapsedTime_v2(float *ms, Event *start, Event *end) {
    return in_context("cuEventElapsedTime_v2", [&] {
        const auto from = event_of(start), to = event_of(end);
        if (!from || !to || !from->has_time || !to->has_time || !from->mark || !to->mark) return INVALID_HANDLE;
        if (!from->mark->is_done || !to->mark->is_done) return NOT_READY;
        *ms = (float)(to->mark->ms - from->mark->ms);
        return SUCCESS;
    });
}

// From now on streams go on by themselves, too, as a real GPU's do: for a process that may wait for another in ways that this driver
// hears nothing of, while that one waits for what a stream has yet to do.
API void phalanx_fake_goes_on() {
    static const bool started = [] {
        std::thread([] {
            for (;;) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
                Lock lock(fake.mutex);
                while (fake.streams.step() == Step::PART) {
                }
            }
        }).detach();
        return true;
    }();
    (void)started;
}

// What the next work does that a stand-in gives a stream on this thread.
API void phalanx_fake_next_is_illegal() { next_is_illegal = true; }

// What stand-ins for NVIDIA's libraries give a stream: `work` is called, and called again whenever others have got on, until it
// gives other than 0. A captured one is done anew with each launch of its graph. `release` is called when nobody will call it any
// more. Any GPU may be current: one thread may drive several ranks.
API int phalanx_fake_enqueue(Stream *stream, int (*work)(void *), void *argument, void (*release)(void *)) {
    const std::shared_ptr<void> held(argument, release);
    return after_init("phalanx_fake_enqueue", [&] {
        if (!is_stream(stream)) return (int)INVALID_HANDLE;
        return put_work(stream, [work, held] { return work(held.get()) != 0; });
    });
}
