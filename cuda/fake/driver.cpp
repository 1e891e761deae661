// A driver of a device that does not exist, so that the Rust side of the backend runs where there is no GPU: the
// functions of libcuda that this project calls, with device memory in this process.
//
// * Physical memory is a range of a memfd; mapping it at an address is a shared mmap, so that one physical allocation
//   can be mapped at several addresses and keeps its contents when it moves. Addresses without memory are PROT_NONE.
// * Fresh memory is filled with 0xFF (NaN in every float type): nothing may rely on its contents.
// * Streams queue their work. It runs late, when somebody waits, in a random order that streams and events allow: a
//   missing wait is a wrong or unmapped read.
// * A kernel is a function of the host, in the library that a test names. One that touches unmapped
//   memory fails with CUDA_ERROR_ILLEGAL_ADDRESS, which every later call returns, as on a device.
//
// What it does not prove: anything about real kernels, real asynchrony, or speed.
#include "fake.h"

#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <fcntl.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

namespace {

enum Code {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
};

struct Event {
    uint64_t recorded = 0, completed = 0;
    double milliseconds = 0;
};

struct Op {
    std::function<void()> run;
    // The work may begin once this event has completed that recording.
    std::shared_ptr<Event> after;
    uint64_t version = 0;
};

struct Stream {
    std::deque<Op> queue;
    bool capturing = false, invalidated = false;
    std::vector<Op> captured;
};

struct Physical {
    int fd = -1;
    off_t offset = 0;
    size_t bytes = 0;
    bool own_fd = false, released = false, shareable = false;
    uint64_t mapped = 0;
    ~Physical();
};

struct Mapping {
    size_t bytes;
    std::shared_ptr<Physical> physical;
    bool access;
};

struct Buffer {
    size_t bytes;
    void* base;
    size_t mapped_bytes;
};

struct Module {
    int unused = 0;
};

struct Function {
    std::string name;
};

struct State {
    std::recursive_mutex lock;
    FakeCounts counts{};
    uint64_t bytes_max = 256ull << 20, granularity = 2 << 20;
    uint64_t seed = 0, random = 0x9E3779B97F4A7C15ull;
    int major = 8, minor = 0, shared_bytes = 163 << 10;
    std::string fail_function;
    uint64_t fail_after = 0;
    bool fail_on = false;
    int fail_code = 0, sticky = OK;
    std::set<Stream*> streams;
    std::map<void*, std::shared_ptr<Event>> events;
    std::map<uint64_t, Buffer> buffers;
    std::map<void*, size_t> pinned;
    std::map<uint64_t, size_t> reservations;
    std::map<uint64_t, Mapping> mappings;
    std::map<uint64_t, std::shared_ptr<Physical>> physical;
    std::set<Module*> modules;
    std::map<std::string, std::unique_ptr<Function>> functions;
    std::map<void*, std::vector<Op>> graphs, execs;
    uint64_t next_handle = 0x1000;
    int memory_fd = -1;
    off_t memory_end = 0;
    double clock_ms = 0;
};

// Never destroyed: other threads may be in a call while the process ends.
State& state() {
    static State* s = new State;
    return *s;
}

Physical::~Physical() {
    if (own_fd) {
        close(fd);
    } else if (fd >= 0) {
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(bytes));
    }
    state().counts.bytes_used -= bytes;
}

thread_local int current_context = 0;
// The stream that this thread captures: until it ends, the thread may neither wait nor allocate.
thread_local Stream* captures = nullptr;
int the_context = 0;

uint64_t random_below(uint64_t n) {
    State& s = state();
    s.random ^= s.random << 13;
    s.random ^= s.random >> 7;
    s.random ^= s.random << 17;
    return s.random % n;
}

