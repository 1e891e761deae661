// See async.h.
#include "machine.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#include "products.h"
#include "tensor_map.h"

namespace shim {

namespace {

// What the manual allows: arrivals, and bytes that are expected.
constexpr uint32_t COUNT_MAX = (1u << 20) - 1;
constexpr uint64_t BARRIER_MAGIC = 0x6d62617272696572;

bool is_inside(uintptr_t address, size_t bytes) {
    const uintptr_t shared = reinterpret_cast<uintptr_t>(block()->shared);
    return address >= shared && address + bytes <= shared + block()->shared_bytes;
}

// The barrier at this address; none where it is not one, which is told.
SharedBarrier* find(uintptr_t address) {
    const auto found = block()->barriers.find(address);
    if (found == block()->barriers.end()) {
        report("a barrier that was not initialized");
        return nullptr;
    }
    uint64_t word;
    memcpy(&word, reinterpret_cast<const void*>(address), sizeof word);
    if (word != (BARRIER_MAGIC ^ address)) {
        report("a barrier was overwritten");
        return nullptr;
    }
    return &found->second;
}

SharedBarrier& barrier_at(uintptr_t address) {
    SharedBarrier* barrier = find(address);
    if (!barrier) stop();
    return *barrier;
}

void complete(SharedBarrier& barrier) {
    if (barrier.pending > 0 || barrier.bytes > 0) return;
    barrier.pending = barrier.expected;
    release(barrier.phase);
}

// A box's element, or zero where the tensor has none; 16 bytes at a time, which nothing straddles. Where it has none the hardware
// touches the tensor's first element (seen on an H200), which faults if that has no memory.
void read_chunk(const TensorMapModel& map, int64_t column, int64_t row, unsigned char (&to)[16]) {
    memset(to, 0, sizeof to);
    if (row < 0 || static_cast<uint64_t>(row) >= map.rows) {
        static_cast<void>(*reinterpret_cast<const volatile unsigned char*>(map.address));
        return;
    }
    for (uint32_t i = 0; i < 8; i++) {
        const int64_t at = column + i;
        if (at < 0 || static_cast<uint64_t>(at) >= map.columns) continue;
        const uint64_t from = map.address + static_cast<uint64_t>(row) * map.stride + static_cast<uint64_t>(at) * 2;
        memcpy(to + 2 * i, reinterpret_cast<const void*>(from), 2);
    }
}

// Rows of a box follow each other by its width; under the swizzle the bits 7 to 9 of an address exchange its 16-byte chunks.
void perform(const BulkCopy& copy) {
    const TensorMapModel& map = *static_cast<const TensorMapModel*>(copy.map);
    const uintptr_t shared = reinterpret_cast<uintptr_t>(block()->shared);
    const uint32_t width = map.box_columns * map.element_bytes;
    for (uint32_t row = 0; row < map.box_rows; row++) {
        for (uint32_t byte = 0; byte < width; byte += 16) {
            unsigned char chunk[16];
            read_chunk(map, copy.column + static_cast<int64_t>(byte / 2), static_cast<int64_t>(copy.row) + row, chunk);
            const uintptr_t plain = copy.to - shared + row * width + byte;
            const uintptr_t to = plain ^ (plain >> 3 & 0x70);
            memcpy(block()->shared + to, chunk, 16);
            memcpy(block()->async_view + to, chunk, 16);
        }
    }
    SharedBarrier* barrier = find(copy.barrier);
    if (!barrier) return;
    barrier->bytes -= static_cast<int64_t>(map.box_rows) * width;
    if (barrier->bytes < 0) return report("more bytes arrive at a barrier than it expects");
    complete(*barrier);
}

// Eight elements of 8-row atoms of 128 bytes that lie together: along k from `k`, in rows of at most 64, or, for `across`, along
// the other side from `other`; from a multiple of 8. The hardware exchanges 16-byte chunks by the address's own bits.
void read_eight(uint64_t descriptor, uint32_t other, uint32_t k, bool across, uint16_t* to) {
    const uint64_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    const uint64_t stride = (descriptor >> 32 & 0x3fff) << 4;
    const uint64_t plain = across ? start + other / 64 * leading + k / 8 * stride + k % 8 * 128 + other % 64 * 2
                                  : start + other / 8 * stride + other % 8 * 128 + k * 2;
    const uint64_t address = plain ^ (plain >> 3 & 0x70);
    if (address + 16 > block()->shared_bytes) {
        memset(to, 0xff, 16);
        report("a product beyond shared memory");
    } else {
        memcpy(to, block()->async_view + address, 16);
    }
}

// The 16 rows of a warp, by its number in its warpgroup.
void multiply_rows(const Product& product, uint32_t warp) {
    const Factors& factors = product.factors;
    const bool registers = product.registers[0] != nullptr;
    static thread_local uint16_t a_halves[16][16], b_halves[16][256];
    static thread_local float a[16][16], b[16][256], d[16][256];
    if (registers) {
        for (uint32_t lane = 0; lane < 32; lane++) {
            // Rows g and g + 8; columns 2 t, 2 t + 8 and the ones after.
            for (uint32_t i = 0; i < 4; i++) {
                memcpy(&a_halves[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8], &product.registers[lane][i], 4);
            }
        }
    } else {
        for (uint32_t row = 0; row < 16; row++) {
            for (uint32_t k = 0; k < 16; k += 8) read_eight(factors.a, warp * 16 + row, k, false, &a_halves[row][k]);
        }
    }
    product.widen(a[0], a_halves[0], 16 * 16);
    for (uint32_t column = 0; column < factors.n; column += registers ? 8 : 1) {
        if (registers) {
            // Values, which meet weights from registers, lie across.
            for (uint32_t k = 0; k < 16; k++) read_eight(factors.b, column, k, true, &b_halves[k][column]);
        } else {
            uint16_t of_column[16];
            for (uint32_t k = 0; k < 16; k += 8) read_eight(factors.b, column, k, false, &of_column[k]);
            for (uint32_t k = 0; k < 16; k++) b_halves[k][column] = of_column[k];
        }
    }
    for (uint32_t k = 0; k < 16; k++) product.widen(b[k], b_halves[k], factors.n);
    const auto for_each = [&](auto work) {
        for (uint32_t lane = 0; lane < 32; lane++) {
            for (uint32_t i = 0; i < factors.n / 2; i += 2) {
                work(product.d[lane][i], d[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2]);
                work(product.d[lane][i + 1], d[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + 1]);
            }
        }
    };
    for_each([&](const float& of_lane, float& of_row) { of_row = factors.add ? of_lane : 0; });
    add_product(d, a, b, factors.n);
    for_each([](float& of_lane, const float& of_row) { of_lane = of_row; });
}

// The first product of a warp that is in flight, if that is of a group before `until`.
bool finish_product(uint32_t warp, uint32_t until) {
    std::deque<Product>& products = block()->warps[warp].products;
    if (products.empty() || products.front().factors.group >= until) return false;
    multiply_rows(products.front(), warp % 4);
    products.pop_front();
    return true;
}

}  // namespace

void init_barrier(uintptr_t address, uint32_t arrivals) {
    if (address % 8 != 0 || !is_inside(address, 8)) fail("a barrier that is not aligned to 8 bytes of shared memory");
    if (arrivals == 0 || arrivals > COUNT_MAX) fail("a barrier of no arrivals, or of too many");
    if (block()->barriers.count(address) != 0) fail("a barrier is initialized again");
    SharedBarrier& barrier = block()->barriers[address];
    barrier.expected = barrier.pending = arrivals;
    barrier.phase.what = "a barrier in shared memory";
    const uint64_t word = BARRIER_MAGIC ^ address;
    memcpy(reinterpret_cast<void*>(address), &word, sizeof word);
}

void expect_bytes(uintptr_t address, uint32_t bytes) {
    SharedBarrier& barrier = barrier_at(address);
    barrier.bytes += bytes;
    if (barrier.bytes > COUNT_MAX) fail("a barrier that expects too many bytes");
}

void arrive(uintptr_t address) {
    SharedBarrier& barrier = barrier_at(address);
    // What completes by bytes has no arrivals left until it does.
    if (barrier.pending == 0) fail("more arrivals at a barrier than it has in a phase");
    barrier.pending--;
    complete(barrier);
    pause(4);
}

void wait_for_phase(uintptr_t address, uint32_t parity) {
    if (parity > 1) fail("a parity is 0 or 1");
    // The phase with this parity is over when the current one has the other.
    for (SharedBarrier* barrier = &barrier_at(address); (barrier->phase.generation & 1) == parity; barrier = &barrier_at(address)) {
        wait_at(barrier->phase);
    }
}

const void* map_at(const void* map) {
    if (reinterpret_cast<uintptr_t>(map) % 64 != 0) fail("a tensor map that is not aligned to 64 bytes");
    if (static_cast<const TensorMapModel*>(map)->magic != TENSOR_MAP_MAGIC) fail("a tensor map that nobody encoded");
    return map;
}

void start_copy(uintptr_t to, const void* map, int32_t column, int32_t row, uintptr_t barrier) {
    const TensorMapModel& model = *static_cast<const TensorMapModel*>(map_at(map));
    const size_t bytes = static_cast<size_t>(model.box_rows) * model.box_columns * model.element_bytes;
    if (to % 128 != 0) fail("a box that is not aligned to 128 bytes of shared memory");
    if (!is_inside(to, bytes)) fail("a box beyond shared memory");
    barrier_at(barrier);
    const BulkCopy copy = {to, map, column, row, barrier};
    if (block()->eager_copies) {
        perform(copy);
        if (has_failed()) stop();
    } else {
        block()->bulk.push_back(copy);
    }
}

bool finish_copy(size_t which) {
    if (which >= block()->bulk.size()) return false;
    const BulkCopy copy = block()->bulk[which];
    block()->bulk.erase(block()->bulk.begin() + static_cast<std::ptrdiff_t>(which));
    perform(copy);
    return true;
}

void fence_async() {
    Warp& warp = block()->warps[self()->warp];
    if (++warp.fences % 32 == 0) memcpy(block()->async_view, block()->shared, block()->shared_bytes);
}

void keep_registers(uint32_t n) {
    Warpgroup& group = block()->warpgroups[self()->warp / 4];
    meet_at(group.barrier, 128, "setmaxnreg.dec", nullptr, nullptr);
    if (self()->thread.x % 128 != 0) return;
    if (n > group.registers) fail("a warpgroup keeps more registers than it has");
    block()->registers_free += (group.registers - n) * 128;
    group.registers = n;
    release(block()->registers);
}

void take_registers(uint32_t n) {
    Warpgroup& group = block()->warpgroups[self()->warp / 4];
    meet_at(group.barrier, 128, "setmaxnreg.inc", nullptr, nullptr);
    if (n < group.registers) fail("a warpgroup takes fewer registers than it has");
    block()->registers.what = "setmaxnreg.inc";
    while (group.registers < n) {
        const uint32_t more = (n - group.registers) * 128;
        if (block()->registers_free >= more) {
            block()->registers_free -= more;
            group.registers = n;
        } else {
            wait_at(block()->registers);
        }
    }
}

void start_product(Factors factors, float* d, const uint32_t* registers, Widen widen) {
    if (!self()->fenced) fail("a product without a fence since the last wait");
    for (const uint64_t descriptor : {factors.a, factors.b}) {
        if (descriptor != 0 && descriptor >> 62 != 1) fail("a descriptor without the 128-byte swizzle");
    }
    factors.group = self()->commits;
    self()->issued = self()->commits + 1;
    Warp& warp = block()->warps[self()->warp];
    // Warps of a warpgroup need not be there at one time, but multiply the same.
    if (warp.barrier.arrived == 0) warp.next.factors = factors;
    std::vector<Factors>& history = block()->warpgroups[self()->warp / 4].history;
    if (history.size() == warp.issued) history.push_back(factors);
    if (!(factors == history[warp.issued]) || !(factors == warp.next.factors)) fail("a warpgroup's threads disagree");
    warp.next.widen = widen;
    warp.next.d[self()->lane] = d;
    warp.next.registers[self()->lane] = registers;
    const auto last = [](void* context) {
        Warp& warp = *static_cast<Warp*>(context);
        warp.products.push_back(warp.next);
        warp.issued++;
    };
    meet_at(warp.barrier, 32, "wgmma", last, &warp);
    if (block()->eager_copies) finish_product(self()->warp);
}

bool finish_product(uint32_t warp) { return finish_product(warp, ~0u); }

void finish_products(uint32_t but) {
    // The warp's instruction: none goes on before all are there.
    together("wgmma.wait_group", Slot{}, [](Slot*) {});
    while (self()->commits > but && finish_product(self()->warp, self()->commits - but)) {
    }
    self()->waited = std::max(self()->waited, self()->commits - std::min(self()->commits, but));
    self()->fenced = false;
    if (has_failed()) stop();
}

void finish_block() {
    if (!block()->bulk.empty()) report("a block ends while its copies are in flight");
    for (uint32_t warp = 0; warp < block()->warps.size(); warp++) {
        if (block()->warps[warp].issued != block()->warpgroups[warp / 4].history.size()) report("a warpgroup's threads disagree");
    }
    for (const auto& [address, barrier] : block()->barriers) {
        if (barrier.bytes != 0) report("a block ends while a barrier expects bytes");
    }
}

}  // namespace shim
