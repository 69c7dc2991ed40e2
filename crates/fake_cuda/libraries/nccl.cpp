// A stand-in for NCCL: ranks are threads of one process, or streams that run on their own, or processes that opened it in one
// folder. Those hand each other their numbers in files there.
//
// An operation is done when it has come up in the streams of all its ranks: each arrives at a meeting, the last one to come
// does the work for all. Ranks whose operations don't match are refused with an asynchronous error, where NCCL would hang.
//
// Messages are done when both of their ranks have come to them, and those of a group all come up at once, so that none waits for another.
// The first between two ranks isn't given to a stream before both have asked for it, as NCCL connects two ranks when they first need it,
// and until then the communicator is in progress. Messages of a group whose memory overlaps are refused, where NCCL would mix them up.

#include "fake.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <thread>
#include <tuple>

using fake::called;

namespace {

enum Result { OK, CUDA_ERROR, SYSTEM_ERROR, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE, IN_PROGRESS };
enum Type { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, F8A, F8B, N_TYPES };
enum Op { SUM, PRODUCT, MAX, MIN, MEAN, N_OPS };
enum Kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECEIVE };
const char *const KINDS[] = {"ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter", "ncclSend", "ncclRecv"};
const size_t SIZES[N_TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

struct Id {
    char internal[128];
};

struct Config {
    size_t size;
    unsigned magic, version;
    int blocking, clusters, least_blocks, most_blocks;
    const char *network;
    int split_share, traffic_class;
    const char *name;
    int others[6];
    int graph_usage, rma_contexts;
};

struct Comm;

bool is_message(Kind kind) { return kind == SEND || kind == RECEIVE; }

struct Task {
    Kind kind;
    const char *from;
    char *to;
    size_t count;
    int type, op, root; // The peer, for messages.
    double factor;      // What a rank's numbers are multiplied by.
    void *stream;
    long number; // Among the collectives that a communicator has come to, or among the messages of a pair of ranks.
    bool in_graph = false;
};

// Tasks of one communicator that come up in a stream at once.
struct Launch {
    std::shared_ptr<Comm> comm;
    void *stream;
    std::vector<Task> tasks;
};

struct Arrival {
    std::shared_ptr<Comm> comm;
    Task task;
};

struct Meeting {
    std::map<int, Arrival> here; // By rank; for messages 0 sends and 1 receives.
    bool done = false;
};

struct Split {
    int arrived = 0;
    std::map<int, std::tuple<int, int, std::shared_ptr<Comm>>> asked; // Color, key and the new one, by rank.
};

// The ranks that belong together.
struct Clique {
    std::mutex lock;
    int n_ranks = 0;
    std::map<int, std::shared_ptr<Comm>> members;
    std::map<long, std::shared_ptr<Meeting>> collectives;
    std::map<std::tuple<int, int, long>, std::shared_ptr<Meeting>> messages; // From, to, number.
    std::map<std::pair<int, int>, int> asked; // By a message's ranks, which of them have asked for one: 1 to send, 2 to receive.
    std::map<long, Split> splits;
    int finalized = 0;
    std::string folder;         // Where processes meet.
    bool is_of_processes = false;
};

struct Comm {
    std::shared_ptr<Clique> clique; // None until a split has come about.
    int rank = 0, device = -1;
    bool aborted = false, finalizing = false, is_joining = true;
    int error = OK;
    const char *last = "";
    long collectives = 0, splits = 0, outstanding = 0;
    std::map<int, long> sent, received; // By peer.
    std::vector<Launch> connecting;     // What waits for a rank that hasn't asked for a message yet,
    int launching = 0;                  // and how much doesn't any more, and isn't in its stream yet.
    std::vector<Launch> later;          // What goes there when any communicator was asked twice whether it is at rest.
    int looks = 0;
    std::map<int, double> ops;
    int next_op = N_OPS;
    const std::shared_ptr<int> in_graphs = std::make_shared<int>(); // Whoever has a part of a graph with its operations has it, too.
};

struct Registry {
    std::mutex lock;
    std::map<Comm *, std::shared_ptr<Comm>> comms;
    std::map<std::string, std::shared_ptr<Clique>> cliques;
    long ids = 0;
    std::set<std::string> words; // Kept, so that pointers into them stay good.
    const char *last = "";
};

Registry &registry() {
    static Registry *registry = new Registry;
    return *registry;
}

const char *kept(const std::string &words) {
    std::lock_guard<std::mutex> guard(registry().lock);
    registry().last = registry().words.insert(words).first->c_str();
    return registry().last;
}

int refuse(int code, const std::string &words) {
    kept(words);
    return code;
}

std::shared_ptr<Comm> find(Comm *comm) {
    std::lock_guard<std::mutex> guard(registry().lock);
    auto found = registry().comms.find(comm);
    return found == registry().comms.end() ? nullptr : found->second;
}

void remember(const std::shared_ptr<Comm> &comm) {
    std::lock_guard<std::mutex> guard(registry().lock);
    registry().comms[comm.get()] = comm;
    fake::born();
}

void forget(Comm *comm) {
    std::lock_guard<std::mutex> guard(registry().lock);
    if (registry().comms.erase(comm)) fake::died();
}

// With the clique locked.
void fail_all(Clique &clique, const std::string &words) {
    const char *last = kept(words);
    for (auto &member : clique.members) {
        member.second->error = INVALID_USAGE;
        member.second->last = last;
    }
}

double get(const char *from, int type, size_t i) {
    switch (type) {
#define CASE(T, C) case T: { C x; memcpy(&x, from + i * sizeof x, sizeof x); return double(x); }
        CASE(I8, int8_t) CASE(U8, uint8_t) CASE(I32, int32_t) CASE(U32, uint32_t) CASE(F32, float) CASE(F64, double)
#undef CASE
        case F16: case BF16: {
            uint16_t x;
            memcpy(&x, from + i * 2, 2);
            return type == F16 ? fake::from_f16(x) : fake::from_bf16(x);
        }
    }
    return 0;
}

void put(char *to, int type, size_t i, double value) {
    switch (type) {
#define CASE(T, C) case T: { C x = C(value); memcpy(to + i * sizeof x, &x, sizeof x); return; }
        CASE(I8, int8_t) CASE(U8, uint8_t) CASE(I32, int32_t) CASE(U32, uint32_t) CASE(F32, float) CASE(F64, double)
#undef CASE
        case F16: case BF16: {
            uint16_t x = type == F16 ? fake::to_f16(float(value)) : fake::to_bf16(float(value));
            memcpy(to + i * 2, &x, 2);
        }
    }
}

template <class T> T combine(int op, T a, T b) {
    switch (op) {
        case PRODUCT: return a * b;
        case MAX: return std::max(a, b);
        case MIN: return std::min(a, b);
        default: return a + b;
    }
}

// In which order ranks are added, which NCCL chooses for each communicator by where its GPUs lie: here by which the first rank has.
std::vector<const Task *> order_of(const Meeting &meeting) {
    std::vector<const Task *> order;
    for (auto &one : meeting.here) order.push_back(&one.second.task);
    auto &first = meeting.here.begin()->second.comm;
    std::rotate(order.begin(), order.begin() + std::max(first ? first->device : 0, 0) % int(order.size()), order.end());
    return order;
}

// Element `i` of all ranks, reduced.
void reduce_one(Meeting &meeting, const std::vector<const Task *> &order, int type, size_t i, char *to, size_t at) {
    int n = int(meeting.here.size());
    auto &first = meeting.here.begin()->second.task;
    if (type == I64 || type == U64) {
        uint64_t sum = 0;
        bool begun = false;
        for (auto &one : meeting.here) {
            uint64_t x;
            memcpy(&x, one.second.task.from + i * 8, 8);
            if (!begun) sum = x;
            else if (type == I64) sum = uint64_t(combine<int64_t>(first.op, int64_t(sum), int64_t(x)));
            else sum = combine<uint64_t>(first.op, sum, x);
            begun = true;
        }
        if (first.op == MEAN) sum = type == I64 ? uint64_t(int64_t(sum) / n) : sum / n;
        memcpy(to + at * 8, &sum, 8);
        return;
    }
    // A sum of float32 is rounded with each rank that is added.
    double sum = 0;
    for (int k = 0; k < n; k++) {
        const Task &task = *order[k];
        double x = get(task.from, type, i) * task.factor;
        sum = k ? combine<double>(first.op, sum, x) : x;
        if (type == F32) sum = float(sum);
    }
    if (first.op == MEAN) sum /= n;
    put(to, type, at, sum);
}

// Does a collective for all of its ranks; what is written may be what is read.
void collect(Meeting &meeting) {
    const Task &first = meeting.here.begin()->second.task;
    size_t n = meeting.here.size(), size = SIZES[first.type], count = first.count;
    size_t total = first.kind == ALL_GATHER || first.kind == REDUCE_SCATTER ? n * count : count;
    std::vector<char> all(total * size);
    if (first.kind == BROADCAST) {
        memcpy(all.data(), meeting.here[first.root].task.from, all.size());
    } else if (first.kind == ALL_GATHER) {
        for (auto &one : meeting.here) memcpy(all.data() + one.first * count * size, one.second.task.from, count * size);
    } else {
        const auto order = order_of(meeting);
        for (size_t i = 0; i < total; i++) reduce_one(meeting, order, first.type, i, all.data(), i);
    }
    for (auto &one : meeting.here) {
        if (first.kind == REDUCE && one.first != first.root) continue;
        bool parts = first.kind == REDUCE_SCATTER;
        memcpy(one.second.task.to, all.data() + (parts ? one.first * count * size : 0), parts ? count * size : all.size());
    }
}

std::string described(const Task &task) {
    const char *peer = is_message(task.kind) ? " peer=" : " root=";
    return (task.in_graph ? "in a graph count=" : "count=") + std::to_string(task.count) + " type=" + std::to_string(task.type) + " op=" +
           std::to_string(task.op < N_OPS ? task.op : int(N_OPS)) + peer + std::to_string(task.root);
}

// With the clique locked.
void arrive(Clique &clique, const std::shared_ptr<Comm> &comm, const Task &task, std::shared_ptr<Meeting> &meeting) {
    bool message = is_message(task.kind);
    auto pair = task.kind == SEND ? std::make_tuple(comm->rank, task.root, task.number) : std::make_tuple(task.root, comm->rank, task.number);
    auto &slot = message ? clique.messages[pair] : clique.collectives[task.number];
    if (!slot) slot = std::make_shared<Meeting>();
    meeting = slot;
    meeting->here[message ? task.kind == RECEIVE : comm->rank] = Arrival{comm, task};
    if (meeting->here.size() < size_t(message ? 2 : clique.n_ranks)) return;
    for (auto &one : meeting->here)
        if (one.second.comm->aborted) return;
    if (message) clique.messages.erase(pair);
    else clique.collectives.erase(task.number);
    const Arrival &first = meeting->here.begin()->second;
    for (auto &one : meeting->here) {
        const Task &other = one.second.task;
        bool matches = other.count == first.task.count && other.type == first.task.type;
        // NCCL wants an operation to be part of a graph on all ranks or on none.
        matches = matches && other.in_graph == first.task.in_graph;
        if (!message) matches = matches && other.kind == first.task.kind && other.root == first.task.root && std::min<int>(other.op, N_OPS) == std::min<int>(first.task.op, N_OPS);
        if (matches) continue;
        return fail_all(clique, "mismatch: rank " + std::to_string(first.comm->rank) + " asks for " + KINDS[first.task.kind] + " " + described(first.task) +
                                    ", rank " + std::to_string(one.second.comm->rank) + " for " + KINDS[other.kind] + " " + described(other));
    }
    if (message) memcpy(meeting->here[1].task.to, meeting->here[0].task.from, first.task.count * SIZES[first.task.type]);
    else collect(*meeting);
    meeting->done = true;
}

// ---- processes ----

// The folder of a clique, in that of this library.
std::string folder_of(const std::string &id) {
    Dl_info own;
    dladdr(reinterpret_cast<void *>(&folder_of), &own);
    const std::string path = own.dli_fname;
    const std::string all = path.substr(0, path.rfind('/')) + "/nccl";
    mkdir(all.c_str(), 0700);
    std::string name = id.substr(0, id.find('\0'));
    std::replace(name.begin(), name.end(), ' ', '-');
    const std::string folder = all + "/" + name;
    mkdir(folder.c_str(), 0700);
    return folder;
}

// Whoever finds the file finds all of it.
void write_file(const std::string &path, const std::string &bytes) {
    const std::string unfinished = path + "." + std::to_string(getpid());
    std::ofstream(unfinished, std::ios::binary) << bytes;
    rename(unfinished.c_str(), path.c_str());
}

bool read_file(const std::string &path, std::string &bytes) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return false;
    bytes.assign(std::istreambuf_iterator<char>(file), {});
    return true;
}

