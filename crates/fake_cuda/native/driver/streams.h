// Streams, events and captures. What a stream is given waits in its queue, and is carried out when somebody waits for it, in an
// order across streams that chance picks among those that events allow: a program that forgets an event gets wrong numbers for
// some seed.
#pragma once
#include "chance.h"

#include <functional>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>
#include <deque>

// A piece of work that has no parts; gives whether it is done. What waits for others, as a rank does for other ranks, isn't until
// they have come, and is asked again.
using Work = std::function<bool()>;

// How a stream, a graph or all streams got on.
enum class Step { NOTHING, WAITS, PART, DONE };

// A point in a stream that an event stands for.
struct Mark {
    bool is_done = false;
    double ms = 0.0;
};

struct Node {
    Work work;
    // Those that come first, all with smaller numbers.
    std::vector<int> after;
};

using Nodes = std::vector<Node>;

struct Stream;

// A graph that is being recorded.
struct Capture {
    Stream *origin;
    std::thread::id thread;
    int mode;
    bool is_invalid = false;
    Nodes nodes;
    std::set<Stream *> joined;
};

struct Task {
    // What it waits for, or null.
    std::shared_ptr<Mark> waits_for;
    // Does a part of it.
    std::function<Step()> step;
};

struct Stream {
    int device;
    std::deque<Task> queue;
    // Whether it was ever given a kernel.
    bool computes = false;
    std::shared_ptr<Capture> capture;
    // The nodes that the next one of a capture comes after.
    std::vector<int> tail;

    bool may_go_on() const { return !queue.empty() && (!queue.front().waits_for || queue.front().waits_for->is_done); }
};

struct Event {
    bool has_time;
    // The last time that it was recorded, or null.
    std::shared_ptr<Mark> mark;
    // The capture that it was recorded in, or null, and after which nodes.
    std::shared_ptr<Capture> capture;
    std::vector<int> tail;
};

// All streams of the process, and the time that passes with each piece of work.
struct Streams {
    // Those that may be given something.
    std::set<Stream *> all;
    Chance chance;
    double ms = 0.0;

    // Carries out one part of what may be done next. Where all that is left waits for others than these streams it says so.
    Step step() {
        std::vector<Stream *> ready;
        for (Stream *stream : order()) {
            if (stream->may_go_on()) ready.push_back(stream);
        }
        if (ready.empty()) return Step::NOTHING;
        // Some seeds stay with a stream for long, others change often.
        const bool stays = last && last->may_go_on() && chance.below(16) < stickiness;
        std::size_t next = chance.below(ready.size());
        for (std::size_t i = 0; stays && i < ready.size(); i++) next = ready[i] == last ? i : next;
        for (; !ready.empty(); next = ready.empty() ? 0 : chance.below(ready.size())) {
            Stream *stream = ready[next];
            ready.erase(ready.begin() + (long)next);
            const Step got_on = stream->queue.front().step();
            if (got_on == Step::WAITS) continue;
            last = stream;
            ms += 0.001;
            if (got_on == Step::DONE) stream->queue.pop_front();
            if (stream->queue.empty() && !all.count(stream)) forget(stream);
            return Step::PART;
        }
        return Step::WAITS;
    }

    void seed(std::uint64_t seed) {
        chance.state = seed;
        stickiness = chance.below(16);
    }

    void add(Stream *stream) {
        all.insert(stream);
        made.push_back(stream);
    }

    // A stream is destroyed, and forgotten when it has done what it was given.
    void remove(Stream *stream) {
        all.erase(stream);
        if (stream->queue.empty()) forget(stream);
    }

    // As they were made: addresses differ from run to run.
    const std::vector<Stream *> &order() const { return made; }

private:
    void forget(Stream *stream) {
        for (std::size_t i = 0; i < made.size(); i++) {
            if (made[i] == stream) made.erase(made.begin() + (long)i);
        }
        if (last == stream) last = nullptr;
        delete stream;
    }

    std::vector<Stream *> made;
    Stream *last = nullptr;
    std::uint64_t stickiness = 8;
};

// A graph that runs: its nodes one by one, in an order that chance picks among those that it allows.
struct Run {
    std::shared_ptr<const Nodes> nodes;
    std::vector<bool> done;
    std::size_t left;

    explicit Run(std::shared_ptr<const Nodes> of) : nodes(of), done(of->size(), false), left(of->size()) {}

    Step step(Chance &chance) {
        std::vector<std::size_t> ready;
        for (std::size_t i = 0; i < nodes->size(); i++) {
            bool may = !done[i];
            for (int before : (*nodes)[i].after) may = may && done[(std::size_t)before];
            if (may) ready.push_back(i);
        }
        if (left == 0) return Step::DONE;
        while (!ready.empty()) {
            const std::size_t at = chance.below(ready.size()), i = ready[at];
            ready.erase(ready.begin() + (long)at);
            if (!(*nodes)[i].work()) continue;
            done[i] = true;
            return --left == 0 ? Step::DONE : Step::PART;
        }
        return Step::WAITS;
    }
};

// The nodes that come before any of `tail`, and those themselves.
inline std::set<int> ancestors(const Nodes &nodes, const std::vector<int> &tail) {
    std::set<int> found;
    std::vector<int> open(tail);
    while (!open.empty()) {
        const int node = open.back();
        open.pop_back();
        if (!found.insert(node).second) continue;
        for (int before : nodes[(std::size_t)node].after) open.push_back(before);
    }
    return found;
}
