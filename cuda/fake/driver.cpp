// A driver of a device that does not exist, so that the Rust side of the backend runs where there is no GPU: the
// functions of libcuda that this project calls, with device memory in this process.
//
// * Physical memory is a range of a memfd; mapping it at an address is a shared mmap, so that one physical allocation
//   can be mapped at several addresses and keeps its contents when it moves. Addresses without memory are PROT_NONE.
// * Fresh memory is filled with 0xFF (NaN in every float type): nothing may rely on its contents.
// * Streams queue their work. It runs late, when somebody waits, in a random order that streams and events allow: a
//   missing wait is a wrong or unmapped read.
// * A kernel that is launched as a dependent begins before the one ahead of it at times, which then runs when the first thread
//   waits for it: a read before the wait gets stale bytes.
// * A kernel is a function of the host, in the library that a test names. One that touches unmapped
//   memory fails with CUDA_ERROR_ILLEGAL_ADDRESS, which every later call returns, as on a device.
//
// It proves nothing about real kernels, real asynchrony, or speed.
//
// This file has its state, the functions for tests (fake.h), devices and contexts; the included files fake one part each.
#include "fake.h"

#include "../shim/tensor_map.h"

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
    bool kernel = false;
    // Of a dependent kernel: runs it, and calls what it is given when it waits for the kernel ahead.
    std::function<void(const std::function<void()>&)> early = nullptr;
};

struct Stream {
    std::deque<Op> queue;
    bool capturing = false, invalidated = false;
    // What was queued last is a kernel.
    bool after_kernel = false;
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
    int major = 8, minor = 0, shared_bytes = 163 << 10, driver = 13000;
    // Devices that are seen, the name of the first one, and whether they can access each other's memory. They are all one.
    int devices = 1, uuid = 0;
    bool peers = false, shareable = true, rdma = true, all_turns = false;
    std::string fail_function;
    uint64_t fail_after = 0;
    bool fail_on = false;
    int fail_code = 0, sticky = OK;
    std::string trap;
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

Stream* find(void* handle) {
    Stream* stream = static_cast<Stream*>(handle);
    return state().streams.count(stream) ? stream : nullptr;
}

int bad_handle() {
    state().counts.bad_handles++;
    return INVALID_HANDLE;
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

void lagoon_fake_driver(int version) {
    LOCK;
    state().driver = version;
}

void lagoon_fake_trap(const char* kernels) {
    LOCK;
    state().trap = kernels;
}

void lagoon_fake_devices(int devices, int uuid, int peers) {
    LOCK;
    state().devices = devices;
    state().uuid = uuid;
    state().peers = peers != 0;
}

void lagoon_fake_sharing(int shareable, int rdma) {
    LOCK;
    state().shareable = shareable != 0;
    state().rdma = rdma != 0;
}

void lagoon_fake_schedule(uint64_t seed) {
    LOCK;
    state().seed = seed;
    state().random = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
}

void lagoon_fake_turns(int all) {
    LOCK;
    state().all_turns = all != 0;
}

int cuInit(unsigned) {
    ENTER("cuInit");
    // For whole programs, which cannot call `lagoon_fake_memory`.
    const char* page = getenv("LAGOON_FAKE_PAGE");
    if (page != nullptr) state().granularity = strtoull(page, nullptr, 10);
    const char* devices = getenv("LAGOON_FAKE_DEVICES");
    if (devices != nullptr) state().devices = atoi(devices);
    const char* uuid = getenv("LAGOON_FAKE_UUID");
    if (uuid != nullptr) state().uuid = atoi(uuid);
    // "9.0": the compute capability, with what such a device gives a block of shared memory.
    const char* capability = getenv("LAGOON_FAKE_CAPABILITY");
    int major = 0, minor = 0;
    if (capability != nullptr && sscanf(capability, "%d.%d", &major, &minor) == 2) {
        lagoon_fake_device(major, minor, (major >= 9 ? 227 : 163) << 10);
    }
    // Kernels whose name contains this fail as a trap does.
    const char* trap = getenv("LAGOON_FAKE_TRAP");
    if (trap != nullptr) lagoon_fake_trap(trap);
    // "NAME NTH CODE": as `lagoon_fake_fail_from`.
    const char* fail = getenv("LAGOON_FAKE_FAIL");
    char name[64];
    unsigned long long nth = 0;
    int code = 0;
    if (fail != nullptr && sscanf(fail, "%63s %llu %d", name, &nth, &code) == 3) lagoon_fake_fail_from(name, nth, code);
    return OK;
}

int cuDriverGetVersion(int* version) {
    ENTER("cuDriverGetVersion");
    *version = state().driver;
    return OK;
}

int cuDeviceGetCount(int* count) {
    ENTER("cuDeviceGetCount");
    *count = state().devices;
    return OK;
}

int cuDeviceGet(int* device, int ordinal) {
    ENTER("cuDeviceGet");
    *device = ordinal;
    return ordinal >= 0 && ordinal < state().devices ? OK : INVALID_DEVICE;
}

int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    ENTER("cuDeviceGetUuid");
    memset(uuid, 0xda, 16);
    uuid[15] = static_cast<unsigned char>(state().uuid + device);
    return OK;
}

int cuDeviceCanAccessPeer(int* can, int, int) {
    ENTER("cuDeviceCanAccessPeer");
    *can = state().peers;
    return OK;
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
    case 33: *value = 0x3b; break;        // the bus
    case 34: *value = 0x1d; break;        // the device on it
    case 38: *value = 48 << 10; break;    // L2 cache, small: what rotates buffers past it rotates small ones
    case 50: *value = 0x1ffff; break;     // the domain, one that no other device has
    case 75: *value = state().major; break; // compute capability
    case 76: *value = state().minor; break;
    case 97: *value = state().shared_bytes; break; // of a block that opts in
    case 102: *value = 1; break;          // virtual memory management
    case 103: *value = state().shareable; break;          // file descriptors
    case 110: *value = state().rdma; break;          // remote direct access
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

} // extern "C"

#include "streams.inc"
#include "memory.inc"
#include "launch.inc"
#include "vmm.inc"