std::string file_of(const Clique &clique, const Task &task, int rank, int from, int to) {
    const bool message = is_message(task.kind);
    const std::string pair = message ? std::to_string(from) + "-" + std::to_string(to) : std::to_string(rank);
    return clique.folder + (message ? "/message-" : "/collective-") + std::to_string(task.number) + "-" + pair;
}

// With the clique locked: whether all of its ranks are there, in whatever process.
bool have_met(Clique &clique) {
    if (int(clique.members.size()) == clique.n_ranks || clique.is_of_processes) return true;
    std::map<std::string, int> devices;
    for (int rank = 0; rank < clique.n_ranks; rank++) {
        std::string device;
        if (!read_file(clique.folder + "/rank-" + std::to_string(rank), device)) return false;
        const auto [other, is_new] = devices.emplace(device, rank);
        if (!is_new) {
            fail_all(clique, "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " + std::to_string(other->second) + " both on CUDA device " + device);
            return true;
        }
    }
    fake::go_on();
    return clique.is_of_processes = true;
}

// What a rank has to say of a task: what it understands by it, and its numbers.
std::string said(const Task &task, size_t n_ranks) {
    const size_t count = task.kind == REDUCE_SCATTER ? task.count * n_ranks : task.count;
    std::string head = std::string(KINDS[task.kind == RECEIVE ? SEND : task.kind]) + " " + std::to_string(task.count) + " " + std::to_string(task.type) + " " +
                       std::to_string(std::min<int>(task.op, N_OPS)) + " " + std::to_string(is_message(task.kind) ? 0 : task.root);
    return head + "\n" + std::to_string(task.factor) + "\n" + (task.from ? std::string(task.from, count * SIZES[task.type]) : "");
}

