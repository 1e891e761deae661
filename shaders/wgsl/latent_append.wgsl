// Completes rows of latent attention (DeepSeek-V2 section 2.1) and stores them in their slots, rounded to nearest even. `queries` rotates
// the last elements of each head's query; `append` makes and stores the latent and the rotated key, which lie behind the heads.
// Inputs are not overwritten, so that each shard of the store may make its rows again.
//#include dtype
//#include append
//#include grid

struct Params {
    rows: u32,
    heads: u32,
    // Elements of a head, and of a stored row: `latent` ones and `rotated` ones. A multiple of 4.
    dim: u32,
    latent: u32,
    rotated: u32,
    // Elements of a head in `inputs`, for `queries`.
    query: u32,
    // Floats from one row to the next: of the fused row, of `inputs`, of `keys`, of `rope`.
    qkv_stride: u32,
    input_stride: u32,
    key_stride: u32,
    rope_stride: u32,
    // Where the slots start in `words`.
    slots: u32,
    // Slots that this shard of the store holds.
    shard_slot0: u32,
    shard_slots: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;
// Queries before absorption (`queries`), or latents (`append`).
@group(0) @binding(2) var<storage, read> inputs: array<f32>;
@group(0) @binding(3) var<storage, read> keys: array<f32>;
@group(0) @binding(4) var<storage, read> rope: array<f32>;
@group(0) @binding(5) var<storage, read_write> qkv: array<f32>;
@group(0) @binding(6) var<storage, read_write> kv: array<Quad>;

const THREADS = 64u;

// The largest of the bits of the elements of the row's halves, without signs.
var<workgroup> largest: array<atomic<u32>, 2>;

// Where the element that makes a pair with element `e` lies.
fn partner(e: u32) -> u32 {
    return select(e - params.rotated / 2u, e + params.rotated / 2u, e < params.rotated / 2u);
}

// Element `e` of the rotated part, from its value `own` and its partner's, `other`.
fn turned(own: f32, other: f32, row: u32, e: u32) -> f32 {
    let half_dim = params.rotated / 2u;
    let angles = row * params.rope_stride + e % half_dim;
    let sine = rope[angles + half_dim];
    return own * rope[angles] + select(other, -other, e < half_dim) * sine;
}

// One workgroup per row and head.
@compute @workgroup_size(64)
fn queries(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let at = linear_workgroup(wid, wcount);
    let row = at / params.heads;
    let head = at % params.heads;
    if row >= params.rows {
        return;
    }
    let source = row * params.input_stride + head * params.query + params.query - params.rotated;
    let to = row * params.qkv_stride + head * params.dim + params.latent;
    for (var e = tid; e < params.rotated; e += THREADS) {
        qkv[to + e] = turned(inputs[source + e], inputs[source + partner(e)], row, e);
    }
}

fn element(row: u32, e: u32) -> f32 {
    if e < params.latent {
        return inputs[row * params.input_stride + e];
    }
    let own = e - params.latent;
    let source = row * params.key_stride;
    return turned(keys[source + own], keys[source + partner(own)], row, own);
}

// One workgroup per row; an invocation owns whole quads of it.
@compute @workgroup_size(64)
fn append(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let row = linear_workgroup(wid, wcount);
    if row >= params.rows {
        return;
    }
    // u32::MAX (store nothing) and slots of other shards fail this test alike.
    let slot = words[params.slots + row] - params.shard_slot0;
    let to = row * params.qkv_stride + params.heads * params.dim;
    // Each half is stored as a row.
    let row_quads = params.dim / 8u;
    if SCALE_QUADS > 0u {
        if tid < 2u {
            atomicStore(&largest[tid], 0u);
        }
        workgroupBarrier();
    }
    for (var quad = tid; quad < 2u * row_quads; quad += THREADS) {
        var v = vec4<f32>();
        for (var i = 0u; i < 4u; i++) {
            v[i] = element(row, quad * 4u + i);
            qkv[to + quad * 4u + i] = v[i];
        }
        if SCALE_QUADS > 0u {
            let bits = bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu);
            atomicMax(&largest[quad / row_quads], max(max(bits.x, bits.y), max(bits.z, bits.w)));
        }
    }
    if SCALE_QUADS > 0u {
        workgroupBarrier();
    }
    for (var quad = tid; slot < params.shard_slots && quad < 2u * row_quads; quad += THREADS) {
        let half_row = quad / row_quads;
        let scale = scale_of(atomicLoad(&largest[half_row]));
        let first = (slot * 2u + half_row) * (row_quads + SCALE_QUADS);
        let at = to + quad * 4u;
        kv[first + quad % row_quads] = narrow_scaled(vec4<f32>(qkv[at], qkv[at + 1u], qkv[at + 2u], qkv[at + 3u]), scale);
        if SCALE_QUADS > 0u && quad % row_quads == 0u {
            kv[first + row_quads] = scale_quad(scale);
        }
    }
}