// Whether this call is to fail, by injection or since the context is lost.
int refused(const char* function, bool releases = false) {
    State& s = state();
    if (s.fail_after > 0 && (s.fail_function == function || (s.fail_function == "*" && !releases))) {
        bool now = --s.fail_after == 0;
        if (now && s.fail_on) s.fail_after = 1;
        if (now) return s.fail_code;
    }
    return releases ? OK : s.sticky;
}

bool round_bytes(size_t bytes) { return bytes > 0 && bytes % state().granularity == 0; }

// Whether every byte of the range is device memory that may be used.
bool usable(uint64_t address, size_t bytes) {
    State& s = state();
    auto buffer = s.buffers.upper_bound(address);
    if (buffer != s.buffers.begin()) {
        --buffer;
        if (address + bytes <= buffer->first + buffer->second.bytes) return true;
    }
    while (bytes > 0) {
        auto at = s.mappings.upper_bound(address);
        if (at == s.mappings.begin()) return false;
        --at;
        uint64_t end = at->first + at->second.bytes;
        if (address >= end || !at->second.access) return false;
        size_t step = std::min<uint64_t>(bytes, end - address);
        address += step;
        bytes -= step;
    }
    return true;
}

void copy_now(void* to, const void* from, size_t bytes, uint64_t device_a, uint64_t device_b) {
    State& s = state();
    if ((device_a != 0 && !usable(device_a, bytes)) || (device_b != 0 && !usable(device_b, bytes))) {
        s.counts.bad_addresses++;
        s.sticky = ILLEGAL_ADDRESS;
        return;
    }
    memmove(to, from, bytes);
    s.counts.copies_run++;
}

bool runnable(Stream* stream) {
    if (stream->queue.empty()) return false;
    const Op& op = stream->queue.front();
    return !op.after || op.after->completed >= op.version;
}

void run_head(Stream* stream) {
    Op op = std::move(stream->queue.front());
    stream->queue.pop_front();
    state().clock_ms += 0.01;
    if (op.run && state().sticky == OK) op.run();
}

// Runs queued work until `done`. Picks streams at random, or prefers `first` where the schedule is the laziest.
void run_until(Stream* first, const std::function<bool()>& done) {
    State& s = state();
    while (!done()) {
        std::vector<Stream*> ready;
        for (Stream* stream : s.streams) {
            if (runnable(stream)) ready.push_back(stream);
        }
        if (ready.empty()) {
            fprintf(stderr, "fake driver: a wait that nothing can end\n");
            abort();
        }
        Stream* pick = ready[random_below(ready.size())];
        if (s.seed == 0 && first != nullptr && runnable(first)) pick = first;
        run_head(pick);
    }
}

void run_everything() {
    run_until(nullptr, [] {
        for (Stream* stream : state().streams) {
            if (!stream->queue.empty()) return false;
        }
        return true;
    });
}

void enqueue(Stream* stream, Op op) {
    State& s = state();
    if (stream->capturing) {
        stream->captured.push_back(std::move(op));
        return;
    }
    stream->queue.push_back(std::move(op));
    if (s.seed == 1) run_everything();
    // Some of it may run at any time.
    if (s.seed > 1 && random_below(4) == 0 && runnable(stream)) run_head(stream);
}

Stream* find(void* handle) {
    Stream* stream = static_cast<Stream*>(handle);
    return state().streams.count(stream) ? stream : nullptr;
}

int bad_handle() {
    state().counts.bad_handles++;
    return INVALID_HANDLE;
}

// Kernels: built in, for tests of this driver alone, or from the library.
struct FillParams {
    uint64_t address, words;
    uint32_t value, unused;
};

using ShimLaunch = int (*)(const char*, const unsigned*, const unsigned*, unsigned, void**);
using ShimParamsBytes = size_t (*)(const char*);
using ShimError = const char* (*)();
ShimLaunch shim_launch = nullptr;
ShimParamsBytes shim_params_bytes = nullptr;
ShimError shim_error = nullptr;

