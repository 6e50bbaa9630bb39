// CUDA's runtime and driver as CuPy calls them, in the host's memory.
//
// Works are done by other threads, each after a delay, in no other order than that of streams and events; the host
// waits where CUDA documents it.  What is not here fails as it does without a GPU.  Numbers are those of CUDA 13's
// headers.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_HANDLE = 400, NOT_FOUND = 500,
       NOT_READY = 600 };
enum { HOST = 1, DEVICE = 2 };  // kinds of memory
enum { UNSET = 0xCB, FREED = 0xFD };  // bytes of memory that was never written, or is given back: both are seen
enum { TO_DEVICE = 1, TO_HOST = 2, ON_DEVICE = 3 };  // kinds of copies

struct Memory { char* end; int kind, device; };
static auto& memories = *new std::map<char*, Memory>;  // by the first byte; for ever, as all that threads use
static auto& mutex = *new std::mutex;  // of memories, streams and works
using Lock = std::unique_lock<std::mutex>;
static thread_local int device = 0;
static thread_local int last_error = SUCCESS;

static int failed(int error) { return last_error = error; }
static int number_of(const char* variable, int otherwise) {
    const char* text = getenv(variable);
    return text ? atoi(text) : otherwise;
}
static int devices() { return number_of("EMULATED_GPUS", 2); }

// -- streams and their works; functions that are given the lock may let go of it while they wait -------------------------
using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
struct Stream { int device; bool is_default, is_blocking; long last; };  // `last`: the number of its last work
struct Event { long last; int device; std::shared_ptr<Clock::time_point> time; };  // `last`: the number of the work that it is recorded as, 0 for none
struct Work {
    std::function<bool()> run;  // false: it waits for another rank, and is run again
    std::vector<long> before, behind;  // works that it waits for, and that wait for it
    int missing;  // how many of `before` are not done
    microseconds delay;
    bool is_needed;  // the host waits for it
    Clock::time_point start;
};
static auto& works = *new std::map<long, Work>;  // by number, those that are not done
static auto& ready = *new std::vector<long>;  // those that wait for no other
static auto& streams = *new std::map<void*, Stream*>;  // by handle
static auto& all_streams = *new std::vector<Stream*>;  // also without a handle any more
static auto& is_ready = *new std::condition_variable;
static auto& is_done = *new std::condition_variable;
static long numbers = 0;
enum { THREADS = 3, MOST_WORKS = 1000 };

