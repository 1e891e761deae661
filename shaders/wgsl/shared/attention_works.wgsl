// Works of an attention call, what they read and what they leave, for the kernels of attention.
//#include dtype
//#include grid

struct Params {
    kv_heads: u32,
    group: u32,
    // Elements of a query and of a key, and the quads of a key.
    head_dim: u32,
    head_quads: u32,
    // Floats from one row to the next.
    q_stride: u32,
    out_stride: u32,
    lse_stride: u32,
    // 0: no window.
    window: u32,
    scale: f32,
    // Works of this dispatch: where they start in `words`, and how many there are (tiles, for `reduce`).
    works: u32,
    work_count: u32,
    // Where the heads' slopes start in `words`, as bits of f32; 0: scores have no bias by distance.
    slopes: u32,
    // 0: scores have no soft cap.
    softcap: f32,
    // Quads from a slot to the next, and from a key to its value: none where one row is both (latent attention).
    slot_quads: u32,
    values: u32,
    // Quads of a stored row's elements, without its scale: with latent attention a key is two rows.
    code_quads: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
// Spans of keys {base, len, first_pos}, works {row0, rows, pos0, item0, span, skip, keys, part}, tiles
// {row0, rows, item0, part0, parts, 0, 0, 0}, and a slope for each head, if there are any.
@group(0) @binding(1) var<storage, read> words: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<f32>;
@group(0) @binding(3) var<storage, read> kv: array<Quad>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
@group(0) @binding(5) var<storage, read_write> lse: array<f32>;
// [part][kv head][item][HEAD_QUADS + 1]: the output, then the log-sum-exp.
@group(0) @binding(6) var<storage, read_write> scratch: array<vec4<f32>>;

// Largest head of this permutation, in quads.
const HEAD_QUADS = ${HEAD_QUADS}u;
// Items of a tile.
const ITEMS = ${ITEMS}u;
// Stands for minus infinity, which does not survive every driver.
const NEG_MAX = -1.0e30;
const WHOLE = 0xffffffffu;

struct Work {
    row0: u32,
    rows: u32,
    pos0: u32,
    item0: u32,
    span: u32,
    skip: u32,
    keys: u32,
    part: u32,
}

fn load_work(index: u32) -> Work {
    let at = params.works + index * 8u;
    return Work(words[at], words[at + 1u], words[at + 2u], words[at + 3u], words[at + 4u], words[at + 5u],
        words[at + 6u], words[at + 7u]);
}

fn scratch_at(part: u32, kv_head: u32, own: u32) -> u32 {
    return ((part * params.kv_heads + kv_head) * ITEMS + own) * (HEAD_QUADS + 1u);
}

fn store(row0: u32, item: u32, kv_head: u32, quad: u32, value: vec4<f32>) {
    let head = kv_head * params.group + item % params.group;
    let at = (row0 + item / params.group) * params.out_stride + head * params.head_dim + quad * 4u;
    for (var j = 0u; j < 4u; j++) {
        if quad * 4u + j < params.head_dim {
            out[at + j] = value[j];
        }
    }
}

fn store_lse(row0: u32, item: u32, kv_head: u32, value: f32) {
    lse[(row0 + item / params.group) * params.lse_stride + kv_head * params.group + item % params.group] = value;
}