// Bytes of the kernel's parameter; 0 where there is none of this name.
size_t params_bytes(const char* name) {
    if (strcmp(name, "lagoon_fake_fill") == 0) return sizeof(FillParams);
    return shim_params_bytes == nullptr ? 0 : shim_params_bytes(name);
}

sigjmp_buf kernel_fault;

void on_fault(int) { siglongjmp(kernel_fault, 1); }

void run_kernel(const std::string& name, std::vector<unsigned> shape, unsigned shared, std::vector<uint64_t> params) {
    State& s = state();
    struct sigaction action {}, segv {}, bus {};
    action.sa_handler = on_fault;
    action.sa_flags = SA_NODEFER;
    sigaction(SIGSEGV, &action, &segv);
    sigaction(SIGBUS, &action, &bus);
    int code = 0;
    if (sigsetjmp(kernel_fault, 1) == 0) {
        if (name == "lagoon_fake_fill") {
            const FillParams* fill = reinterpret_cast<const FillParams*>(params.data());
            volatile uint32_t* words = reinterpret_cast<volatile uint32_t*>(fill->address);
            for (uint64_t i = 0; i < fill->words; i++) words[i] = fill->value;
        } else {
            void* pointers[1] = {params.data()};
            code = shim_launch(name.c_str(), shape.data(), shape.data() + 3, shared, pointers);
        }
    } else {
        s.counts.bad_addresses++;
        s.sticky = ILLEGAL_ADDRESS;
    }
    sigaction(SIGSEGV, &segv, nullptr);
    sigaction(SIGBUS, &bus, nullptr);
    if (code != 0) {
        fprintf(stderr, "fake driver: kernel %s: %s (%d)\n", name.c_str(), shim_error ? shim_error() : "", code);
        s.sticky = LAUNCH_FAILED;
    }
    s.counts.kernels_run++;
}

} // namespace

#define LOCK std::lock_guard<std::recursive_mutex> guard(state().lock)
#define ENTER(name)                                                                                                    \
    LOCK;                                                                                                              \
    if (int code = refused(name); code != OK) return code
#define NOT_IN_A_CAPTURE                                                                                               \
    if (captures != nullptr) {                                                                                         \
        captures->invalidated = true;                                                                                  \
        return CAPTURE_UNSUPPORTED;                                                                                    \
    }
#define CURRENT_CONTEXT                                                                                                \
    if (current_context == 0) return INVALID_CONTEXT

extern "C" {

void lagoon_fake_counts(FakeCounts* counts) {
    LOCK;
    State& s = state();
    s.counts.streams = s.streams.size();
    s.counts.events = s.events.size();
    s.counts.buffers = s.buffers.size();
    s.counts.pinned = s.pinned.size();
    s.counts.modules = s.modules.size();
    s.counts.graphs = s.graphs.size() + s.execs.size();
    s.counts.reservations = s.reservations.size();
    s.counts.mappings = s.mappings.size();
    s.counts.physical = s.physical.size();
    *counts = s.counts;
}

void lagoon_fake_fail(const char* function, uint64_t nth, int code) {
    LOCK;
    state().fail_function = function;
    state().fail_after = nth;
    state().fail_code = code;
    state().fail_on = false;
}

void lagoon_fake_fail_from(const char* function, uint64_t nth, int code) {
    LOCK;
    lagoon_fake_fail(function, nth, code);
    state().fail_on = true;
}

void lagoon_fake_memory(uint64_t bytes_max, uint64_t granularity) {
    LOCK;
    state().bytes_max = bytes_max;
    state().granularity = granularity;
}

void lagoon_fake_device(int major, int minor, int shared_bytes) {
    LOCK;
    state().major = major;
    state().minor = minor;
    state().shared_bytes = shared_bytes;
}

void lagoon_fake_schedule(uint64_t seed) {
    LOCK;
    state().seed = seed;
    state().random = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
}

void lagoon_fake_kernels(const char* path) {
    LOCK;
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        fprintf(stderr, "fake driver: %s\n", dlerror());
        abort();
    }
    shim_launch = reinterpret_cast<ShimLaunch>(dlsym(library, "lagoon_shim_launch"));
    shim_params_bytes = reinterpret_cast<ShimParamsBytes>(dlsym(library, "lagoon_shim_params_bytes"));
    shim_error = reinterpret_cast<ShimError>(dlsym(library, "lagoon_shim_error"));
}

