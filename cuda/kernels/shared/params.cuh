// Parameters of every kernel: the same fields in the same order as the Rust structures in cuda/src/kernels.
#pragma once
#include <stdint.h>

typedef uint64_t Address;

struct KvView {
    Address k, v;
    uint64_t token_stride, head_stride;
};

struct EmbedParams {
    Address table, ids, out;
    uint32_t cols, ld, table_type, add;
};

struct GatherParams {
    Address x, rows, out;
    uint32_t cols, pad;
};

struct NormParams {
    Address x, delta, weight, bias, out;
    uint32_t cols;
    float eps;
    uint32_t weight_type, pad;
};

struct GateParams {
    Address x, out;
    uint32_t n, pad;
};

struct GeluParams {
    Address x, out;
    uint64_t count;
    uint32_t tanh, pad;
};

struct BiasParams {
    Address x, bias;
    uint32_t cols, bias_type;
};

struct AddParams {
    Address x, y;
    uint64_t count;
};

struct ScaleParams {
    Address x;
    uint64_t count;
    float factor;
    uint32_t pad;
};

struct HeadNormParams {
    Address qkv, q_weight, k_weight;
    uint32_t heads, kv_heads, head_dim, rows, q_type, k_type;
    float eps;
    uint32_t pad;
};

struct SinkParams {
    Address out, lse, sinks, count;
    uint32_t heads, head_dim, rows, sink_type;
};

struct RopeParams {
    Address qkv, rope, slots;
    KvView kv;
    uint32_t heads, kv_heads, head_dim, kv_type;
};

struct LatentParams {
    Address qkv, queries, latents, keys, rope, slots;
    KvView kv;
    uint32_t heads, head_dim, latent, rotated, query, kv_type;
};

struct KvCopyParams {
    KvView kv;
    Address packed;
    uint32_t slot0, kv_heads, head_bytes, element_bytes;
};

struct KvCheckParams {
    Address extents, out, secret;
    uint32_t count, pad;
};

struct MergeParams {
    Address acc_out, acc_lse, out, lse, acc_count, count;
    uint32_t heads, head_dim;
};

struct KvRun {
    uint32_t base, len, first_pos;
};

struct AttnItem {
    uint32_t row0, rows, pos0, runs, run0, base, len, first_pos, out_row, piece, keys, pad;
};

struct MergeItem {
    uint32_t row, piece_row, pieces, stride;
};

struct AttentionParams {
    Address q;
    KvView kv;
    Address items, runs, slopes, out, lse, piece_out, piece_lse;
    uint32_t q_stride, heads, kv_heads, head_dim, window;
    float scale;
    uint32_t stages;
    float softcap;
};

// What cuTensorMapEncodeTiled writes.
struct alignas(128) TensorMap {
    uint64_t opaque[16];
};

constexpr uint32_t BOX_HEIGHTS = 4;

// `k` and `v` by height of their boxes.
struct AttentionBoxesParams {
    AttentionParams attention;
    TensorMap k[BOX_HEIGHTS], v[BOX_HEIGHTS];
};

struct AttentionMergeParams {
    Address merges, piece_out, piece_lse, out, lse;
    uint32_t heads, head_dim;
};

// Of `activation`: what becomes of a product's columns.
constexpr uint32_t ACTIVATION_SILU_MUL = 1, ACTIVATION_GELU = 2;
// Of GroupedParams, too.
constexpr uint32_t ACTIVATION_GELU_TANH = 3, ACTIVATION_GELU_TANH_MUL = 4, ACTIVATION_CLAMPED_SWIGLU = 5;

struct GemvParams {
    Address x, w, bias, out;
    uint32_t rows, n, k, ldw, x_stride, out_stride, add, activation;
};

struct StreamParams {
    GemvParams gemv;
    uint32_t groups, terms, tiles, pad;
};

struct SplitPackedParams {
    Address x, out;
    uint32_t rows, x_stride, slots, chunks, units, runs, paired, tiles, terms;
    float one;
};

