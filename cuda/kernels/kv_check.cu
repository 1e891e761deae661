// XXH3-128 (seed 0, xxHash 0.8) of extents of more than 240 bytes, which begin at and are multiples of 16 bytes: the check of KV
// that is handed over (engine/transfer/src/check.rs). Eight threads hash an extent, one for each of the algorithm's eight sums;
// extents are independent of each other. Shorter ones are the host's matter.
#include "shared/common.cuh"

constexpr uint32_t CHECK_THREADS = 64, STRIPE_BYTES = 64, BLOCK_STRIPES = 16, SECRET_WORDS = 24;
constexpr uint64_t PRIME32_1 = 0x9E3779B1u, PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu;

struct CheckShared {
    uint64_t secret[SECRET_WORDS];
    uint64_t sums[CHECK_THREADS];
};

// The eight bytes of the secret from byte `at` on.
DEVICE uint64_t secret_at(const uint64_t* secret, uint32_t at) {
    const uint32_t word = at / 8, bits = at % 8 * 8;
    return bits == 0 ? secret[word] : secret[word] >> bits | secret[word + 1] << (64 - bits);
}

// One sum after one stripe: `mine` are the eight bytes of this sum, `other` those of its neighbour.
DEVICE uint64_t add_stripe(uint64_t sum, uint64_t mine, uint64_t other, uint64_t secret) {
    const uint64_t key = mine ^ secret;
    return sum + other + (key & 0xffffffffu) * (key >> 32);
}

// The two halves of a product, one xor the other.
DEVICE uint64_t fold_product(uint64_t a, uint64_t b) {
    const uint64_t a0 = a & 0xffffffffu, a1 = a >> 32, b0 = b & 0xffffffffu, b1 = b >> 32;
    const uint64_t middle = a1 * b0 + (a0 * b0 >> 32), cross = a0 * b1 + (middle & 0xffffffffu);
    return (a1 * b1 + (middle >> 32) + (cross >> 32)) ^ (a * b);
}

DEVICE uint64_t merge_sums(const CheckShared& shared, uint32_t first, uint32_t at, uint64_t x) {
    for (uint32_t i = 0; i < 8; i += 2) {
        x += fold_product(shared.sums[first + i] ^ secret_at(shared.secret, at + i * 8),
                          shared.sums[first + i + 1] ^ secret_at(shared.secret, at + i * 8 + 8));
    }
    x = (x ^ x >> 37) * 0x165667919E3779F9u;
    return x ^ x >> 32;
}

KERNEL(kv_check, 64, 1, KvCheckParams) {
    SHARED CheckShared shared;
    if (threadIdx.x < SECRET_WORDS) shared.secret[threadIdx.x] = at<const uint64_t>(p.secret)[threadIdx.x];
    sync_block();
    const uint32_t lane = threadIdx.x % 8, first = threadIdx.x - lane;
    const uint32_t extent = blockIdx.x * (CHECK_THREADS / 8) + threadIdx.x / 8;
    const bool has = extent < p.count;
    uint64_t bytes = 0;
    if (has) {
        const uint64_t from = at<const uint64_t>(p.extents)[2 * extent];
        bytes = at<const uint64_t>(p.extents)[2 * extent + 1];
        const uint64_t* secret = shared.secret + lane;
        uint64_t sum = at<const uint64_t>(p.secret)[SECRET_WORDS + lane];
        // Words of a stripe: this sum's, and its neighbour's, which lie side by side.
        const uint64_t* words = at<const uint64_t>(from) + lane;
        const uint64_t* others = at<const uint64_t>(from) + (lane ^ 1);
        const uint64_t stripes = (bytes - 1) / STRIPE_BYTES;
        uint64_t stripe = 0;
        for (; stripe + BLOCK_STRIPES <= stripes; stripe += BLOCK_STRIPES) {
            uint64_t mine[BLOCK_STRIPES], other[BLOCK_STRIPES];
            for (uint32_t i = 0; i < BLOCK_STRIPES; i++) {
                mine[i] = words[(stripe + i) * 8];
                other[i] = others[(stripe + i) * 8];
            }
            for (uint32_t i = 0; i < BLOCK_STRIPES; i++) sum = add_stripe(sum, mine[i], other[i], secret[i]);
            sum = (sum ^ sum >> 47 ^ secret[BLOCK_STRIPES]) * PRIME32_1;
        }
        for (uint32_t i = 0; stripe < stripes; stripe++, i++) {
            sum = add_stripe(sum, words[stripe * 8], others[stripe * 8], secret[i]);
        }
        // The last 64 bytes, which may overlap the stripe before.
        const uint64_t last = bytes / 8 - 8;
        sum = add_stripe(sum, words[last], others[last], secret_at(shared.secret, 121 + lane * 8));
        shared.sums[threadIdx.x] = sum;
    }
    sync_block();
    if (has && lane < 2) {
        const uint64_t x = lane == 0 ? bytes * PRIME64_1 : ~(bytes * PRIME64_2);
        at<uint64_t>(p.out)[2 * extent + lane] = merge_sums(shared, first, lane == 0 ? 11 : 117, x);
    }
}
