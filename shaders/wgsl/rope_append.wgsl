// Rotates queries and keys of the fused projection in place and stores K and V in their slots, rounded to nearest
// even. A team of invocations for each row and head (q heads, then k, then v), several teams in a workgroup where heads are small;
// an invocation owns quads of the head, so that no two invocations share a word of the store. Heads have at most 512 elements.
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
    // Invocations of a team: a power of two, 8 to 64.
    team: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;
@group(0) @binding(2) var<storage, read> rope: array<f32>;
@group(0) @binding(3) var<storage, read_write> qkv: array<f32>;
@group(0) @binding(4) var<storage, read_write> kv: array<Quad>;

// The largest of the bits of each team's elements, without signs.
var<workgroup> largest: array<atomic<u32>, 8>;
// Quads of an invocation, at most.
const OWN = 2u;

fn rotated(base: u32, angles: u32, e: u32) -> f32 {
    let half_dim = params.head_dim / 2u;
    let first = e < half_dim;
    let angle = angles + select(e - half_dim, e, first);
    let sine = rope[angle + half_dim];
    let other = qkv[base + select(e - half_dim, e + half_dim, first)];
    return qkv[base + e] * rope[angle] + other * select(sine, -sine, first);
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let keys_end = params.heads + params.kv_heads;
    let heads_all = keys_end + params.kv_heads;
    let own_team = tid / params.team;
    let lane = tid % params.team;
    let at = linear_workgroup(wid, wcount) * (64u / params.team) + own_team;
    let row = at / heads_all;
    let head = at % heads_all;
    // Elements of the head; none for teams behind the last row, which meet the others at the barriers.
    let elements = select(0u, params.head_dim, row < params.rows);
    let parts = (params.head_quads + params.team - 1u) / params.team;
    let base = row * params.qkv_stride + head * params.head_dim;
    let rotate = params.rotate == 1u && head < keys_end;
    var own: array<vec4<f32>, OWN>;
    for (var part = 0u; part < parts; part++) {
        var v = vec4<f32>();
        for (var i = 0u; i < 4u; i++) {
            let e = (part * params.team + lane) * 4u + i;
            if e < elements {
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
    for (var part = 0u; rotate && part < parts; part++) {
        for (var i = 0u; i < 4u; i++) {
            let e = (part * params.team + lane) * 4u + i;
            if e < elements {
                qkv[base + e] = own[part][i];
            }
        }
    }
    var scale = 0u;
    if SCALE_QUADS > 0u {
        if lane == 0u {
            atomicStore(&largest[own_team], 0u);
        }
        workgroupBarrier();
        for (var part = 0u; part < parts; part++) {
            let bits = bitcast<vec4<u32>>(own[part]) & vec4<u32>(0x7fffffffu);
            atomicMax(&largest[own_team], max(max(bits.x, bits.y), max(bits.z, bits.w)));
        }
        workgroupBarrier();
        scale = scale_of(atomicLoad(&largest[own_team]));
    }
    if elements == 0u || head < params.heads {
        return;
    }
    // u32::MAX (store nothing) and slots of other shards fail this test alike.
    let slot = words[params.slots + row] - params.shard_slot0;
    if slot < params.shard_slots {
        // K's heads and then V's, as in the fused projection.
        let first = (slot * 2u * params.kv_heads + head - params.heads) * (params.head_quads + SCALE_QUADS);
        for (var part = 0u; part < parts; part++) {
            let quad = part * params.team + lane;
            if quad < params.head_quads {
                kv[first + quad] = narrow_scaled(own[part], scale);
            }
        }
        if SCALE_QUADS > 0u && lane == 0u {
            kv[first + params.head_quads] = scale_quad(scale);
        }
    }
}
