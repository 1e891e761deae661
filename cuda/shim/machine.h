// The host model of the instructions in shared/ptx.cuh: a thread of a block is a fiber, and every instruction on which lanes or
// threads meet is a barrier of fibers. Kernels are compiled against it with LAGOON_SHIM by any C++17 compiler.
//
// It detects errors in indices, masks and fragments' layouts, barriers that are missing or that some threads skip, reads of shared
// memory before it is written (it starts as NaN), copies, products and earlier grids that are not waited for, and with an address
// sanitizer every access out of bounds. It shows neither races inside a warp's instruction, nor the rounding of tensor cores, nor speed.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#define DEVICE inline
#define DYNAMIC_SHARED(NAME) unsigned char* NAME = shim::block()->shared
#ifdef __SANITIZE_ADDRESS__
// The sanitizer watches plain statics only; launches are serial there.
#define SHARED static
#else
#define SHARED static thread_local
#endif
#define KERNEL_THAT_WAITS(NAME, THREADS, BLOCKS, PARAMS)                                          \
    static void NAME##_body(const PARAMS& p);                                                     \
    static const shim::Registration NAME##_registration(                                          \
        #NAME, THREADS, sizeof(PARAMS),                                                           \
        [](const void* p) { NAME##_body(*static_cast<const PARAMS*>(p)); });                      \
    static void NAME##_body(const PARAMS& p)
#define KERNEL(NAME, THREADS, BLOCKS, PARAMS)            \
    static void NAME##_after_wait(const PARAMS& p);      \
    KERNEL_THAT_WAITS(NAME, THREADS, BLOCKS, PARAMS) {   \
        launch_dependents();                             \
        wait_for_grids();                                \
        NAME##_after_wait(p);                            \
    }                                                    \
    static void NAME##_after_wait(const PARAMS& p)

#define threadIdx (shim::self()->thread)
#define blockIdx (shim::block()->index)
#define blockDim (shim::block()->threads)
#define gridDim (shim::block()->grid)

struct uint4 {
    uint32_t x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};

namespace shim {

struct Dim {
    uint32_t x = 0, y = 0, z = 0;
};

// An asynchronous copy that has not happened yet.
struct Copy {
    uintptr_t to;
    const void* from;
    uint32_t bytes;
};

// Meeting point of the lanes of a warp, or of the threads of a block.
struct Barrier {
    uint64_t generation = 0;
    uint32_t arrived = 0;
    // The instruction at which the first arrived; all others must be at it.
    const char* what = nullptr;
    // Threads of the block that wait for the next generation.
    std::vector<uint16_t> waiting;
};

struct Block;

struct Lane {
    Block* block = nullptr;
    Dim thread;
    uint32_t warp = 0, lane = 0;
    void* stack_pointer = nullptr;
    bool done = false;
    // Turns that it lets pass.
    uint32_t pauses = 0;
    const Barrier* waits_at = nullptr;
    // Whether it has waited for the grids before.
    bool waited_for_grids = false;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
    // Groups of products that were ended; whether registers were ordered since the last wait for them.
    uint32_t commits = 0;
    bool fenced = false;
    // Groups that products were issued in, and that were waited for.
    uint32_t issued = 0, waited = 0;
};

// A lane's operands of a warp's instruction, and its results.
struct Slot {
    uint64_t words[8];
};

// Operands of a product, equal in all threads of a warpgroup, and the product's group.
struct Factors {
    uint64_t a = 0, b = 0;
    bool add = false;
    uint32_t n = 0, group = 0;
    bool operator==(const Factors& other) const {
        return a == other.a && b == other.b && add == other.add && n == other.n && group == other.group;
    }
};

// Widens `n` halves, a multiple of 8.
typedef void (*Widen)(float* to, const uint16_t* from, uint32_t n);

// A warp's 16 rows of a product that has not happened yet; by lane.
struct Product {
    Factors factors;
    Widen widen = nullptr;
    float* d[32] = {};
    const uint32_t* registers[32] = {};
};

struct Warp {
    Barrier barrier;
    // Products in flight, the one that lanes are issuing, and how many there were.
    std::deque<Product> products;
    Product next;
    size_t issued = 0;
    // By parity of the generation: a fast lane may bring the next instruction's before a slow one has taken this one's.
    Slot slots[2][32];
    // Fences of its lanes for the asynchronous proxy.
    uint32_t fences = 0;
    // Lanes that have a turn: they are not done, and wait nowhere.
    uint32_t ready = 0xffffffff;
};

struct Warpgroup {
    Barrier barrier;
    // Its products in order: each of its warps must issue the same ones.
    std::vector<Factors> history;
    // Of each thread.
    uint32_t registers = 0;
};

// A barrier in shared memory: its phase, and what that still waits for.
struct SharedBarrier {
    Barrier phase;
    uint32_t expected = 0, pending = 0;
    int64_t bytes = 0;
};

// A copy of the copy engine's that has not happened yet.
struct BulkCopy {
    uintptr_t to;
    const void* map;
    int32_t column, row;
    uintptr_t barrier;
};

struct Block {
    Dim index, threads, grid;
    // Shared memory, and as the asynchronous proxy sees it.
    unsigned char *shared = nullptr, *async_view = nullptr;
    size_t shared_bytes = 0;
    Barrier barrier;
    // Those of some of its warps.
    Barrier some[16];
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    std::map<uintptr_t, SharedBarrier> barriers;
    std::vector<BulkCopy> bulk;
    // Registers that no warpgroup has; a new generation when some were given back.
    uint32_t registers_free = 0;
    Barrier registers;
    // Copies happen as they are issued, or as late as they may.
    bool eager_copies = false;
    // How lanes take turns, and the state of that which is random.
    int order = 0;
    uint64_t random_state = 1;
    bool failed = false;
    void* scheduler = nullptr;
};

// A lane's stack, or the scheduler's: its address is a multiple of its size, and at its top it names the lane. So a lane is found
// without thread-local state, which in a library that is loaded late costs a call at every instruction; on these stacks only. Tops have
// colours: at equal places they would all map to the same sets of a cache.
constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t STACK_COLORS = 128, STACK_COLOR_BYTES = 7 * 64;
inline Lane** top_of(uintptr_t stack) {
    return reinterpret_cast<Lane**>(stack + STACK_BYTES - 64 - stack / STACK_BYTES % STACK_COLORS * STACK_COLOR_BYTES);
}
inline Lane* self() { return *top_of(reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) & ~(STACK_BYTES - 1)); }
inline Block* block() { return self()->block; }

struct Registration {
    Registration(const char* name, uint32_t threads, size_t params_bytes, void (*body)(const void*));
};

// Ends the launch with an error, once the scheduler has its turn; `stop` gives it that turn. `fail` is both.
void report(const char* what);
[[noreturn]] void stop();
[[noreturn]] void fail(const char* what);
bool has_failed();
// A thread waits for the grids before: the launch's first one runs what `lagoon_shim_before_wait` was given.
void wait_for_grids();
// Advances the generation and makes the waiting threads ready.
void release(Barrier& barrier);
// Gives others their turn until the barrier's generation is another; or, in the random order, for a while, once in `chance` times.
void wait_at(Barrier& barrier);
void pause(uint32_t chance);
// Arrives at a barrier of `count` and waits there. The last to arrive runs `last` first.
void meet_at(Barrier& barrier, uint32_t count, const char* what, void (*last)(void*), void* context);

// A warp's instruction: every lane brings a slot, the last one's `work(slots)` changes them, every lane takes its own.
template <typename Work>
Slot together(const char* what, const Slot& mine, Work work) {
    Warp& warp = block()->warps[self()->warp];
    Slot* slots = warp.slots[warp.barrier.generation % 2];
    slots[self()->lane] = mine;
    struct Context {
        Work& work;
        Slot* slots;
    } context = {work, slots};
    auto last = [](void* context) {
        Context& c = *static_cast<Context*>(context);
        c.work(c.slots);
    };
    meet_at(warp.barrier, 32, what, last, &context);
    return slots[self()->lane];
}

template <typename T, typename From>
T bits(From from) {
    static_assert(sizeof(T) == sizeof(From), "as wide");
    T to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// Vectors have no branches: the exponent's bias is a factor, which is exact for subnormals, too.
inline float f16_to_f32(uint16_t x) {
    const float magnitude = bits<float>(static_cast<uint32_t>(x & 0x7fff) << 13) * 0x1p112f;
    const uint32_t special = (x & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;
    return bits<float>(bits<uint32_t>(magnitude) | special | static_cast<uint32_t>(x & 0x8000) << 16);
}
uint16_t f32_to_f16(float x);
inline float bf16_to_f32(uint16_t x) { return bits<float>(static_cast<uint32_t>(x) << 16); }
inline uint16_t f32_to_bf16(float x) {
    const uint32_t u = bits<uint32_t>(x);
    if (x != x) return static_cast<uint16_t>(u >> 16 | 0x40);
    return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

void multiply(Slot* slots, Widen widen);
void load_matrices(Slot* slots, bool transposed);

// See async.h.
void init_barrier(uintptr_t address, uint32_t arrivals);
void expect_bytes(uintptr_t address, uint32_t bytes);
void arrive(uintptr_t address);
void wait_for_phase(uintptr_t address, uint32_t parity);
const void* map_at(const void* map);
void start_copy(uintptr_t to, const void* map, int32_t column, int32_t row, uintptr_t barrier);
void fence_async();
void keep_registers(uint32_t n);
void take_registers(uint32_t n);
void start_product(Factors factors, float* d, const uint32_t* registers, Widen widen);
// Waits until at most `but` of this thread's groups are in progress.
void finish_products(uint32_t but);
// Whether there was such a copy in flight, or a product of that warp; it happens now.
bool finish_copy(size_t which);
bool finish_product(uint32_t warp);
// Reports copies and products in flight after all threads have ended.
void finish_block();

}  // namespace shim

typedef uintptr_t SharedAddress;
inline SharedAddress shared_address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

struct f16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};
inline float as_float(uint32_t from) { return shim::bits<float>(from); }
inline uint32_t as_bits(float from) { return shim::bits<uint32_t>(from); }
inline float widen(float x) { return x; }
inline float widen(f16 x) { return shim::f16_to_f32(x.bits); }
inline float widen(bf16 x) { return shim::bf16_to_f32(x.bits); }

template <typename T>
void widen_all(float* to, const uint16_t* from, uint32_t n) {
    // A compiler makes vectors of a loop whose length it knows.
    for (uint32_t i = 0; i < n; i += 8) {
        for (uint32_t j = i; j < i + 8; j++) to[j] = widen(T{from[j]});
    }
}

template <typename T>
T narrow(float x);
template <>
inline float narrow<float>(float x) {
    return x;
}
template <>
inline f16 narrow<f16>(float x) {
    return {shim::f32_to_f16(x)};
}
template <>
inline bf16 narrow<bf16>(float x) {
    return {shim::f32_to_bf16(x)};
}

inline uint32_t add_halves(uint32_t a, uint32_t b) {
    const auto sum = [](uint32_t x, uint32_t y) {
        return narrow<f16>(widen(f16{static_cast<uint16_t>(x)}) + widen(f16{static_cast<uint16_t>(y)})).bits;
    };
    return sum(a, b) | static_cast<uint32_t>(sum(a >> 16, b >> 16)) << 16;
}

inline uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = low | static_cast<uint64_t>(high) << 32;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t number = selector >> 4 * i & 15;
        // The instruction's other mode, which spreads a byte's sign, has no use here.
        if (number > 7) shim::fail("a selector beyond eight bytes");
        out |= static_cast<uint32_t>(bytes >> 8 * number & 255) << 8 * i;
    }
    return out;
}

