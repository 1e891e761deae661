// out[i] = x[i] * Phi(x[i]), the exact GELU, for quads of rows with the same padding (gelu(0) = 0). The tail of the
// normal distribution below -a is exp(-a^2 / 2) t P(t) with t = 1 / (1 + 0.35 a); gelu.rs of the host backend says more.
//#include grid

struct Params {
    quads: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let at = linear_workgroup(wid, wcount) * 64u + tid;
    if at >= params.quads {
        return;
    }
    let v = x[at];
    let a = abs(v);
    let t = 1.0 / (1.0 + 0.35 * a);
    var p = t * -0.029115017 + 0.14381842;
    p = p * t - 0.25539103;
    p = p * t + 0.15879658;
    p = p * t - 0.022843437;
    p = p * t + 0.10539215;
    p = p * t + 0.11986309;
    p = p * t + 0.13985756;
    p = p * t + 0.13962166;
    // Beyond 80 the exponential would leave the normal numbers; the tail is nothing in f32 long before.
    let e = exp(max(-0.5 * a * a, vec4<f32>(-80.0)));
    let tail = select(a * e * t * p, vec4<f32>(), a > vec4<f32>(12.6));
    out[at] = max(v, vec4<f32>()) - tail;
}