// For a library beside the driver: queues `run(context)`, as often as a graph with it is launched; `drop(context)` at the end.
int lagoon_fake_enqueue(void* handle, void (*run)(void*), void (*drop)(void*), void* context) {
    LOCK;
    Stream* stream = find(handle);
    if (stream == nullptr) return bad_handle();
    std::shared_ptr<void> kept(context, drop);
    enqueue(stream, Op{[run, kept] { run(kept.get()); }, nullptr, 0});
    return OK;
}

// Whether work may touch these bytes; if not, the context is lost.
int lagoon_fake_usable(uint64_t address, uint64_t bytes) {
    LOCK;
    if (usable(address, bytes)) return 1;
    state().counts.bad_addresses++;
    state().sticky = ILLEGAL_ADDRESS;
    return 0;
}

int cuInit(unsigned) {
    ENTER("cuInit");
    // For whole programs, which cannot call `lagoon_fake_memory`.
    const char* page = getenv("LAGOON_FAKE_PAGE");
    if (page != nullptr) state().granularity = strtoull(page, nullptr, 10);
    return OK;
}

int cuDriverGetVersion(int* version) {
    ENTER("cuDriverGetVersion");
    *version = 13000;
    return OK;
}

int cuDeviceGetCount(int* count) {
    ENTER("cuDeviceGetCount");
    *count = 1;
    return OK;
}

int cuDeviceGet(int* device, int ordinal) {
    ENTER("cuDeviceGet");
    *device = 0;
    return ordinal == 0 ? OK : INVALID_DEVICE;
}

int cuDeviceGetName(char* name, int bytes, int) {
    ENTER("cuDeviceGetName");
    snprintf(name, static_cast<size_t>(bytes), "Fake device");
    return OK;
}

int cuDeviceTotalMem_v2(size_t* bytes, int) {
    ENTER("cuDeviceTotalMem");
    *bytes = state().bytes_max;
    return OK;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
    ENTER("cuDeviceGetAttribute");
    switch (attribute) {
    case 16: *value = 4; break;           // multiprocessors
    case 75: *value = state().major; break; // compute capability
    case 76: *value = state().minor; break;
    case 97: *value = state().shared_bytes; break; // of a block that opts in
    case 102: *value = 1; break;          // virtual memory management
    case 103: *value = 1; break;          // file descriptors
    case 110: *value = 1; break;          // remote direct access
    default: *value = 0;
    }
    return OK;
}

int cuDevicePrimaryCtxRetain(void** context, int) {
    ENTER("cuDevicePrimaryCtxRetain");
    *context = &the_context;
    state().counts.contexts++;
    return OK;
}

int cuDevicePrimaryCtxRelease_v2(int) {
    LOCK;
    state().counts.contexts--;
    return refused("cuDevicePrimaryCtxRelease", true);
}

int cuCtxSetCurrent(void* context) {
    ENTER("cuCtxSetCurrent");
    current_context = context == nullptr ? 0 : 1;
    return OK;
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    ENTER("cuCtxGetStreamPriorityRange");
    *least = 0;
    *greatest = -5;
    return OK;
}

int cuMemGetInfo_v2(size_t* free, size_t* total) {
    ENTER("cuMemGetInfo");
    *total = state().bytes_max;
    *free = state().bytes_max - std::min(state().bytes_max, state().counts.bytes_used);
    return OK;
}

