// Runs kernels' blocks as fibers and exports launches by name, with the arguments as cuLaunchKernel takes them.
//
// A lane runs until it waits for others. The order in which lanes and warps get their turns is a parameter: a result that depends
// on it shows a missing barrier. Lanes that wait for each other for ever, that meet at different instructions, or that leave while
// others wait for them end the launch with an error.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "machine.h"
#include "products.h"
#include "tensor_map.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace shim {

namespace {

struct Kernel {
    uint32_t threads;
    size_t params_bytes;
    void (*body)(const void*);
};

std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

// How lanes take turns.
enum Order { ROUND_ROBIN = 0, WARPS_AHEAD = 1, WARPS_AHEAD_REVERSED = 2, RANDOM = 3 };

thread_local int order_of_next = ROUND_ROBIN;
thread_local uint64_t random_of_next = 1;
thread_local void* caller;
thread_local const Kernel* running;
thread_local const void* running_params;
thread_local std::string error;
// What happens before the first thread of a launch has waited for the grids before it.
thread_local void (*before_wait)(void*);
thread_local void* before_wait_context;

uint32_t random_below(uint32_t n) {
    uint64_t& state = block()->random_state;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<uint32_t>(state >> 33) % n;
}

// Stacks of one thread's fibers, each above a page that faults.
struct Stacks {
    static constexpr size_t CHUNK = 128;
    std::vector<void*> chunks;
    std::vector<unsigned char*> all;
    // A launch is in progress, failed or was left by a fault: frames were not unpoisoned.
    bool dirty = false;
    unsigned char* get(size_t i) {
        while (all.size() <= i) {
            void* memory = mmap(nullptr, (CHUNK + 1) * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED) return nullptr;
            chunks.push_back(memory);
            const uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + STACK_BYTES - 1) / STACK_BYTES * STACK_BYTES;
            for (size_t stack = 0; stack < CHUNK; stack++) {
                all.push_back(reinterpret_cast<unsigned char*>(first + stack * STACK_BYTES));
                mprotect(all.back(), guard(), PROT_NONE);
                unpoison(all.back() + guard(), STACK_BYTES - guard());
            }
        }
        return all[i];
    }
    static size_t guard() { return static_cast<size_t>(getpagesize()); }
    void unpoison_all() const {
        for (unsigned char* stack : all) unpoison(stack + guard(), STACK_BYTES - guard());
    }
    static void unpoison([[maybe_unused]] void* from, [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
        ASAN_UNPOISON_MEMORY_REGION(from, bytes);
#endif
    }
    ~Stacks() {
        unpoison_all();
        for (void* chunk : chunks) munmap(chunk, (CHUNK + 1) * STACK_BYTES);
    }
};
thread_local Stacks stacks;

}  // namespace

Registration::Registration(const char* name, uint32_t threads, size_t params_bytes, void (*body)(const void*)) {
    kernels()[name] = {threads, params_bytes, body};
}

}  // namespace shim

#if defined(__x86_64__)
// Saves what a callee must keep, and the stack pointer at *from; continues at `to`.
extern "C" void lagoon_shim_switch(void** from, void* to);
asm(R"(
.text
.hidden lagoon_shim_switch
.globl lagoon_shim_switch
.type lagoon_shim_switch, @function
lagoon_shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size lagoon_shim_switch, . - lagoon_shim_switch
)");

static void* prepare_context(void*, void* end, void (*entry)()) {
    // Six registers and the address to return to; at the entry the stack is as after a call.
    void** top = static_cast<void**>(end) - 2;
    top[0] = reinterpret_cast<void*>(entry);
    top[1] = nullptr;
    for (int i = 1; i <= 6; i++) top[-i] = nullptr;
    return top - 6;
}
#else
#include <ucontext.h>
// Elsewhere the C library switches; slower, for it saves the signal mask too.
static void lagoon_shim_switch(void** from, void* to) {
    ucontext_t here;
    *from = &here;
    swapcontext(&here, static_cast<ucontext_t*>(to));
}
static void* prepare_context(void* stack, void* end, void (*entry)()) {
    // The context lies at the top of its own stack.
    ucontext_t* context = reinterpret_cast<ucontext_t*>((reinterpret_cast<uintptr_t>(end) - sizeof(ucontext_t)) / 64 * 64);
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = reinterpret_cast<uintptr_t>(context) - reinterpret_cast<uintptr_t>(stack) - 64;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    return context;
}
#endif

