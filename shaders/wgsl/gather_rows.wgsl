// out[i] = x[rows[i]]. One invocation copies four elements.
//#include grid

struct Params {
    // Where the row numbers start in `words`.
    index: u32,
    rows: u32,
    // Quads of a row, of both tensors.
    quads: u32,
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let at = linear_workgroup(wid, wcount) * 64u + tid;
    if at >= params.rows * params.quads {
        return;
    }
    out[at] = x[words[params.index + at / params.quads] * params.quads + at % params.quads];
}