// With the clique locked: does this rank's part of a task, if all have said theirs.
bool collect_from_files(Clique &clique, Comm &comm, const Task &task) {
    const size_t n = size_t(clique.n_ranks);
    const std::string own = said(task, n);
    const std::string head = own.substr(0, own.find('\n'));
    auto parts = [&](const std::string &text, double &factor) {
        const size_t first = text.find('\n'), second = text.find('\n', first + 1);
        factor = std::stod(text.substr(first + 1, second - first - 1));
        if (text.substr(0, first) != head) fail_all(clique, "mismatch: rank " + std::to_string(comm.rank) + " asks for " + head + ", another for " + text.substr(0, first));
        return text.substr(second + 1);
    };
    // Whoever receives a message takes it away.
    if (task.kind == SEND) return access(file_of(clique, task, 0, comm.rank, task.root).c_str(), F_OK) != 0;
    double factor = 1;
    std::string text;
    if (task.kind == RECEIVE) {
        const std::string message = file_of(clique, task, 0, task.root, comm.rank);
        if (!read_file(message, text)) return false;
        const std::string numbers = parts(text, factor);
        if (comm.error != OK) return true;
        memcpy(task.to, numbers.data(), numbers.size());
        unlink(message.c_str());
        return true;
    }
    std::vector<std::string> numbers(n);
    std::vector<std::vector<char>> elsewhere(n, std::vector<char>(task.count * SIZES[task.type] * n));
    Meeting meeting;
    for (int rank = 0; rank < int(n); rank++) {
        if (!read_file(file_of(clique, task, rank, 0, 0), text)) return false;
        numbers[size_t(rank)] = parts(text, factor);
        Task theirs = task;
        theirs.factor = factor;
        theirs.from = numbers[size_t(rank)].data();
        theirs.to = rank == comm.rank ? task.to : elsewhere[size_t(rank)].data();
        meeting.here[rank] = Arrival{nullptr, theirs};
    }
    if (comm.error == OK) collect(meeting);
    // Whoever is here has done what came before.
    Task before = task;
    if (before.number-- > 0) unlink(file_of(clique, before, comm.rank, 0, 0).c_str());
    return true;
}