template <typename T>
uint32_t pack(float low, float high) {
    return narrow<T>(low).bits | static_cast<uint32_t>(narrow<T>(high).bits) << 16;
}

template <typename T>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    shim::Slot mine;
    for (int i = 0; i < 2; i++) {
        mine.words[i] = a[2 * i] | static_cast<uint64_t>(a[2 * i + 1]) << 32;
        mine.words[2 + i] = shim::bits<uint32_t>(d[2 * i]) | static_cast<uint64_t>(shim::bits<uint32_t>(d[2 * i + 1])) << 32;
    }
    mine.words[4] = b0 | static_cast<uint64_t>(b1) << 32;
    const shim::Slot slot = shim::together("mma", mine, [](shim::Slot* slots) {
        shim::multiply(slots, widen_all<T>);
    });
    for (int i = 0; i < 4; i++) d[i] = shim::bits<float>(static_cast<uint32_t>(slot.words[2 + i / 2] >> 32 * (i % 2)));
}

inline void load_four(uint32_t (&r)[4], SharedAddress row, bool transposed) {
    if (row % 16 != 0) shim::fail("ldmatrix of a row that is not aligned to 16 bytes");
    shim::Slot mine;
    mine.words[0] = row;
    const shim::Slot slot = shim::together(transposed ? "ldmatrix.trans" : "ldmatrix", mine,
                                           [=](shim::Slot* slots) { shim::load_matrices(slots, transposed); });
    for (int i = 0; i < 4; i++) r[i] = static_cast<uint32_t>(slot.words[4 + i]);
}
inline void ldmatrix_x4(uint32_t (&r)[4], SharedAddress row) { load_four(r, row, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], SharedAddress row) { load_four(r, row, true); }

