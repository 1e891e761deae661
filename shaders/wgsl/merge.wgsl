// Scale-reduce of two partials in place (formulas in engine/types/src/partial.rs). One workgroup per row and head.
// Emptiness is decided on the host, by counts: an action per row.
//#include grid

struct Params {
    rows: u32,
    heads: u32,
    // Elements of a head's output.
    head_dim: u32,
    // Floats from one row to the next.
    out_stride: u32,
    lse_stride: u32,
    // Where the actions start in `words`.
    actions: u32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;
@group(0) @binding(2) var<storage, read> other_out: array<f32>;
@group(0) @binding(3) var<storage, read> other_lse: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
@group(0) @binding(5) var<storage, read_write> lse: array<f32>;

// Actions: the other partial is empty; ours is empty; neither is.
const KEEP = 0u;
const TAKE = 1u;

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
    let action = words[params.actions + row];
    if action == KEEP {
        return;
    }
    let base = row * params.out_stride + head * params.head_dim;
    let lse_at = row * params.lse_stride + head;
    var weights = vec2<f32>(0.0, 1.0);
    var merged = other_lse[lse_at];
    if action != TAKE {
        let a = lse[lse_at];
        let b = other_lse[lse_at];
        let top = max(a, b);
        let w = vec2<f32>(exp(a - top), exp(b - top));
        weights = w / (w.x + w.y);
        merged = top + log(w.x + w.y);
    }
    for (var i = tid; i < params.head_dim; i += 32u) {
        var value = other_out[base + i];
        if action != TAKE {
            value = weights.x * out[base + i] + weights.y * value;
        }
        out[base + i] = value;
    }
    // Every invocation has read the old value before it is replaced.
    storageBarrier();
    if tid == 0u {
        lse[lse_at] = merged;
    }
}