namespace shim {

namespace {

void yield() {
    Lane* lane = self();
    lagoon_shim_switch(&lane->stack_pointer, lane->block->scheduler);
}

void fiber() {
    running->body(running_params);
    self()->done = true;
    block()->warps[self()->warp].ready &= ~(1u << self()->lane);
    for (const auto& group : self()->groups) {
        if (!group.empty()) fail("a thread ends while its copies are in flight");
    }
    if (self()->issued > self()->waited) fail("a thread ends while its products are in flight");
    if (!self()->waited_for_grids) fail("a thread ends that has not waited for the grids before");
    yield();
    __builtin_unreachable();
}

void run_lane(Lane& lane) {
    if (lane.pauses > 0) {
        lane.pauses--;
        return;
    }
    lagoon_shim_switch(&lane.block->scheduler, lane.stack_pointer);
}

// The stack pointer of a fiber that begins with `entry`, which never returns: its own frame, and a context, stay.
void* prepare(unsigned char* stack, Lane& lane, void (*entry)()) {
    constexpr size_t OWN_FRAME = 8192;
    Lane** top = top_of(reinterpret_cast<uintptr_t>(stack));
    Stacks::unpoison(reinterpret_cast<unsigned char*>(top) - OWN_FRAME, OWN_FRAME);
    *top = &lane;
    return prepare_context(stack, top, entry);
}

// Gives each ready lane of a warp one turn, also a lane that an earlier one releases in this pass.
bool run_warp(std::vector<Lane>& lanes, uint32_t index) {
    const Block& of = *block();
    const int order = of.order;
    const uint32_t& ready = of.warps[index].ready;
    const uint32_t start = order == RANDOM ? random_below(32) : 0;
    const bool reversed = order == WARPS_AHEAD_REVERSED;
    bool progress = false;
    for (uint32_t i = 0; i < 32 && !of.failed; i++) {
        const uint32_t from_start = start ? ready >> start | ready << (32 - start) : ready;
        const uint32_t left = reversed ? ready << i : from_start >> i;
        if (left == 0) break;
        i += static_cast<uint32_t>(reversed ? __builtin_clz(left) : __builtin_ctz(left));
        run_lane(lanes[32 * index + (reversed ? 31 - i : (i + start) % 32)]);
        progress = true;
    }
    return progress;
}

bool run_warps(std::vector<Lane>& lanes, uint32_t warps) {
    const int order = block()->order;
    bool progress = false;
    const uint32_t start = order == RANDOM ? random_below(warps) : 0;
    for (uint32_t i = 0; i < warps; i++) {
        const uint32_t warp = order == WARPS_AHEAD_REVERSED ? warps - 1 - i : (i + start) % warps;
        bool again = run_warp(lanes, warp);
        progress |= again;
        // A warp that runs ahead goes on until it waits for another one.
        while (again && (order == WARPS_AHEAD || order == WARPS_AHEAD_REVERSED || (order == RANDOM && random_below(8)))) {
            again = run_warp(lanes, warp);
        }
    }
    return progress;
}

// The copy engine does something: the first copy, the last or any.
bool run_copy() {
    const size_t count = block()->bulk.size();
    if (count == 0) return false;
    const int order = block()->order;
    return finish_copy(order == WARPS_AHEAD_REVERSED ? count - 1 : order == RANDOM ? random_below(static_cast<uint32_t>(count)) : 0);
}

void run_block(uint32_t threads) {
    static thread_local std::vector<Lane> lanes;
    Block* const block = shim::block();
    lanes.assign(threads, Lane());
    block->warps.assign(threads / 32, Warp());
    block->warpgroups.assign((threads + 127) / 128, Warpgroup());
    block->barrier = Barrier();
    // As many registers for each thread as all can have.
    const uint32_t registers = std::min(65536 / threads / 8 * 8, 248u);
    for (Warpgroup& group : block->warpgroups) group.registers = registers;
    block->registers_free = 65536 - threads * registers;
    block->registers = Barrier();
    block->barriers.clear();
    block->bulk.clear();
    for (uint32_t i = 0; i < threads; i++) {
        unsigned char* stack = stacks.get(1 + i);
        if (!stack) return report("no memory for a fiber's stack");
        lanes[i].block = block;
        lanes[i].thread.x = i;
        lanes[i].warp = i / 32;
        lanes[i].lane = i % 32;
        lanes[i].stack_pointer = prepare(stack, lanes[i], fiber);
    }
    const auto waits = [](const Lane& lane) { return !lane.done; };
    while (!block->failed && (run_warps(lanes, threads / 32) || (std::any_of(lanes.begin(), lanes.end(), waits) && run_copy()))) {
        if (block->order == RANDOM && random_below(4) == 0) run_copy();
        if (block->order == RANDOM && random_below(4) == 0) finish_product(random_below(threads / 32));
    }
    if (block->failed) return;
    for (const Lane& lane : lanes) {
        if (!lane.done) return report((std::string("deadlock: some threads wait for ever at ") + lane.waits_at->what).c_str());
    }
    finish_block();
}

// A launch's blocks, on a stack of its own.
void run_blocks() {
    Block& block = *shim::block();
    const auto [width, height, depth] = block.grid;
    for (uint32_t z = 0; z < depth && !block.failed; z++) {
        for (uint32_t y = 0; y < height && !block.failed; y++) {
            for (uint32_t x = 0; x < width && !block.failed; x++) {
                block.index = {x, y, z};
                // NaN in every type: what is read before it is written shows.
                memset(block.shared, 0xff, block.shared_bytes);
                memset(block.async_view, 0xff, block.shared_bytes);
                run_block(block.threads.x);
            }
        }
    }
    lagoon_shim_switch(&block.scheduler, caller);
    __builtin_unreachable();
}

}  // namespace

void report(const char* what) {
    Block& of = *block();
    if (!of.failed) error = what;
    of.failed = true;
}

void stop() {
    yield();
    __builtin_unreachable();
}

void fail(const char* what) {
    report(what);
    stop();
}

bool has_failed() { return block()->failed; }

void wait_for_grids() {
    self()->waited_for_grids = true;
    if (before_wait == nullptr) return;
    // On another thread, whose state is its own: it is a launch.
    std::thread(std::exchange(before_wait, nullptr), before_wait_context).join();
}

void release(Barrier& barrier) {
    barrier.generation++;
    for (uint16_t thread : barrier.waiting) block()->warps[thread / 32].ready |= 1u << thread % 32;
    barrier.waiting.clear();
}

void wait_at(Barrier& barrier) {
    self()->waits_at = &barrier;
    barrier.waiting.push_back(static_cast<uint16_t>(self()->thread.x));
    block()->warps[self()->warp].ready &= ~(1u << self()->lane);
    yield();
}

void meet_at(Barrier& barrier, uint32_t count, const char* what, void (*last)(void*), void* context) {
    if (barrier.arrived == 0) barrier.what = what;
    if (barrier.what != what && strcmp(barrier.what, what) != 0) fail("threads that should be together are at different instructions");
    barrier.arrived++;
    if (barrier.arrived == count) {
        if (last) last(context);
        barrier.arrived = 0;
        release(barrier);
    } else {
        wait_at(barrier);
    }
    pause(32);
}

void pause(uint32_t chance) {
    if (block()->order != RANDOM || random_below(chance) != 0) return;
    self()->pauses = random_below(1u << random_below(11));
    yield();
}

uint16_t f32_to_f16(float x) {
    const uint32_t u = bits<uint32_t>(x);
    const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000);
    const float magnitude = fabsf(x);
    if (x != x) return static_cast<uint16_t>(sign | 0x7e00);
    if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
    if (magnitude < 0x1p-14f) {
        // Multiples of 2^-24; rounding to the nearest even is nearbyint's in the default mode.
        return static_cast<uint16_t>(sign | static_cast<uint16_t>(nearbyintf(magnitude * 0x1p24f)));
    }
    const uint32_t m = u & 0x7fffffff;
    const uint32_t rounded = m + 0xfff + (m >> 13 & 1);
    return static_cast<uint16_t>(sign | static_cast<uint16_t>((rounded >> 13) - (112u << 10)));
}