namespace shim {
inline void perform(const Copy& copy) {
    void* to = reinterpret_cast<void*>(copy.to);
    memset(to, 0, 16);
    memcpy(to, copy.from, copy.bytes);
}
}  // namespace shim

inline void copy_async(SharedAddress to, const void* from, uint32_t bytes) {
    if (bytes > 16) shim::fail("cp.async of more than 16 bytes");
    if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
        shim::fail("cp.async between addresses that are not aligned to 16 bytes");
    }
    // An address is translated also where nothing is copied from it.
    static_cast<void>(*static_cast<const volatile unsigned char*>(from));
    const shim::Copy copy = {to, from, bytes};
    if (shim::block()->eager_copies) {
        shim::perform(copy);
    } else {
        shim::self()->open.push_back(copy);
    }
}
inline void copy_commit() {
    shim::self()->groups.push_back(std::move(shim::self()->open));
    shim::self()->open.clear();
}
template <int N>
void copy_wait() {
    auto& groups = shim::self()->groups;
    while (groups.size() > N) {
        for (const shim::Copy& copy : groups.front()) shim::perform(copy);
        groups.erase(groups.begin());
    }
}

inline void launch_dependents() {}
inline void wait_for_grids() { shim::wait_for_grids(); }

inline uint32_t pinned(uint32_t x) { return x; }
inline uint64_t pinned(uint64_t x) { return x; }