static uint32_t random_number() {
    static std::mt19937 generator(number_of("EMULATED_SEED", 0) * 1000 + number_of("OMPI_COMM_WORLD_RANK", 0));
    return generator();
}
// Half of all works have no delay; some have a longer one than the host needs to begin those behind them.
static microseconds random_delay() {
    uint32_t kind = random_number() % 64;
    return microseconds(kind >= 32 ? 0 : kind ? random_number() % 100 : random_number() % 4000);
}
static void set_ready(long number, Work& work) {
    work.start = Clock::now() + (work.is_needed ? microseconds(0) : work.delay);
    ready.push_back(number);
    is_ready.notify_one();
}
static void do_works() {
    for (Lock lock(mutex);;) {
        auto now = Clock::now(), next = now + std::chrono::seconds(1);
        size_t chosen = 0, due = 0;
        for (size_t i = 0; i < ready.size(); i++) {
            auto start = works[ready[i]].start;
            if (start > now) next = std::min(next, start);
            else if (random_number() % ++due == 0) chosen = i;
        }
        if (!due) { is_ready.wait_until(lock, next); continue; }
        long number = ready[chosen];
        ready.erase(ready.begin() + chosen);
        Work& work = works[number];
        lock.unlock();
        bool has_ended = work.run();
        lock.lock();
        if (!has_ended) { work.start = Clock::now() + microseconds(100), ready.push_back(number); continue; }
        for (long each : work.behind) if (!--works[each].missing) set_ready(each, works[each]);
        works.erase(number);
        is_done.notify_all();
    }
}
static void need(long number) {  // delays are over where the host waits: what it does not wait for comes later
    auto found = works.find(number);
    if (found == works.end() || found->second.is_needed) return;
    found->second.is_needed = true, found->second.start = std::min(found->second.start, Clock::now());
    for (long each : found->second.before) need(each);
}
static void wait(Lock& lock, long number) {
    need(number), is_ready.notify_one();
    is_done.wait(lock, [=] { return !works.count(number); });
}
static void wait_for_all(Lock& lock) {
    for (long last = numbers; !works.empty() && works.begin()->first <= last;) wait(lock, works.begin()->first);
}
static Stream* made_stream(int of_device, bool is_default, bool is_blocking) {
    all_streams.push_back(new Stream{of_device, is_default, is_blocking, 0});
    return all_streams.back();
}
static Stream* stream_at(void* handle) {  // null if it was destroyed
    static auto& defaults = *new std::map<int, Stream*>;  // by device
    if (!handle && !defaults[device]) defaults[device] = made_stream(device, true, true);
    return handle ? streams[handle] : defaults[device];
}
static long begin(Lock& lock, Stream* stream, std::function<bool()> run, long event = 0) {
    static bool has_threads = false;
    for (; !has_threads; has_threads = true) for (int i = 0; i < THREADS; i++) std::thread(do_works).detach();
    is_done.wait(lock, [] { return works.size() < MOST_WORKS; });
    std::vector<long> before = {stream->last, event};
    for (Stream* each : all_streams)
        if (each->device == stream->device && each->is_blocking && stream->is_blocking && each->is_default != stream->is_default)
            before.push_back(each->last);
    Work& work = works[++numbers];
    work = {run, before, {}, 0, random_delay(), false, {}};
    for (long each : before) {
        auto found = works.find(each);
        if (found != works.end()) found->second.behind.push_back(numbers), work.missing++;
    }
    if (!work.missing) set_ready(numbers, work);
    return stream->last = numbers;
}
static bool nothing() { return true; }

// -- memory ---------------------------------------------------------------------------------------------------------------
static Memory* memory_at(const void* address, size_t bytes) {
    auto next = memories.upper_bound((char*)address);
    if (next == memories.begin()) return nullptr;
    Memory& memory = std::prev(next)->second;
    return (char*)address + bytes <= memory.end ? &memory : nullptr;
}
static int allocate(void** address, size_t bytes, int kind) {
    Lock lock(mutex);
    char* memory = (char*)aligned_alloc(512, (bytes + 511) / 512 * 512);
    if (!memory) return failed(OUT_OF_MEMORY);
    memset(memory, UNSET, bytes);
    memories[memory] = {memory + bytes, kind, device};
    *address = memory;
    return SUCCESS;
}
static int release(void* address, int kind) {
    Lock lock(mutex);
    if (!address) return SUCCESS;
    wait_for_all(lock);
    auto found = memories.find((char*)address);
    if (found == memories.end() || found->second.kind != kind) return failed(INVALID_VALUE);
    memset(address, FREED, found->second.end - (char*)address);
    free(address);
    memories.erase(found);
    return SUCCESS;
}
static bool is_on_device(const void* address, size_t bytes) {
    Memory* memory = memory_at(address, bytes);
    return memory && memory->kind == DEVICE;
}
// Memory of the host that is not pinned is read before this returns, and written before.
static int copy(void* to, const void* from, size_t bytes, int kind, void* handle, bool is_synchronous) {
    Lock lock(mutex);
    Stream* stream = stream_at(handle);
    if (!stream) return failed(INVALID_HANDLE);
    if (bytes && (kind == TO_DEVICE || kind == ON_DEVICE) != is_on_device(to, bytes) && kind <= ON_DEVICE)
        return failed(INVALID_VALUE);
    if (bytes && (kind == TO_HOST || kind == ON_DEVICE) != is_on_device(from, bytes) && kind <= ON_DEVICE)
        return failed(INVALID_VALUE);
    if (!memory_at(from, bytes)) {
        if (is_synchronous) wait(lock, stream->last);
        auto staged = std::make_shared<std::string>((const char*)from, bytes);
        begin(lock, stream, [=] { memcpy(to, staged->data(), bytes); return true; });
    } else {
        begin(lock, stream, [=] { memmove(to, from, bytes); return true; });
        if (!memory_at(to, bytes) || (is_synchronous && kind != ON_DEVICE)) wait(lock, stream->last);
    }
    return SUCCESS;
}
static int fill(void* to, int value, size_t bytes, void* handle) {
    Lock lock(mutex);
    Stream* stream = stream_at(handle);
    if (!stream) return failed(INVALID_HANDLE);
    if (bytes && !is_on_device(to, bytes)) return failed(INVALID_VALUE);
    begin(lock, stream, [=] { memset(to, value, bytes); return true; });
    return SUCCESS;
}
static int make_stream(void** handle, bool is_blocking) {
    Lock lock(mutex);
    if (!(*handle = malloc(16))) return failed(OUT_OF_MEMORY);
    streams[*handle] = made_stream(device, false, is_blocking);
    return SUCCESS;
}
static int query(long number) {
    Lock lock(mutex);
    need(number), is_ready.notify_one();
    return works.count(number) ? NOT_READY : SUCCESS;
}

