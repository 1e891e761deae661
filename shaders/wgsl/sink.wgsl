// Attention sinks: out[r][h] *= 1 / (1 + exp(sinks[h] - lse[r][h])), for rows that have seen keys. One workgroup per row and
// head.
//#include dtype
//#include grid

struct Params {
    rows: u32,
    heads: u32,
    // Elements of a head's output.
    head_dim: u32,
    // Floats from one row to the next.
    out_stride: u32,
    lse_stride: u32,
    // Where the rows' counts of keys start in `words`.
    counts: u32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;
@group(0) @binding(2) var<storage, read> lse: array<f32>;
@group(0) @binding(3) var<storage, read> sinks: array<Quad>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(32)
fn main(
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
    if words[params.counts + row] == 0u {
        return;
    }
    let steep = widen(sinks[head / 4u])[head % 4u] - lse[row * params.lse_stride + head];
    // exp beyond 80 would overflow, and infinities do not survive every driver; the share is nothing in f32 long before.
    let share = 1.0 / (1.0 + exp(clamp(steep, -80.0, 80.0)));
    let base = row * params.out_stride + head * params.head_dim;
    for (var i = tid; i < params.head_dim; i += 32u) {
        out[base + i] *= share;
    }
}