inline void sync_block() {
    shim::meet_at(shim::block()->barrier, shim::block()->threads.x, "sync_block", nullptr, nullptr);
}
inline void sync_warps(uint32_t barrier, uint32_t threads) {
    if (barrier < 1 || barrier > 15 || threads % 32 != 0) shim::fail("a barrier of some warps that does not exist");
    shim::meet_at(shim::block()->some[barrier], threads, "sync_warps", nullptr, nullptr);
}
inline void sync_warp() {
    shim::together("sync_warp", shim::Slot{}, [](shim::Slot*) {});
}

namespace shim {
template <typename T>
T from_lane(const char* what, T x, int (*source)(int lane, int by), int by) {
    Slot mine = {};
    memcpy(mine.words, &x, sizeof x);
    const Slot slot = together(what, mine, [=](Slot* slots) {
        for (int lane = 0; lane < 32; lane++) slots[lane].words[1] = slots[source(lane, by)].words[0];
    });
    memcpy(&x, &slot.words[1], sizeof x);
    return x;
}
inline int across(int lane, int mask) { return lane ^ mask; }
inline int below(int lane, int delta) { return lane < delta ? lane : lane - delta; }
}  // namespace shim

inline float shuffle_xor(float x, int mask) { return shim::from_lane("shuffle_xor", x, shim::across, mask); }
inline uint64_t shuffle_xor(uint64_t x, int mask) { return shim::from_lane("shuffle_xor", x, shim::across, mask); }
inline uint32_t warp_max_of(uint32_t x) {
    for (int mask = 16; mask > 0; mask /= 2) {
        const uint32_t other = static_cast<uint32_t>(shuffle_xor(static_cast<uint64_t>(x), mask));
        x = x < other ? other : x;
    }
    return x;
}
inline uint64_t shuffle_up(uint64_t x, int delta) { return shim::from_lane("shuffle_up", x, shim::below, delta); }
inline bool any_lane(bool x) {
    shim::Slot mine = {};
    mine.words[0] = x;
    const shim::Slot slot = shim::together("any_lane", mine, [](shim::Slot* slots) {
        uint64_t any = 0;
        for (int lane = 0; lane < 32; lane++) any |= slots[lane].words[0];
        for (int lane = 0; lane < 32; lane++) slots[lane].words[1] = any;
    });
    return slot.words[1] != 0;
}
inline uint32_t lanes_where(bool x) {
    shim::Slot mine = {};
    mine.words[0] = x;
    const shim::Slot slot = shim::together("lanes_where", mine, [](shim::Slot* slots) {
        uint64_t lanes = 0;
        for (int lane = 0; lane < 32; lane++) lanes |= slots[lane].words[0] << lane;
        for (int lane = 0; lane < 32; lane++) slots[lane].words[1] = lanes;
    });
    return static_cast<uint32_t>(slot.words[1]);
}
inline uint32_t count_bits(uint32_t x) {
    uint32_t count = 0;
    for (; x; x &= x - 1) count++;
    return count;
}