// For nccl.cpp.
extern "C" long emulated_begin(void* handle, std::function<bool()> run) {  // -1: there is no such stream
    Lock lock(mutex);
    Stream* stream = stream_at(handle);
    return stream ? begin(lock, stream, run) : -1;
}
extern "C" void emulated_wait(long number) { Lock lock(mutex); wait(lock, number); }

extern "C" {
// -- the runtime, which CuPy has linked in: __init__.py leads its functions here ----------------------------------------
int cudaRuntimeGetVersion(int* version) { *version = 13000; return SUCCESS; }
int cudaDriverGetVersion(int* version) { *version = 13000; return SUCCESS; }
int cudaGetLastError() { int error = last_error; last_error = SUCCESS; return error; }
const char* cudaGetErrorName(int error) {
    switch (error) {
    case INVALID_VALUE: return "cudaErrorInvalidValue";
    case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case INVALID_DEVICE: return "cudaErrorInvalidDevice";
    case INVALID_HANDLE: return "cudaErrorInvalidResourceHandle";
    case NOT_FOUND: return "cudaErrorSymbolNotFound";
    case NOT_READY: return "cudaErrorNotReady";
    }
    return "an error that is not emulated";
}
const char* cudaGetErrorString(int error) { return cudaGetErrorName(error); }

int cudaGetDeviceCount(int* count) { *count = devices(); return SUCCESS; }
int cudaGetDevice(int* number) { *number = device; return SUCCESS; }
int cudaSetDevice(int number) {
    if (number < 0 || number >= devices()) return failed(INVALID_DEVICE);
    device = number;
    return SUCCESS;
}
int cudaDeviceSynchronize() { Lock lock(mutex); wait_for_all(lock); return SUCCESS; }
int cudaDeviceGetAttribute(int* value, int attribute, int) {
    static const std::map<int, int> known = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, INT32_MAX}, {6, 65535}, {7, 65535},  // sizes of blocks and grids
        {8, 48 << 10}, {10, 32}, {16, 16}, {75, 9}, {76, 0}};  // shared memory, warp, multiprocessors, capability
    auto found = known.find(attribute);
    *value = found == known.end() ? 0 : found->second;
    return SUCCESS;
}
int cudaDeviceGetPCIBusId(char* text, int size, int number) {
    snprintf(text, size, "0000:%02X:00.0", 10 + number);
    return SUCCESS;
}
int cudaGetDeviceProperties(void* properties, int number) {
    if (number < 0 || number >= devices()) return failed(INVALID_DEVICE);
    struct Properties {
        char name[256], ids[28];
        size_t memory, shared_memory;
        int registers, warp;
        size_t pitch;
        int threads, rest[171];
    } found = {"Emulated GPU", "", (size_t)8 << 30, 48 << 10, 65536, 32, 0, 1024};
    static_assert(sizeof found == 1008);
    memcpy(properties, &found, sizeof found);
    return SUCCESS;
}
int cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return SUCCESS; }
int cudaDeviceEnablePeerAccess(int, unsigned) { return SUCCESS; }

