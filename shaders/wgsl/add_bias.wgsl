// x[r] += bias, for quads of rows. Padding is zero in both and stays so.
//#include dtype
//#include grid

struct Params {
    // Quads of all rows, and of one.
    all: u32,
    quads: u32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> bias: array<Quad>;
@group(0) @binding(2) var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let at = linear_workgroup(wid, wcount) * 64u + tid;
    if at >= params.all {
        return;
    }
    x[at] += widen(bias[at % params.quads]);
}
