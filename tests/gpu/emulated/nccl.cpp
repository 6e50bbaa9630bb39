// NCCL's collectives between processes of one machine, through files in a folder that the unique id names.
//
// A call is only begun, in the order of its stream: it ends when all ranks are in it.  Ranks that are not in the same
// call, or with other sizes, get an asynchronous error, of which stderr names both calls; so does one that waits for
// more than a minute, and one that runs beside the call before it, for nothing orders their streams.  A call with an
// error never ends, until it is aborted, and then leaves its values as they are.
//
// The first call between two ranks connects them, in the host.
//
// A call that is begun while EMULATED_NCCL_FAILS is set gets an asynchronous error; with EMULATED_NCCL_KILLS it kills its
// process.  A process with EMULATED_NCCL_STOPS stops when it is to connect two ranks.
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <unistd.h>
#include <vector>

enum { WAITS = -1, SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
enum { SUM, PRODUCT, MAX, MIN, AVERAGE };
struct Id { char text[128]; };
struct Communicator {
    std::string folder;
    int rank, size;
    long call = 0;
    std::map<int, long> sent, received;  // by the other rank
    std::set<std::string> connected;     // pairs
    std::atomic<bool> is_aborted{false};
    std::atomic<int> error{SUCCESS};
    long begun = 0, last = 0;  // groups of calls; the number of the last one's work
    std::atomic<long> ended{0};
    std::chrono::steady_clock::time_point since;  // when the present group began
};
using Step = std::function<int()>;  // of a call; WAITS: for another rank, and is run again

extern "C" long emulated_begin(void* stream, std::function<bool()> run);  // of runtime.cpp
extern "C" void emulated_wait(long number);

static thread_local int depth = 0;
static thread_local std::vector<Step> sends, others;  // of the group
static thread_local std::set<std::pair<int, int>> pairs;
static thread_local Communicator* group_of;
static thread_local void* group_stream;

static int failed(int error, const std::string& text) {
    fprintf(stderr, "emulated NCCL: %s\n", text.c_str());
    return error;
}

// A file: what call it is of, a zero byte, and the values.
static void write(const std::string& path, const std::string& call, const void* values, size_t bytes) {
    std::ofstream file(path + ".part", std::ios::binary);
    file.write(call.c_str(), call.size() + 1).write((const char*)values, bytes);
    file.close();
    std::filesystem::rename(path + ".part", path);  // at once: who sees it may read it
}
static int read(Communicator* own, const std::string& path, const std::string& call, std::string& values) {
    if (!std::filesystem::exists(path)) {
        if (std::chrono::steady_clock::now() - own->since < std::chrono::minutes(1)) return WAITS;
        return failed(SYSTEM_ERROR, "rank " + std::to_string(own->rank) + " waits in " + call + " for " + path);
    }
    std::ifstream file(path, std::ios::binary);
    std::string found;
    std::getline(file, found, '\0');
    if (found != call) return failed(INVALID_USAGE, "rank " + std::to_string(own->rank) + " is in " + call + "; " + path + " in " + found);
    values.assign(std::istreambuf_iterator<char>(file), {});
    return SUCCESS;
}

// The steps of a group, one after another, as one work of a stream.
static int begin(Communicator* own, void* stream, std::vector<Step> steps) {
    long number = own->begun++;
    bool fails = getenv("EMULATED_NCCL_FAILS"), kills = getenv("EMULATED_NCCL_KILLS");
    size_t at = 0;
    bool has_begun = false;
    own->last = emulated_begin(stream, [=]() mutable {
        if (!has_begun) own->since = std::chrono::steady_clock::now(), has_begun = true;
        if (number != own->ended && !own->error)
            own->error = failed(INVALID_USAGE, "rank " + std::to_string(own->rank) + " has two calls at a time");
        if (kills) raise(SIGKILL);
        if (fails && !own->error) own->error = REMOTE_ERROR;
        while (at < steps.size() && !own->error && !own->is_aborted) {
            int error = steps[at]();
            if (error == WAITS) return false;
            own->error = error, at++;
        }
        if (own->error && !own->is_aborted) return false;
        own->ended++;
        return true;
    });
    return own->last < 0 ? INVALID_ARGUMENT : SUCCESS;
}
static int run(bool is_send, Communicator* own, void* stream, Step step) {
    if (!depth) return begin(own, stream, {step});
    (is_send ? sends : others).push_back(step);
    group_of = own, group_stream = stream;
    return SUCCESS;
}

// A call of all ranks: `use` gets what each has given.
static Step together(Communicator* own, const std::string& call, const void* given, size_t bytes,
                     std::function<void(const std::vector<std::string>&)> use) {
    std::vector<std::string> all;
    return [=]() mutable {
        auto path = [=](long number, int rank) { return own->folder + "/" + std::to_string(number) + "." + std::to_string(rank); };
        if (all.empty()) write(path(own->call, own->rank), call, given, bytes), all.emplace_back();
        for (int rank = all.size() - 1; rank < own->size; rank++, all.emplace_back())
            if (int error = read(own, path(own->call, rank), call, all[rank])) return error;
        all.pop_back();
        use(all);
        if (own->call) std::filesystem::remove(path(own->call - 1, own->rank));  // all have come here, and so read it
        own->call++;
        return int(SUCCESS);
    };
}

template <class T> static void reduce_as(const std::vector<std::string>& all, int op, T* to, size_t first, size_t count) {
    for (size_t i = 0; i < count; i++) {
        T total = ((const T*)all[0].data())[first + i];
        for (size_t rank = 1; rank < all.size(); rank++) {
            T next = ((const T*)all[rank].data())[first + i];
            total = op == PRODUCT ? total * next : op == MAX ? std::max(total, next) : op == MIN ? std::min(total, next) : total + next;
        }
        to[i] = op == AVERAGE ? total / (T)all.size() : total;
    }
}
static const char* NAMES[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"};
static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8};
static void reduce(const std::vector<std::string>& all, int type, int op, void* to, size_t first, size_t count) {
    switch (type) {
    case 0: return reduce_as(all, op, (int8_t*)to, first, count);
    case 1: return reduce_as(all, op, (uint8_t*)to, first, count);
    case 2: return reduce_as(all, op, (int32_t*)to, first, count);
    case 3: return reduce_as(all, op, (uint32_t*)to, first, count);
    case 4: return reduce_as(all, op, (int64_t*)to, first, count);
    case 5: return reduce_as(all, op, (uint64_t*)to, first, count);
    case 6: return reduce_as(all, op, (_Float16*)to, first, count);
    case 7: return reduce_as(all, op, (float*)to, first, count);
    case 8: return reduce_as(all, op, (double*)to, first, count);
    }
}
static std::string text(const char* name, size_t count, int type, int op = -1, int root = -1) {
    char line[200];
    snprintf(line, sizeof line, "%s(count=%zu, dtype=%s, op=%d, root=%d)", name, count, NAMES[type], op, root);
    return line;
}
#define CHECK(type, op) \
    if (type < 0 || type > 8 || op < 0 || op > AVERAGE) return failed(INVALID_ARGUMENT, "a dtype or reduction that there is not")

// The last rank takes the folder away: others may have something to read still.
static void leave(Communicator* own) {
    auto left = [=](int rank) { return own->folder + "/left." + std::to_string(rank); };
    write(left(own->rank), "", nullptr, 0);
    for (int rank = 0; rank < own->size; rank++) if (!std::filesystem::exists(left(rank))) return;
    std::error_code ignored;  // two ranks may be the last one
    std::filesystem::remove_all(own->folder, ignored);
}

static std::string between(Communicator* own, int from, int to, const std::string& what) {
    return own->folder + "/" + std::to_string(from) + "-" + std::to_string(to) + "." + what;
}
static void connect(Communicator* own, int from, int to) {
    if (!own->connected.insert(between(own, from, to, "")).second) return;
    if (getenv("EMULATED_NCCL_STOPS")) raise(SIGSTOP);
    write(between(own, from, to, own->rank == from ? "sender" : "receiver"), "", nullptr, 0);
    while (!std::filesystem::exists(between(own, from, to, own->rank == from ? "receiver" : "sender"))) usleep(100);
}

extern "C" {
int ncclGetVersion(int* version) { *version = 23203; return SUCCESS; }
const char* ncclGetErrorString(int) { return "emulated NCCL's error, told on stderr"; }
int ncclGetUniqueId(Id* id) {
    memset(id, 0, sizeof *id);
    strcpy(id->text, (std::filesystem::temp_directory_path() / "mpidist-emulated-nccl-XXXXXX").c_str());
    return mkdtemp(id->text) ? SUCCESS : SYSTEM_ERROR;
}
int ncclCommInitRankConfig(Communicator** made, int size, Id id, int rank, void*) {
    *made = new Communicator{id.text, rank, size};
    Step step = together(*made, "init(size=" + std::to_string(size) + ")", nullptr, 0, [](auto&) {});
    (*made)->since = std::chrono::steady_clock::now();
    int error;
    while ((error = step()) == WAITS) usleep(100);
    return error;
}
int ncclCommDestroy(Communicator* own) {
    emulated_wait(own->last);
    int error = own->error;
    leave(own);
    delete own;
    return error;
}
int ncclCommAbort(Communicator* own) { own->is_aborted = true; leave(own); return SUCCESS; }  // a call may have it still
int ncclCommGetAsyncError(Communicator* own, int* error) { *error = own->error; return SUCCESS; }
int ncclCommCount(Communicator* own, int* size) { *size = own->size; return SUCCESS; }
int ncclCommUserRank(Communicator* own, int* rank) { *rank = own->rank; return SUCCESS; }

int ncclGroupStart() { depth++; return SUCCESS; }
int ncclGroupEnd() {
    if (--depth) return SUCCESS;
    sends.insert(sends.end(), others.begin(), others.end());
    std::vector<Step> steps;
    steps.swap(sends), others.clear();
    for (auto [from, to] : pairs) connect(group_of, from, to);
    pairs.clear();
    return steps.empty() ? SUCCESS : begin(group_of, group_stream, steps);
}
int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, Communicator* own, void* stream) {
    CHECK(type, op);
    return run(false, own, stream, together(own, text("allReduce", count, type, op), from, count * SIZES[type],
               [=](auto& all) { reduce(all, type, op, to, 0, count); }));
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, Communicator* own, void* stream) {
    CHECK(type, op);
    return run(false, own, stream, together(own, text("reduceScatter", count, type, op), from, own->size * count * SIZES[type],
               [=](auto& all) { reduce(all, type, op, to, own->rank * count, count); }));
}
int ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, Communicator* own, void* stream) {
    CHECK(type, op);
    return run(false, own, stream, together(own, text("reduce", count, type, op, root), from, count * SIZES[type],
                    [=](auto& all) { if (own->rank == root) reduce(all, type, op, to, 0, count); }));
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Communicator* own, void* stream) {
    CHECK(type, 0);
    return run(false, own, stream, together(own, text("broadcast", count, type, -1, root), from, own->rank == root ? count * SIZES[type] : 0,
                    [=](auto& all) { memcpy(to, all[root].data(), all[root].size()); }));
}
int ncclAllGather(const void* from, void* to, size_t count, int type, Communicator* own, void* stream) {
    CHECK(type, 0);
    const size_t bytes = count * SIZES[type];
    return run(false, own, stream, together(own, text("allGather", count, type), from, bytes, [=](auto& all) {
        for (size_t rank = 0; rank < all.size(); rank++) memcpy((char*)to + rank * bytes, all[rank].data(), bytes);
    }));
}
int ncclSend(const void* from, size_t count, int type, int peer, Communicator* own, void* stream) {
    CHECK(type, 0);
    pairs.emplace(own->rank, peer);
    return run(true, own, stream, [=] {
        write(between(own, own->rank, peer, std::to_string(own->sent[peer]++)), text("send", count, type), from, count * SIZES[type]);
        return int(SUCCESS);
    });
}
int ncclRecv(void* to, size_t count, int type, int peer, Communicator* own, void* stream) {
    CHECK(type, 0);
    pairs.emplace(peer, own->rank);
    return run(false, own, stream, [=] {
        std::string values, path = between(own, peer, own->rank, std::to_string(own->received[peer]));
        if (int error = read(own, path, text("send", count, type), values)) return error;
        memcpy(to, values.data(), values.size());
        own->received[peer]++;
        std::filesystem::remove(path);
        return int(SUCCESS);
    });
}
// CuPy's module does not load without these
int ncclCommSplit() { return INVALID_USAGE; }
int ncclCommInitAll() { return INVALID_USAGE; }
int ncclCommCuDevice() { return INVALID_USAGE; }
int ncclBcast() { return INVALID_USAGE; }
}