// With the clique locked: tells the others of a task.
void tell_of(Clique &clique, const Comm &comm, const Task &task) {
    if (task.kind != RECEIVE) write_file(file_of(clique, task, comm.rank, comm.rank, task.root), said(task, size_t(clique.n_ranks)));
}

// Which one of its communicator's operations this is. They are counted as they come up, so that those of a graph count anew with each launch.
long number_of(Comm &comm, const Task &task) {
    if (!is_message(task.kind)) return comm.collectives++;
    return (task.kind == SEND ? comm.sent : comm.received)[task.root]++;
}

// What a stream does: arrives everywhere, then isn't done before all others have come.
bool perform(const std::shared_ptr<Comm> &comm, std::vector<Task> &tasks, std::vector<std::shared_ptr<Meeting>> &meetings) {
    Clique &clique = *comm->clique;
    std::lock_guard<std::mutex> guard(clique.lock);
    if (meetings.empty()) {
        meetings.resize(tasks.size());
        for (size_t i = 0; i < tasks.size() && !comm->aborted; i++) {
            tasks[i].number = number_of(*comm, tasks[i]);
            if (!clique.is_of_processes) {
                arrive(clique, comm, tasks[i], meetings[i]);
                continue;
            }
            meetings[i] = std::make_shared<Meeting>();
            tell_of(clique, *comm, tasks[i]);
        }
    }
    for (size_t i = 0; i < tasks.size() && clique.is_of_processes && !comm->aborted && comm->error == OK; i++) {
        if (!meetings[i]->done) meetings[i]->done = collect_from_files(clique, *comm, tasks[i]);
    }
    const bool all_done = std::all_of(meetings.begin(), meetings.end(), [](auto &m) { return m && m->done; });
    if (!comm->aborted && comm->error == OK && !all_done) return false;
    // A graph that is launched again meets the others again.
    meetings.clear();
    if (comm->outstanding > 0) comm->outstanding--;
    return true;
}

