// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight. One workgroup per row; padding is zero and stays zero.
//#include dtype
//#include grid

struct Params {
    rows: u32,
    cols: u32,
    // Quads of a row, of both tensors and of the weight.
    quads: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<Quad>;
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>;

const LANES = 128u;
var<workgroup> sums: array<f32, LANES>;

@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let row = linear_workgroup(wid, wcount);
    if row >= params.rows {
        return;
    }
    let base = row * params.quads;
    var sum = 0.0;
    for (var i = tid; i < params.quads; i += LANES) {
        let v = x[base + i];
        sum += dot(v, v);
    }
    sums[tid] = sum;
    for (var step = LANES / 2u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if tid < step {
            sums[tid] += sums[tid + step];
        }
    }
    workgroupBarrier();
    let factor = 1.0 / sqrt(sums[0] / f32(params.cols) + params.eps);
    for (var i = tid; i < params.quads; i += LANES) {
        out[base + i] = x[base + i] * factor * widen(weight[i]);
    }
}