struct HeadProductParams {
    Address x, w, out;
    uint32_t rows, n, k, ldw, heads, x_stride, x_step, out_stride, out_step, unpacked;
};

struct SplitParams {
    Address x, hi, lo, scale;
    uint32_t k, x_stride, ld;
    float factor;
};

// Of `mode`: what becomes of a packed weight's elements.
constexpr uint32_t UNPACK_SET = 0, UNPACK_ADD = 1, UNPACK_TERMS = 2, UNPACK_LARGEST = 3;

struct UnpackParams {
    Address w, ids, out, lo;
    uint64_t group_bytes;
    uint32_t rows, cols, row_bytes, group_rows, mode;
    float factor;
};

struct GemmParams {
    Address hi, lo, scale, w, bias, out, partial;
    uint32_t m, n, k, lda, ldw, ldo, k_part, add;
};

struct GemmReduceParams {
    Address partial, scale, bias, out;
    uint32_t m, n, ldo, parts, add, bias_type;
};

struct RouteParams {
    Address logits, bias, experts, weights;
    uint32_t count, top_k, groups, top_groups, sigmoid, normalised, bias_type;
    float scale;
    uint32_t two_best, pad;
};

struct SortParams {
    Address experts, places, sources, tiles;
    uint32_t choices, count, top_k, tile_rows, tiles_max, pad;
};

struct ExpertTile {
    uint32_t expert, first, end, pad;
};

struct GroupedParams {
    Address x, lo, scale, sources, w, bias, out, tiles;
    uint64_t expert_bytes;
    uint32_t n, k, ldx, ldw, ldo, ld_bias, bias_type, activation, first_expert, experts, add, pad;
};

struct CombineParams {
    Address results, places, weights, out;
    uint32_t cols, top_k;
};

struct SampleRow {
    double uniform;
    float temperature, top_p, min_p;
    uint32_t top_k, mask, reserved;
};

struct SampledRow {
    uint32_t token, status;
};

struct SampleParams {
    Address logits, rows, out, masks;
    uint32_t vocab, stride;
};

static_assert(sizeof(KvView) == 32 && sizeof(EmbedParams) == 40 && sizeof(GatherParams) == 32, "as in Rust");
static_assert(sizeof(NormParams) == 56 && sizeof(GateParams) == 24 && sizeof(GeluParams) == 32, "as in Rust");
static_assert(sizeof(BiasParams) == 24 && sizeof(RopeParams) == 72 && sizeof(KvCopyParams) == 56, "as in Rust");
static_assert(sizeof(KvCheckParams) == 32 && sizeof(AddParams) == 24 && sizeof(ScaleParams) == 24, "as in Rust");
static_assert(sizeof(HeadNormParams) == 56 && sizeof(SinkParams) == 48 && sizeof(RouteParams) == 72, "as in Rust");
static_assert(sizeof(SortParams) == 56 && sizeof(ExpertTile) == 16 && sizeof(GroupedParams) == 120, "as in Rust");
static_assert(sizeof(CombineParams) == 40 && sizeof(LatentParams) == 104 && sizeof(HeadProductParams) == 64, "as in Rust");
static_assert(sizeof(MergeParams) == 56 && sizeof(KvRun) == 12 && sizeof(AttnItem) == 48, "as in Rust");
static_assert(sizeof(MergeItem) == 16 && sizeof(AttentionParams) == 128, "as in Rust");
static_assert(sizeof(TensorMap) == 128 && sizeof(AttentionBoxesParams) == 1152, "as in Rust");
static_assert(sizeof(AttentionMergeParams) == 48 && sizeof(GemvParams) == 64 && sizeof(SplitParams) == 48, "as in Rust");
static_assert(sizeof(UnpackParams) == 64 && sizeof(StreamParams) == 80 && sizeof(SplitPackedParams) == 56, "as in Rust");
static_assert(sizeof(GemmParams) == 88 && sizeof(GemmReduceParams) == 56, "as in Rust");
static_assert(sizeof(SampleRow) == 32 && sizeof(SampledRow) == 8 && sizeof(SampleParams) == 40, "as in Rust");