inline float exp2_fast(float x) { return exp2f(x); }
inline float divide_fast(float x, float y) { return fabsf(y) > 0x1p126f ? 0.0f : x / y; }
inline uint4 load_once(const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0) shim::fail("a 16-byte load that is not aligned");
    uint4 x;
    memcpy(&x, from, sizeof x);
    return x;
}

namespace shim {
template <typename T>
T load(const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % sizeof(T) != 0) fail("a wide load that is not aligned");
    T x;
    memcpy(&x, from, sizeof x);
    return x;
}
template <typename T>
void store(void* to, const T& x) {
    if (reinterpret_cast<uintptr_t>(to) % sizeof(T) != 0) fail("a wide store that is not aligned");
    memcpy(to, &x, sizeof x);
}
}  // namespace shim
inline uint64_t load_8(const void* from) { return shim::load<uint64_t>(from); }
inline void store_8(void* to, uint64_t x) { shim::store(to, x); }
inline float4 load_16(const void* from) { return shim::load<float4>(from); }
inline void store_16(void* to, float4 x) { shim::store(to, x); }
inline uint4 load_words(const void* from) { return shim::load<uint4>(from); }
inline float load_float_in_order(const void* from) { return shim::load<float>(from); }

// One fiber runs at a time: plain additions are atomic.
inline uint64_t add_shared(uint64_t* to, uint64_t x) {
    *to += x;
    return *to - x;
}
inline uint32_t add_shared(uint32_t* to, uint32_t x) {
    *to += x;
    return *to - x;
}
inline uint32_t min_shared(uint32_t* to, uint32_t x) {
    const uint32_t old = *to;
    *to = std::min(old, x);
    return old;
}

inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }

#include "async.h"