int cuStreamCreateWithPriority(void** out, unsigned, int) {
    ENTER("cuStreamCreateWithPriority");
    CURRENT_CONTEXT;
    Stream* stream = new Stream;
    state().streams.insert(stream);
    *out = stream;
    return OK;
}

int cuStreamDestroy_v2(void* handle) {
    LOCK;
    Stream* stream = find(handle);
    if (stream == nullptr) return bad_handle();
    run_until(stream, [&] { return stream->queue.empty(); });
    state().streams.erase(stream);
    delete stream;
    return refused("cuStreamDestroy", true);
}

int cuStreamSynchronize(void* handle) {
    ENTER("cuStreamSynchronize");
    NOT_IN_A_CAPTURE;
    Stream* stream = find(handle);
    if (stream == nullptr) return bad_handle();
    run_until(stream, [&] { return stream->queue.empty(); });
    return state().sticky;
}

int cuStreamWaitEvent(void* handle, void* event, unsigned) {
    ENTER("cuStreamWaitEvent");
    Stream* stream = find(handle);
    auto found = state().events.find(event);
    if (stream == nullptr || found == state().events.end()) return bad_handle();
    enqueue(stream, Op{nullptr, found->second, found->second->recorded});
    return OK;
}

int cuEventCreate(void** out, unsigned) {
    ENTER("cuEventCreate");
    CURRENT_CONTEXT;
    auto event = std::make_shared<Event>();
    *out = event.get();
    state().events[event.get()] = event;
    return OK;
}

int cuEventDestroy_v2(void* handle) {
    LOCK;
    if (state().events.erase(handle) == 0) return bad_handle();
    return refused("cuEventDestroy", true);
}

int cuEventRecord(void* handle, void* stream_handle) {
    ENTER("cuEventRecord");
    Stream* stream = find(stream_handle);
    auto found = state().events.find(handle);
    if (stream == nullptr || found == state().events.end()) return bad_handle();
    std::shared_ptr<Event> event = found->second;
    uint64_t version = ++event->recorded;
    enqueue(stream, Op{[event, version] {
                           event->completed = std::max(event->completed, version);
                           event->milliseconds = state().clock_ms;
                       },
                       nullptr, 0});
    return OK;
}

int cuEventSynchronize(void* handle) {
    ENTER("cuEventSynchronize");
    NOT_IN_A_CAPTURE;
    auto found = state().events.find(handle);
    if (found == state().events.end()) return bad_handle();
    std::shared_ptr<Event> event = found->second;
    uint64_t version = event->recorded;
    run_until(nullptr, [&] { return event->completed >= version || state().sticky != OK; });
    return state().sticky;
}

int cuEventQuery(void* handle) {
    ENTER("cuEventQuery");
    NOT_IN_A_CAPTURE;
    auto found = state().events.find(handle);
    if (found == state().events.end()) return bad_handle();
    // Time passes: who polls gets there.
    for (Stream* stream : state().streams) {
        if (random_below(2) == 0 && runnable(stream)) {
            run_head(stream);
            break;
        }
    }
    if (state().sticky != OK) return state().sticky;
    return found->second->completed >= found->second->recorded ? OK : NOT_READY;
}

int cuEventElapsedTime_v2(float* ms, void* from, void* to) {
    ENTER("cuEventElapsedTime");
    auto a = state().events.find(from), b = state().events.find(to);
    if (a == state().events.end() || b == state().events.end()) return bad_handle();
    *ms = static_cast<float>(b->second->milliseconds - a->second->milliseconds);
    return OK;
}

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    ENTER("cuMemAlloc");
    NOT_IN_A_CAPTURE;
    CURRENT_CONTEXT;
    State& s = state();
    if (bytes == 0) return INVALID_VALUE;
    if (s.counts.bytes_used + bytes > s.bytes_max) return OUT_OF_MEMORY;
    // The end lies at a page without access, as near as the alignment of 256 lets it.
    size_t page = 4096, rounded = (bytes + 255) / 256 * 256;
    size_t mapped = (rounded + page - 1) / page * page + page;
    char* base = static_cast<char*>(mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base == MAP_FAILED) return OUT_OF_MEMORY;
    mprotect(base + mapped - page, page, PROT_NONE);
    char* start = base + mapped - page - rounded;
    memset(start, 0xFF, rounded);
    *address = reinterpret_cast<uint64_t>(start);
    s.buffers[*address] = Buffer{bytes, base, mapped};
    s.counts.bytes_used += bytes;
    return OK;
}