int cudaMalloc(void** address, size_t bytes) { return allocate(address, bytes, DEVICE); }
int cudaFree(void* address) { return release(address, DEVICE); }
int cudaHostAlloc(void** address, size_t bytes, unsigned) { return allocate(address, bytes, HOST); }
int cudaFreeHost(void* address) { return release(address, HOST); }
int cudaMemGetInfo(size_t* free, size_t* total) { *free = *total = (size_t)8 << 30; return SUCCESS; }
int cudaPointerGetAttributes(void* attributes, const void* address) {
    struct Attributes { int kind, device; const void *on_device, *on_host; };
    Lock lock(mutex);
    Memory* memory = memory_at(address, 0);
    Attributes found = {0, 0, nullptr, address};
    if (memory) found = {memory->kind, memory->device, address, memory->kind == HOST ? address : nullptr};
    *(Attributes*)attributes = found;
    return SUCCESS;
}
int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) { return copy(to, from, bytes, kind, nullptr, true); }
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
    return copy(to, from, bytes, kind, stream, false);
}
int cudaMemset(void* to, int value, size_t bytes) { return fill(to, value, bytes, nullptr); }
int cudaMemsetAsync(void* to, int value, size_t bytes, void* stream) { return fill(to, value, bytes, stream); }

int cudaStreamCreate(void** stream) { return make_stream(stream, true); }
int cudaStreamCreateWithFlags(void** stream, unsigned flags) { return make_stream(stream, !(flags & 1)); }
int cudaStreamCreateWithPriority(void** stream, unsigned flags, int) { return make_stream(stream, !(flags & 1)); }
int cudaStreamDestroy(void* stream) {  // its works are still done
    Lock lock(mutex);
    if (!streams.erase(stream)) return failed(INVALID_HANDLE);
    free(stream);
    return SUCCESS;
}
int cudaStreamSynchronize(void* handle) {
    Lock lock(mutex);
    Stream* stream = stream_at(handle);
    if (!stream) return failed(INVALID_HANDLE);
    wait(lock, stream->last);
    return SUCCESS;
}
int cudaStreamQuery(void* handle) {
    Lock lock(mutex);
    Stream* stream = stream_at(handle);
    lock.unlock();
    return stream ? query(stream->last) : failed(INVALID_HANDLE);
}
int cudaStreamWaitEvent(void* handle, Event* event, unsigned) {
    Lock lock(mutex);
    Stream* stream = stream_at(handle);
    if (!stream || !event) return failed(INVALID_HANDLE);
    begin(lock, stream, nothing, event->last);
    return SUCCESS;
}
int cudaStreamIsCapturing(void*, int* is) { *is = 0; return SUCCESS; }
int cudaEventCreate(Event** event) { *event = new Event{0, device, nullptr}; return SUCCESS; }
int cudaEventCreateWithFlags(Event** event, unsigned) { return cudaEventCreate(event); }
int cudaEventDestroy(Event* event) { delete event; return SUCCESS; }
int cudaEventRecord(Event* event, void* handle) {
    Lock lock(mutex);
    Stream* stream = stream_at(handle);
    if (!stream || !event || stream->device != event->device) return failed(INVALID_HANDLE);
    auto time = event->time = std::make_shared<Clock::time_point>();
    event->last = begin(lock, stream, [time] { *time = Clock::now(); return true; });
    return SUCCESS;
}
int cudaEventQuery(Event* event) { return event ? query(event->last) : failed(INVALID_HANDLE); }
int cudaEventSynchronize(Event* event) {
    Lock lock(mutex);
    if (!event) return failed(INVALID_HANDLE);
    wait(lock, event->last);
    return SUCCESS;
}
int cudaEventElapsedTime(float* milliseconds, Event* from, Event* to) {
    if (!from || !to || !from->time || !to->time) return failed(INVALID_HANDLE);
    *milliseconds = std::chrono::duration<float, std::milli>(*to->time - *from->time).count();
    return SUCCESS;
}

