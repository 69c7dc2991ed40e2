// Captures and graphs.
#pragma once
#include "fake.h"

API int cuThreadExchangeStreamCaptureMode(int *mode) {
    return plain("cuThreadExchangeStreamCaptureMode", [&] { return std::swap(*mode, own_mode), SUCCESS; });
}

API int cuStreamBeginCapture_v2(Stream *stream, int mode) {
    return on_stream("cuStreamBeginCapture_v2", stream, [&] {
        if (stream->capture) return ILLEGAL_STATE;
        stream->capture = std::make_shared<Capture>();
        stream->capture->origin = stream;
        stream->capture->thread = std::this_thread::get_id();
        stream->capture->mode = mode;
        stream->capture->joined.insert(stream);
        stream->tail.clear();
        fake.captures.push_back(stream->capture);
        return SUCCESS;
    });
}

API int cuStreamEndCapture(Stream *stream, Nodes **graph) {
    return on_stream("cuStreamEndCapture", stream, [&] {
        *graph = nullptr;
        const auto capture = stream->capture;
        if (!capture || capture->origin != stream) return ILLEGAL_STATE;
        if (capture->mode != RELAXED && capture->thread != std::this_thread::get_id()) {
            return capture->is_invalid = true, STREAM_CAPTURE_WRONG_THREAD;
        }
        const std::set<int> joined = ancestors(capture->nodes, stream->tail);
        bool is_joined = true;
        for (Stream *other : capture->joined) {
            for (int node : other->tail) is_joined = is_joined && joined.count(node);
            other->capture = nullptr;
            other->tail.clear();
        }
        for (std::size_t i = fake.captures.size(); i-- > 0;) {
            if (fake.captures[i] == capture) fake.captures.erase(fake.captures.begin() + (long)i);
        }
        // Events of the capture may outlive it; its work doesn't.
        Nodes nodes = std::move(capture->nodes);
        capture->nodes.clear();
        if (capture->is_invalid) return STREAM_CAPTURE_INVALIDATED;
        if (!is_joined) return STREAM_CAPTURE_UNJOINED;
        *graph = new Nodes(std::move(nodes));
        fake.graphs.insert(*graph);
        return SUCCESS;
    });
}

API int cuGraphDestroy(Nodes *graph) {
    return in_context("cuGraphDestroy", [&] {
        if (!fake.graphs.erase(graph)) return INVALID_HANDLE;
        delete graph;
        return SUCCESS;
    });
}

API int cuGraphInstantiateWithFlags(Exec **exec, Nodes *graph, unsigned long long) {
    return not_in_capture("cuGraphInstantiateWithFlags", [&] {
        if (!fake.graphs.count(graph)) return INVALID_HANDLE;
        *exec = new Exec{std::make_shared<const Nodes>(*graph)};
        fake.execs.insert(*exec);
        return SUCCESS;
    });
}

API int cuGraphExecDestroy(Exec *exec) {
    return in_context("cuGraphExecDestroy", [&] {
        if (!fake.execs.erase(exec)) return INVALID_HANDLE;
        delete exec;
        return SUCCESS;
    });
}

API int cuGraphLaunch(Exec *exec, Stream *stream) {
    return on_stream("cuGraphLaunch", stream, [&] {
        if (!fake.execs.count(exec)) return (int)INVALID_HANDLE;
        if (stream->capture) return stream->capture->is_invalid = true, (int)STREAM_CAPTURE_UNSUPPORTED;
        const auto run = std::make_shared<Run>(exec->nodes);
        stream->queue.push_back({nullptr, [run] { return run->step(fake.streams.chance); }});
        return (int)SUCCESS;
    });
}
