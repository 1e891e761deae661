// out[r][i] = silu(x[r][i]) * x[r][n + i] for i < n: gate, then up. One invocation makes one element.
//#include grid

struct Params {
    rows: u32,
    n: u32,
    // Floats from one row to the next.
    x_stride: u32,
    out_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let at = linear_workgroup(wid, wcount) * 64u + tid;
    if at >= params.rows * params.n {
        return;
    }
    let row = at / params.n;
    let i = at % params.n;
    let gate = x[row * params.x_stride + i];
    let up = x[row * params.x_stride + params.n + i];
    // exp beyond 80 would overflow, and infinities do not survive every driver; silu is 0 in f32 long before.
    let sigmoid = 1.0 / (1.0 + exp(min(-gate, 80.0)));
    out[row * params.out_stride + i] = gate * sigmoid * up;
}