struct Group {
    int depth = 0;
    std::vector<std::pair<std::shared_ptr<Comm>, Task>> tasks;
    int error = OK;
};
thread_local Group group;

// What NCCL doesn't take in one launch, or mixes up: a message to the rank itself that nobody receives there, memory that is received into
// and used by another message as well.
const char *wrong_among(const std::vector<Task> &tasks, int rank) {
    int to_itself = 0;
    for (const Task &task : tasks) {
        if (is_message(task.kind) && task.root == rank) to_itself += task.kind == SEND ? 1 : -1;
        if (task.kind != RECEIVE) continue;
        for (const Task &other : tasks) {
            if (&other == &task || !is_message(other.kind) || !other.count || !task.count) continue;
            const char *at = other.kind == SEND ? other.from : other.to;
            const bool apart = at + other.count * SIZES[other.type] <= task.to || task.to + task.count * SIZES[task.type] <= at;
            if (!apart) return "messages of a group overlap in memory";
        }
    }
    return to_itself > 0 ? "Trying to send to self without a matching recv" : to_itself < 0 ? "Trying to recv to self without a matching send" : nullptr;
}

// With the clique locked: whether the ranks of all messages have asked for one of that way.
bool is_connected(const Clique &clique, const Launch &launch) {
    return std::all_of(launch.tasks.begin(), launch.tasks.end(), [&](const Task &task) {
        if (!is_message(task.kind) || task.root == launch.comm->rank || task.in_graph) return true;
        const int rank = launch.comm->rank, from = task.kind == SEND ? rank : task.root, to = task.kind == SEND ? task.root : rank;
        const auto asked = clique.asked.find({from, to});
        return asked != clique.asked.end() && asked->second == 3;
    });
}

// Those of all ranks of a clique that wait for nobody any more.
std::vector<Launch> connect(const std::shared_ptr<Clique> &clique) {
    std::vector<Launch> ready;
    std::lock_guard<std::mutex> guard(clique->lock);
    for (auto &member : clique->members) {
        auto &waiting = member.second->connecting;
        for (size_t i = 0; i < waiting.size();) {
            if (!is_connected(*clique, waiting[i])) {
                i++;
                continue;
            }
            member.second->launching++;
            ready.push_back(waiting[i]);
            waiting.erase(waiting.begin() + long(i));
        }
    }
    return ready;
}

bool give(const Launch &launch) {
    {
        std::lock_guard<std::mutex> guard(launch.comm->clique->lock);
        launch.comm->outstanding++;
    }
    const auto meetings = std::make_shared<std::vector<std::shared_ptr<Meeting>>>();
    const auto own = std::make_shared<std::vector<Task>>(launch.tasks);
    const auto in_graph = launch.tasks.front().in_graph ? launch.comm->in_graphs : nullptr;
    const bool taken = fake::enqueue(launch.stream, [comm = launch.comm, own, meetings, in_graph] { return perform(comm, *own, *meetings); });
    std::lock_guard<std::mutex> guard(launch.comm->clique->lock);
    launch.comm->launching--;
    return taken;
}

// Hands the tasks to their streams, one piece of work for each communicator and stream.
int launch() {
    std::vector<std::pair<std::shared_ptr<Comm>, Task>> tasks;
    tasks.swap(group.tasks);
    int error = group.error;
    group.error = OK;
    if (error != OK) return error;
    std::vector<Launch> launches;
    for (auto &[comm, task] : tasks) {
        auto same = std::find_if(launches.begin(), launches.end(), [&, c = comm, s = task.stream](auto &l) { return l.comm == c && l.stream == s; });
        if (same == launches.end()) {
            launches.push_back({comm, task.stream, {}});
            same = launches.end() - 1;
        }
        same->tasks.push_back(task);
        same->tasks.back().in_graph = fake::is_capturing(task.stream);
    }
    std::set<std::shared_ptr<Clique>> cliques;
    for (Launch &launch : launches) {
        Comm &comm = *launch.comm;
        if (const char *wrong = wrong_among(launch.tasks, comm.rank)) return refuse(INVALID_USAGE, wrong);
        std::lock_guard<std::mutex> guard(comm.clique->lock);
        // Processes don't hear when another has asked.
        for (const Task &task : launch.tasks) {
            if (!is_message(task.kind)) continue;
            const bool sends = task.kind == SEND;
            comm.clique->asked[sends ? std::make_pair(comm.rank, task.root) : std::make_pair(task.root, comm.rank)] |= comm.clique->is_of_processes ? 3 : sends ? 1 : 2;
        }
        comm.connecting.push_back(launch);
        cliques.insert(comm.clique);
    }
    // A communicator that doesn't block has a thread of its own do it, so that hardly anything is in its stream when the call returns.
    for (const auto &clique : cliques) {
        for (const Launch &ready : connect(clique)) {
            std::lock_guard<std::mutex> guard(clique->lock);
            ready.comm->later.push_back(ready);
            ready.comm->looks = 0;
        }
    }
    return launches.empty() ? OK : IN_PROGRESS;
}