int cuMemFree_v2(uint64_t address) {
    LOCK;
    State& s = state();
    auto found = s.buffers.find(address);
    if (found == s.buffers.end()) return bad_handle();
    run_everything();
    munmap(found->second.base, found->second.mapped_bytes);
    s.counts.bytes_used -= found->second.bytes;
    s.buffers.erase(found);
    return refused("cuMemFree", true);
}

int cuMemHostAlloc(void** out, size_t bytes, unsigned) {
    ENTER("cuMemHostAlloc");
    NOT_IN_A_CAPTURE;
    CURRENT_CONTEXT;
    void* at = malloc(bytes);
    memset(at, 0xFF, bytes);
    state().pinned[at] = bytes;
    *out = at;
    return OK;
}

int cuMemFreeHost(void* at) {
    LOCK;
    if (state().pinned.erase(at) == 0) return bad_handle();
    run_everything();
    free(at);
    return refused("cuMemFreeHost", true);
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* handle) {
    ENTER("cuMemcpyHtoDAsync");
    Stream* stream = find(handle);
    if (stream == nullptr) return bad_handle();
    enqueue(stream, Op{[=] { copy_now(reinterpret_cast<void*>(to), from, bytes, to, 0); }, nullptr, 0});
    return OK;
}

int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* handle) {
    ENTER("cuMemcpyDtoHAsync");
    Stream* stream = find(handle);
    if (stream == nullptr) return bad_handle();
    enqueue(stream, Op{[=] { copy_now(to, reinterpret_cast<const void*>(from), bytes, from, 0); }, nullptr, 0});
    return OK;
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* handle) {
    ENTER("cuMemcpyDtoDAsync");
    Stream* stream = find(handle);
    if (stream == nullptr) return bad_handle();
    enqueue(stream, Op{[=] { copy_now(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes, to, from); },
                       nullptr, 0});
    return OK;
}

int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void* handle) {
    ENTER("cuMemsetD8Async");
    Stream* stream = find(handle);
    if (stream == nullptr) return bad_handle();
    enqueue(stream, Op{[=] {
                           std::vector<unsigned char> source(bytes, value);
                           copy_now(reinterpret_cast<void*>(to), source.data(), bytes, to, 0);
                       },
                       nullptr, 0});
    return OK;
}

int cuModuleLoadData(void** out, const void* image) {
    ENTER("cuModuleLoadData");
    CURRENT_CONTEXT;
    if (image == nullptr || *static_cast<const char*>(image) == 0) return INVALID_IMAGE;
    // For whole programs, which cannot call `lagoon_fake_kernels`.
    const char* kernels = getenv("LAGOON_FAKE_KERNELS");
    if (shim_launch == nullptr && kernels != nullptr) lagoon_fake_kernels(kernels);
    Module* module = new Module;
    state().modules.insert(module);
    *out = module;
    return OK;
}

int cuModuleUnload(void* handle) {
    LOCK;
    Module* module = static_cast<Module*>(handle);
    if (state().modules.erase(module) == 0) return bad_handle();
    run_everything();
    delete module;
    return refused("cuModuleUnload", true);
}