// -- the driver ---------------------------------------------------------------------------------------------------------
int cuGetErrorName(int error, const char** name) { *name = cudaGetErrorName(error); return SUCCESS; }
int cuGetErrorString(int error, const char** text) { return cuGetErrorName(error, text); }
int cuCtxGetCurrent(void** context) { *context = &memories; return SUCCESS; }
int cuCtxGetDevice(int* number) { *number = device; return SUCCESS; }
int cuStreamGetCtx(void*, void** context) { return cuCtxGetCurrent(context); }
int cuFuncGetAttribute(int* value, int, void*) { *value = 1024; return SUCCESS; }

// A module is a shared object, made by kernels.py.
int cuModuleLoadData(void** module, const void* image) {
    const uint64_t* header = (const uint64_t*)image;  // of ELF: the table of sections is the last thing in the file
    const uint16_t* counts = (const uint16_t*)image;
    size_t bytes = header[5] + (size_t)counts[29] * counts[30];
    char path[] = "/tmp/mpidist-emulated-XXXXXX";  // a name of its own, or the loader takes it for one it has
    int file = mkstemp(path);
    if (file < 0 || write(file, image, bytes) != (ssize_t)bytes) return OUT_OF_MEMORY;
    *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!*module) fprintf(stderr, "%s\n", dlerror());
    close(file);
    unlink(path);
    return *module ? SUCCESS : INVALID_VALUE;
}
int cuModuleUnload(void*) { return SUCCESS; }  // a kernel may be held still
struct Kernel { void (*launch)(const unsigned*, void**); const size_t* sizes; };  // `sizes`: of its arguments, and 0
int cuModuleGetFunction(Kernel** function, void* module, const char* name) {
    void* launch = dlsym(module, (std::string("launch_") + name).c_str());
    void* sizes = dlsym(module, (std::string("sizes_") + name).c_str());
    if (!launch || !sizes) return NOT_FOUND;
    *function = new Kernel{(void (*)(const unsigned*, void**))launch, ((const size_t* (*)())sizes)()};
    return SUCCESS;
}
static auto& kernel_mutex = *new std::mutex;  // a kernel has the numbers of its block and thread in static variables
int cuLaunchKernel(Kernel* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned, void* handle, void** arguments, void**) {
    if (!grid_x || !grid_y || !grid_z || !block_x || block_x * block_y * block_z > 1024) return INVALID_VALUE;
    std::vector<std::string> values;
    for (size_t i = 0; kernel->sizes[i]; i++) values.emplace_back((const char*)arguments[i], kernel->sizes[i]);
    return emulated_begin(handle, [=, sizes = std::vector<unsigned>{grid_x, grid_y, grid_z, block_x, block_y, block_z}] {
        std::vector<void*> given;
        for (auto& each : values) given.push_back((void*)each.data());
        std::lock_guard<std::mutex> alone(kernel_mutex);
        kernel->launch(sizes.data(), given.data());
        return true;
    }) < 0 ? INVALID_HANDLE : SUCCESS;
}
// Cycles of the card, for kernels.  Each look takes a while, in which other streams go on.
long long emulated_clock() {
    static long long cycles;
    kernel_mutex.unlock();
    std::this_thread::sleep_for(microseconds(100));
    kernel_mutex.lock();
    return cycles += 1 << 20;
}
}