// Gives streams what the communicator's own thread would have given them by now.
void look(const std::shared_ptr<Comm> &comm) {
    if (!comm->clique) return;
    std::vector<Launch> now;
    {
        std::lock_guard<std::mutex> guard(comm->clique->lock);
        if (comm->later.empty() || ++comm->looks < 2) return;
        now.swap(comm->later);
    }
    for (const Launch &launch : now) {
        if (give(launch)) continue;
        const char *last = kept("the stream takes no work");
        std::lock_guard<std::mutex> guard(comm->clique->lock);
        comm->error = CUDA_ERROR;
        comm->last = last;
    }
}

int state(Comm &comm); // Below.

int check(Comm *raw, Task task) {
    auto comm = find(raw);
    std::string detail = comm ? "rank=" + std::to_string(comm->rank) + " " + described(task) : "";
    if (int code = called(KINDS[task.kind], detail)) return refuse(code, std::string(KINDS[task.kind]) + " was told to fail");
    if (!comm) return refuse(INVALID_ARGUMENT, "no such communicator");
    if (state(*comm) != OK) return refuse(INVALID_USAGE, "the communicator isn't ready");
    if (task.type < 0 || task.type >= N_TYPES) return refuse(INVALID_ARGUMENT, "no such type");
    bool reduces = task.kind == ALL_REDUCE || task.kind == REDUCE || task.kind == REDUCE_SCATTER;
    if (reduces && task.type >= F8A) return refuse(INVALID_ARGUMENT, "no sums of 8-bit floats here");
    {
        std::lock_guard<std::mutex> guard(comm->clique->lock);
        if (task.root < 0 || task.root >= comm->clique->n_ranks) return refuse(INVALID_ARGUMENT, "no such rank");
        task.factor = 1;
        if (reduces && task.op >= N_OPS) {
            auto op = comm->ops.find(task.op);
            if (op == comm->ops.end()) return refuse(INVALID_ARGUMENT, "no such operator");
            task.factor = op->second;
        }
    }
    group.tasks.emplace_back(comm, task);
    return OK;
}

// A group that has a call which fails comes to nothing.
int issue(Comm *raw, const Task &task) {
    const int code = check(raw, task);
    if (group.depth && code != OK) group.error = code;
    return group.depth || code != OK ? code : launch();
}

// Whether a communicator is at rest.
int state(Comm &comm) {
    if (!comm.clique) return IN_PROGRESS;
    Clique &clique = *comm.clique;
    std::lock_guard<std::mutex> guard(clique.lock);
    if (comm.error != OK) return comm.error;
    if (!have_met(clique)) return IN_PROGRESS;
    if (comm.error != OK) return comm.error;
    if (!comm.connecting.empty() || comm.launching) return IN_PROGRESS;
    if (comm.splits && clique.splits[comm.splits - 1].arrived < clique.n_ranks) return IN_PROGRESS;
    if (comm.finalizing && (clique.finalized < clique.n_ranks || comm.outstanding)) return IN_PROGRESS;
    return OK;
}

// With the clique locked; whether the rank may belong to it.
bool enter(Clique &clique, const std::shared_ptr<Comm> &comm) {
    for (auto &other : clique.members) {
        if (comm->device < 0 || other.second->device != comm->device) continue;
        clique.members[comm->rank] = comm;
        fail_all(clique, "Duplicate GPU detected : rank " + std::to_string(comm->rank) + " and rank " + std::to_string(other.first) +
                             " both on CUDA device " + std::to_string(comm->device));
        return false;
    }
    clique.members[comm->rank] = comm;
    return true;
}

} // namespace

FAKE_EXPORT int ncclGetVersion(int *version) {
    if (int code = called("ncclGetVersion")) return code;
    *version = 23007;
    return OK;
}

