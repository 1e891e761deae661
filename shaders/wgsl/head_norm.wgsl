// Root-mean-square norm of query and key heads of the fused projection, in place. One workgroup per row and head. Heads
// may start within a quad.
//#include dtype
//#include grid
//#include total

struct Params {
    rows: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    // Floats from one row to the next.
    stride: u32,
    eps: f32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> q_weight: array<Quad>;
@group(0) @binding(2) var<storage, read> k_weight: array<Quad>;
@group(0) @binding(3) var<storage, read_write> qkv: array<f32>;

fn weight(head: u32, i: u32) -> f32 {
    if head < params.heads {
        return widen(q_weight[i / 4u])[i % 4u];
    }
    return widen(k_weight[i / 4u])[i % 4u];
}

@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let normed = params.heads + params.kv_heads;
    let at = linear_workgroup(wid, wcount);
    let row = at / normed;
    let head = at % normed;
    if row >= params.rows {
        return;
    }
    let base = row * params.stride + head * params.head_dim;
    var sum = 0.0;
    for (var i = tid; i < params.head_dim; i += LANES) {
        sum += qkv[base + i] * qkv[base + i];
    }
    let factor = 1.0 / sqrt(total(sum, tid) / f32(params.head_dim) + params.eps);
    for (var i = tid; i < params.head_dim; i += LANES) {
        qkv[base + i] *= factor * weight(head, i);
    }
}