void multiply(Slot* slots, Widen widen) {
    uint16_t a_halves[16][16], b_halves[16][8];
    float a[16][16], b[16][8], d[16][8];
    for (uint32_t lane = 0; lane < 32; lane++) {
        const uint32_t g = lane / 4, t = lane % 4;
        const uint64_t* words = slots[lane].words;
        for (uint32_t i = 0; i < 4; i++) {
            memcpy(&a_halves[g + i % 2 * 8][2 * t + i / 2 * 8], reinterpret_cast<const char*>(words) + 4 * i, 4);
        }
        for (uint32_t i = 0; i < 4; i++) b_halves[2 * t + i % 2 + i / 2 * 8][g] = static_cast<uint16_t>(words[4] >> 16 * i);
        memcpy(&d[g][2 * t], &words[2], 8);
        memcpy(&d[g + 8][2 * t], &words[3], 8);
    }
    widen(a[0], a_halves[0], 16 * 16);
    widen(b[0], b_halves[0], 16 * 8);
    add_product(d, a, b, 8);
    for (uint32_t lane = 0; lane < 32; lane++) {
        const uint32_t g = lane / 4, t = lane % 4;
        memcpy(&slots[lane].words[2], &d[g][2 * t], 8);
        memcpy(&slots[lane].words[3], &d[g + 8][2 * t], 8);
    }
}