FAKE_EXPORT const char *ncclGetErrorString(int code) {
    const char *const words[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument", "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
    return code >= 0 && code <= IN_PROGRESS ? words[code] : "unknown result code";
}

FAKE_EXPORT const char *ncclGetLastError(Comm *raw) {
    auto comm = find(raw);
    if (comm && *comm->last) return comm->last;
    std::lock_guard<std::mutex> guard(registry().lock);
    return registry().last;
}

FAKE_EXPORT int ncclGetUniqueId(Id *id) {
    if (int code = called("ncclGetUniqueId")) return code;
    std::lock_guard<std::mutex> guard(registry().lock);
    memset(id->internal, 0, sizeof id->internal);
    std::string text = "stand-in " + std::to_string(getpid()) + " " + std::to_string(++registry().ids);
    memcpy(id->internal, text.data(), text.size());
    return OK;
}

FAKE_EXPORT int ncclCommInitRankConfig(Comm **out, int n_ranks, Id id, int rank, Config *config) {
    const std::string graphs = config && config->size >= sizeof *config ? " graphs=" + std::to_string(config->graph_usage) : "";
    if (int code = called("ncclCommInitRankConfig", "rank=" + std::to_string(rank) + " of=" + std::to_string(n_ranks) + graphs)) return code;
    if (!config || config->magic != 0xcafebeef) return refuse(INVALID_ARGUMENT, "the config isn't initialised");
    if (config->blocking != 0) return refuse(INVALID_USAGE, "this stand-in doesn't block");
    if (config->size >= sizeof *config && config->version >= 22900 && config->rma_contexts != INT_MIN && config->rma_contexts <= 0)
        return refuse(INVALID_ARGUMENT, "as many contexts can't be");
    std::string name(id.internal, sizeof id.internal);
    std::shared_ptr<Clique> clique;
    {
        std::lock_guard<std::mutex> guard(registry().lock);
        auto &slot = registry().cliques[name];
        if (!slot) slot = std::make_shared<Clique>();
        clique = slot;
    }
    auto comm = std::make_shared<Comm>();
    comm->clique = clique;
    comm->rank = rank;
    comm->device = fake::current_device();
    std::lock_guard<std::mutex> guard(clique->lock);
    if (clique->n_ranks && clique->n_ranks != n_ranks) return refuse(INVALID_USAGE, "ranks disagree on how many they are");
    if (clique->members.count(rank)) return refuse(INVALID_USAGE, "rank " + std::to_string(rank) + " joins twice");
    clique->n_ranks = n_ranks;
    clique->folder = folder_of(name);
    if (enter(*clique, comm)) write_file(clique->folder + "/rank-" + std::to_string(rank), std::to_string(comm->device));
    remember(comm);
    *out = comm.get();
    return IN_PROGRESS;
}

FAKE_EXPORT int ncclCommGetAsyncError(Comm *raw, int *error) {
    if (int code = called("ncclCommGetAsyncError")) {
        kept("an asynchronous error was asked for");
        *error = code;
        return OK;
    }
    auto comm = find(raw);
    if (!comm) return refuse(INVALID_ARGUMENT, "no such communicator");
    // Each has a thread of its own.
    std::vector<std::shared_ptr<Comm>> all;
    {
        std::lock_guard<std::mutex> guard(registry().lock);
        for (const auto &one : registry().comms) all.push_back(one.second);
    }
    for (const auto &one : all) look(one);
    *error = state(*comm);
    return OK;
}

FAKE_EXPORT int ncclCommCount(Comm *raw, int *count) {
    if (int code = called("ncclCommCount")) return code;
    *count = find(raw)->clique->n_ranks;
    return OK;
}

FAKE_EXPORT int ncclCommUserRank(Comm *raw, int *rank) {
    if (int code = called("ncclCommUserRank")) return code;
    *rank = find(raw)->rank;
    return OK;
}

FAKE_EXPORT int ncclCommAbort(Comm *raw) {
    auto comm = find(raw);
    int code = called("ncclCommAbort", comm ? "rank=" + std::to_string(comm->rank) : "");
    if (!comm) return refuse(INVALID_ARGUMENT, "no such communicator");
    if (comm->clique) {
        std::lock_guard<std::mutex> guard(comm->clique->lock);
        comm->aborted = true;
        comm->connecting.clear();
        comm->launching -= int(comm->later.size());
        comm->later.clear();
    }
    // As the library does it, which then waits for all graphs that know of it.
    while (comm->in_graphs.use_count() > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    forget(raw);
    return code;
}

FAKE_EXPORT int ncclCommFinalize(Comm *raw) {
    auto comm = find(raw);
    if (int code = called("ncclCommFinalize", comm ? "rank=" + std::to_string(comm->rank) : "")) return code;
    if (!comm || comm->finalizing) return refuse(INVALID_ARGUMENT, "no such communicator");
    std::lock_guard<std::mutex> guard(comm->clique->lock);
    comm->finalizing = true;
    comm->clique->finalized++;
    return IN_PROGRESS;
}

FAKE_EXPORT int ncclCommDestroy(Comm *raw) {
    auto comm = find(raw);
    int code = called("ncclCommDestroy", comm ? "rank=" + std::to_string(comm->rank) : "");
    if (!comm) return refuse(INVALID_ARGUMENT, "no such communicator");
    forget(raw);
    return code;
}

FAKE_EXPORT int ncclCommSplit(Comm *raw, int color, int key, Comm **out, Config *) {
    if (int code = called("ncclCommSplit", "color=" + std::to_string(color) + " key=" + std::to_string(key))) return code;
    auto parent = find(raw);
    if (!parent) return refuse(INVALID_ARGUMENT, "no such communicator");
    Clique &clique = *parent->clique;
    std::lock_guard<std::mutex> guard(clique.lock);
    Split &split = clique.splits[parent->splits++];
    std::shared_ptr<Comm> child;
    if (color >= 0) {
        child = std::make_shared<Comm>();
        child->device = parent->device;
        remember(child);
    }
    *out = child.get();
    split.asked[parent->rank] = {color, key, child};
    if (++split.arrived < clique.n_ranks) return IN_PROGRESS;
    std::map<int, std::vector<std::pair<std::pair<int, int>, std::shared_ptr<Comm>>>> colors;
    for (auto &[rank, asked] : split.asked)
        if (std::get<2>(asked)) colors[std::get<0>(asked)].push_back({{std::get<1>(asked), rank}, std::get<2>(asked)});
    for (auto &of : colors) {
        std::sort(of.second.begin(), of.second.end());
        auto made = std::make_shared<Clique>();
        made->n_ranks = int(of.second.size());
        for (size_t i = 0; i < of.second.size(); i++) {
            of.second[i].second->rank = int(i);
            made->members[int(i)] = of.second[i].second;
        }
        for (auto &member : made->members) member.second->clique = made;
    }
    split.asked.clear();
    return IN_PROGRESS;
}

FAKE_EXPORT int ncclGroupStart() {
    if (int code = called("ncclGroupStart")) return code;
    group.depth++;
    return OK;
}

FAKE_EXPORT int ncclGroupEnd() {
    int code = called("ncclGroupEnd");
    if (group.depth == 0) return refuse(INVALID_USAGE, "ncclGroupEnd without ncclGroupStart");
    if (--group.depth) return code;
    if (code) {
        group.tasks.clear();
        group.error = OK;
        return refuse(code, "ncclGroupEnd was told to fail");
    }
    return launch();
}

FAKE_EXPORT int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, Comm *raw) {
    if (int code = called("ncclRedOpCreatePreMulSum")) return code;
    auto comm = find(raw);
    if (!comm || residence != 1) return refuse(INVALID_ARGUMENT, "a factor on the host would do");
    std::lock_guard<std::mutex> guard(comm->clique->lock);
    *op = comm->next_op++;
    comm->ops[*op] = get(static_cast<const char *>(scalar), type, 0);
    fake::born();
    return OK;
}

FAKE_EXPORT int ncclRedOpDestroy(int op, Comm *raw) {
    int code = called("ncclRedOpDestroy");
    auto comm = find(raw);
    if (!comm) return refuse(INVALID_ARGUMENT, "no such communicator");
    std::lock_guard<std::mutex> guard(comm->clique->lock);
    if (!comm->ops.erase(op)) return refuse(INVALID_ARGUMENT, "no such operator");
    fake::died();
    return code;
}

#define FROM static_cast<const char *>(from)
#define TO static_cast<char *>(to)

FAKE_EXPORT int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
    return issue(comm, {ALL_REDUCE, FROM, TO, count, type, op, 0, 1, stream, 0});
}

FAKE_EXPORT int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, Comm *comm, void *stream) {
    return issue(comm, {REDUCE, FROM, TO, count, type, op, root, 1, stream, 0});
}

FAKE_EXPORT int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, void *stream) {
    return issue(comm, {BROADCAST, FROM, TO, count, type, 0, root, 1, stream, 0});
}

FAKE_EXPORT int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, void *stream) {
    return issue(comm, {ALL_GATHER, FROM, TO, count, type, 0, 0, 1, stream, 0});
}

FAKE_EXPORT int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
    return issue(comm, {REDUCE_SCATTER, FROM, TO, count, type, op, 0, 1, stream, 0});
}

FAKE_EXPORT int ncclSend(const void *from, size_t count, int type, int peer, Comm *comm, void *stream) {
    return issue(comm, {SEND, FROM, nullptr, count, type, 0, peer, 1, stream, 0});
}

FAKE_EXPORT int ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, void *stream) {
    return issue(comm, {RECEIVE, nullptr, TO, count, type, 0, peer, 1, stream, 0});
}