int cuModuleGetFunction(void** out, void* module, const char* name) {
    ENTER("cuModuleGetFunction");
    State& s = state();
    if (s.modules.count(static_cast<Module*>(module)) == 0) return bad_handle();
    if (params_bytes(name) == 0) return NOT_FOUND;
    auto& function = s.functions[name];
    if (!function) function = std::make_unique<Function>(Function{name});
    *out = function.get();
    return OK;
}

int cuFuncSetAttribute(void*, int attribute, int value) {
    ENTER("cuFuncSetAttribute");
    return attribute == 8 && value > state().shared_bytes ? INVALID_VALUE : OK;
}

int cuFuncGetAttribute(int* value, int, void*) {
    ENTER("cuFuncGetAttribute");
    *value = 0;
    return OK;
}

// Parameters come as one buffer (`extra`), which says its own size.
int cuLaunchKernel(void* handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream_handle, void** params, void** extra) {
    ENTER("cuLaunchKernel");
    Stream* stream = find(stream_handle);
    if (stream == nullptr) return bad_handle();
    uint64_t threads = uint64_t{bx} * by * bz;
    if (params != nullptr || extra == nullptr || threads == 0 || threads > 1024 || gx == 0 || gy == 0 || gz == 0 ||
        gy > 65535 || gz > 65535 || static_cast<int>(shared) > state().shared_bytes) {
        return INVALID_VALUE;
    }
    if (extra[0] != reinterpret_cast<void*>(1) || extra[2] != reinterpret_cast<void*>(2)) return INVALID_VALUE;
    size_t bytes = *static_cast<size_t*>(extra[3]);
    std::string name = static_cast<Function*>(handle)->name;
    if (bytes != params_bytes(name.c_str())) return INVALID_VALUE;
    std::vector<uint64_t> copy((bytes + 7) / 8);
    memcpy(copy.data(), extra[1], bytes);
    std::vector<unsigned> shape{gx, gy, gz, bx, by, bz};
    enqueue(stream, Op{[=] { run_kernel(name, shape, shared, copy); }, nullptr, 0});
    return OK;
}

int cuStreamBeginCapture_v2(void* handle, int) {
    ENTER("cuStreamBeginCapture");
    Stream* stream = find(handle);
    if (stream == nullptr || stream->capturing || captures != nullptr) return bad_handle();
    captures = stream;
    stream->capturing = true;
    stream->invalidated = false;
    stream->captured.clear();
    return OK;
}

int cuStreamEndCapture(void* handle, void** graph) {
    LOCK;
    Stream* stream = find(handle);
    if (stream == nullptr || !stream->capturing || captures != stream) return bad_handle();
    captures = nullptr;
    stream->capturing = false;
    *graph = nullptr;
    if (int code = refused("cuStreamEndCapture"); code != OK) return code;
    if (stream->invalidated) return CAPTURE_INVALIDATED;
    *graph = reinterpret_cast<void*>(state().next_handle++);
    state().graphs[*graph] = std::move(stream->captured);
    return OK;
}

int cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long) {
    ENTER("cuGraphInstantiateWithFlags");
    auto found = state().graphs.find(graph);
    if (found == state().graphs.end()) return bad_handle();
    *exec = reinterpret_cast<void*>(state().next_handle++);
    state().execs[*exec] = found->second;
    return OK;
}

int cuGraphLaunch(void* exec, void* handle) {
    ENTER("cuGraphLaunch");
    Stream* stream = find(handle);
    auto found = state().execs.find(exec);
    if (stream == nullptr || found == state().execs.end()) return bad_handle();
    for (const Op& op : found->second) enqueue(stream, op);
    return OK;
}

int cuGraphExecDestroy(void* exec) {
    LOCK;
    return state().execs.erase(exec) == 0 ? bad_handle() : refused("cuGraphExecDestroy", true);
}

int cuGraphDestroy(void* graph) {
    LOCK;
    return state().graphs.erase(graph) == 0 ? bad_handle() : refused("cuGraphDestroy", true);
}

} // extern "C"

#include "vmm.inc"
