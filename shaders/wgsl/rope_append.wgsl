// Rotates queries and keys of the fused projection in place and stores K and V in their slots, rounded to nearest
// even. One workgroup per row and head (q heads, then k, then v); an invocation owns quads of the head, so that no two
// invocations share a word of the store. Heads have at most 512 elements.
//#include dtype
//#include append
//#include grid

struct Params {
    rows: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    // Quads that a head takes in the store.
    head_quads: u32,
    // Floats from one row to the next.
    qkv_stride: u32,
    rope_stride: u32,
    // Where the slots start in `words`.
    slots: u32,
    // Slots that this shard of the store holds.
    shard_slot0: u32,
    shard_slots: u32,
    // 1: rotate; 0: keys are rotated already (further shards).
    rotate: u32,
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;
@group(0) @binding(2) var<storage, read> rope: array<f32>;
@group(0) @binding(3) var<storage, read_write> qkv: array<f32>;
@group(0) @binding(4) var<storage, read_write> kv: array<Quad>;

const THREADS = 64u;

// The largest of the bits of the row's elements, without signs.
var<workgroup> largest: atomic<u32>;
// Quads of an invocation.
const OWN = 2u;

fn rotated(base: u32, angles: u32, e: u32) -> f32 {
    let half_dim = params.head_dim / 2u;
    let v = qkv[base + e];
    if e < half_dim {
        return v * rope[angles + e] - qkv[base + e + half_dim] * rope[angles + half_dim + e];
    }
    return v * rope[angles + e - half_dim] + qkv[base + e - half_dim] * rope[angles + e];
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let keys_end = params.heads + params.kv_heads;
    let heads_all = keys_end + params.kv_heads;
    let at = linear_workgroup(wid, wcount);
    let row = at / heads_all;
    let head = at % heads_all;
    if row >= params.rows {
        return;
    }
    let base = row * params.qkv_stride + head * params.head_dim;
    let rotate = params.rotate == 1u && head < keys_end;
    var own: array<vec4<f32>, OWN>;
    for (var part = 0u; part < OWN; part++) {
        var v = vec4<f32>();
        for (var i = 0u; i < 4u; i++) {
            let e = (part * THREADS + tid) * 4u + i;
            if e < params.head_dim {
                if rotate {
                    v[i] = rotated(base, row * params.rope_stride, e);
                } else {
                    v[i] = qkv[base + e];
                }
            }
        }
        own[part] = v;
    }
    // Every element has been read before any is replaced.
    storageBarrier();
    for (var part = 0u; rotate && part < OWN; part++) {
        for (var i = 0u; i < 4u; i++) {
            let e = (part * THREADS + tid) * 4u + i;
            if e < params.head_dim {
                qkv[base + e] = own[part][i];
            }
        }
    }
    if SCALE_QUADS > 0u {
        if tid == 0u {
            atomicStore(&largest, 0u);
        }
        workgroupBarrier();
        for (var part = 0u; part < OWN; part++) {
            let bits = bitcast<vec4<u32>>(own[part]) & vec4<u32>(0x7fffffffu);
            atomicMax(&largest, max(max(bits.x, bits.y), max(bits.z, bits.w)));
        }
        workgroupBarrier();
    }
    let scale = scale_of(atomicLoad(&largest));
    // u32::MAX (store nothing) and slots of other shards fail this test alike.
    let slot = words[params.slots + row] - params.shard_slot0;
    if head >= params.heads && slot < params.shard_slots {
        // K's heads and then V's, as in the fused projection.
        let first = (slot * 2u * params.kv_heads + head - params.heads) * (params.head_quads + SCALE_QUADS);
        for (var part = 0u; part < OWN; part++) {
            let quad = part * THREADS + tid;
            if quad < params.head_quads {
                kv[first + quad] = narrow_scaled(own[part], scale);
            }
        }
        if SCALE_QUADS > 0u && tid == 0u {
            kv[first + params.head_quads] = scale_quad(scale);
        }
    }
}
