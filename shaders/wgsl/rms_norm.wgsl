// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight.
//#include dtype
//#include grid
//#include norm

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
    let factor = 1.0 / sqrt(total(sum, tid) / f32(params.cols) + params.eps);
    for (var i = tid; i < params.quads; i += LANES) {
        out[base + i] = x[base + i] * factor * widen(weight[i]);
    }
}