void load_matrices(Slot* slots, bool transposed) {
    for (uint32_t i = 0; i < 4; i++) {
        uint16_t matrix[8][8];
        for (uint32_t row = 0; row < 8; row++) {
            memcpy(matrix[row], reinterpret_cast<const void*>(slots[8 * i + row].words[0]), 16);
        }
        for (uint32_t lane = 0; lane < 32; lane++) {
            const uint32_t row = lane / 4, column = lane % 4 * 2;
            const uint16_t low = transposed ? matrix[column][row] : matrix[row][column];
            const uint16_t high = transposed ? matrix[column + 1][row] : matrix[row][column + 1];
            slots[lane].words[4 + i] = low | static_cast<uint32_t>(high) << 16;
        }
    }
}

}  // namespace shim

extern "C" {

// Whether there is a kernel of this name.
int lagoon_shim_has(const char* name) { return shim::kernels().count(name) != 0; }

// Bytes of a kernel's only parameter; 0 where there is no such kernel.
size_t lagoon_shim_params_bytes(const char* name) {
    const auto found = shim::kernels().find(name);
    return found == shim::kernels().end() ? 0 : found->second.params_bytes;
}

// How this thread's launches take turns from now on: 0 in turn, 1 warps run ahead, 2 the same backwards, 3 random by `seed`.
// What is asynchronous happens at once in order 0, and as late as it may in others (at times earlier in 3).
void lagoon_shim_order(int order, uint64_t seed) {
    shim::order_of_next = order;
    shim::random_of_next = seed | 1;
}

// This thread's next launch begins before earlier work: `run(context)` is called, on another thread, when its first thread waits
// for the grids before. Whether that has happened: false after a launch in which no thread waited, which it takes back.
void lagoon_shim_before_wait(void (*run)(void*), void* context) {
    shim::before_wait = run;
    shim::before_wait_context = context;
}
int lagoon_shim_waited() { return std::exchange(shim::before_wait, nullptr) == nullptr; }

// What went wrong in this thread's last launch.
const char* lagoon_shim_error() { return shim::error.c_str(); }

// As cuTensorMapEncodeTiled.
int lagoon_shim_encode_tiled(void* map, int type, unsigned rank, void* address, const uint64_t* dims, const uint64_t* strides,
                             const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int l2,
                             int fill) {
    return shim::encode_tiled(map, type, rank, address, dims, strides, box, element_strides, interleave, swizzle, l2, fill);
}

// 0: all blocks ran; 1: no such kernel; 2: a launch that a device would refuse; 3: the kernel failed. One after the other.
int lagoon_shim_launch(const char* name, const unsigned* grid, const unsigned* threads, unsigned shared_bytes, void** args) {
    const auto found = shim::kernels().find(name);
    if (found == shim::kernels().end()) {
        shim::error = "no such kernel";
        return 1;
    }
    const shim::Kernel& kernel = found->second;
    if (threads[0] == 0 || threads[0] % 32 != 0 || threads[0] > kernel.threads || threads[1] != 1 || threads[2] != 1 ||
        grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || grid[1] > 65535 || grid[2] > 65535 || shared_bytes > 227 * 1024) {
        shim::error = "a launch that a device would refuse";
        return 2;
    }
#ifdef __SANITIZE_ADDRESS__
    static std::mutex serial;
    const std::lock_guard<std::mutex> guard(serial);
#endif
    // Aligned as a parameter with tensor maps is.
    struct alignas(128) Line {
        unsigned char bytes[128];
    };
    std::vector<Line> params((kernel.params_bytes + 127) / 128);
    memcpy(params.data(), args[0], kernel.params_bytes);
    unsigned char* stack = shim::stacks.get(0);
    if (!stack) {
        shim::error = "no memory for a fiber's stack";
        return 2;
    }
    shim::running = &kernel;
    shim::running_params = params.data();
    shim::Block block;
    block.threads = {threads[0], 1, 1};
    block.grid = {grid[0], grid[1], grid[2]};
    block.order = shim::order_of_next;
    block.random_state = shim::random_of_next;
    block.eager_copies = block.order == shim::ROUND_ROBIN;
    // Exactly as many bytes as asked for, so that the sanitizer sees the end.
    void* shared = nullptr;
    if (posix_memalign(&shared, 1024, shared_bytes ? shared_bytes : 1) != 0) {
        shim::error = "no memory for shared memory";
        return 2;
    }
    block.shared = static_cast<unsigned char*>(shared);
    std::vector<unsigned char> async_view(shared_bytes);
    block.async_view = async_view.data();
    block.shared_bytes = shared_bytes;
    if (std::exchange(shim::stacks.dirty, true)) shim::stacks.unpoison_all();
    // It only carries the block.
    shim::Lane scheduler;
    scheduler.block = &block;
    lagoon_shim_switch(&shim::caller, shim::prepare(stack, scheduler, shim::run_blocks));
    shim::stacks.dirty = block.failed;
    shim::random_of_next = block.random_state;
    free(block.shared);
    if (block.failed) {
        fprintf(stderr, "%s: %s\n", name, shim::error.c_str());
        return 3;
    }
    return 0;
}
}
