// Sums, multiples and soft caps of rows in place, for quads of rows with the same padding, which stays zero: x[r] += y[r],
// x[r] *= factor and x[r] = factor * tanh(x[r] / factor).
//#include grid
//#include softcap

struct Params {
    // Quads of all rows.
    quads: u32,
    factor: f32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> y: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(64)
fn add(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let at = linear_workgroup(wid, wcount) * 64u + tid;
    if at < params.quads {
        x[at] += y[at];
    }
}

@compute @workgroup_size(64)
fn scale(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let at = linear_workgroup(wid, wcount) * 64u + tid;
    if at < params.quads {
        x[at] *= params.factor;
    }
}

@compute @workgroup_size(64)
fn softcap(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let at = linear_workgroup(wid, wcount) * 64u + tid;
    if at < params.quads {
        x[at] = capped(x[at], params.factor);
    }
}
