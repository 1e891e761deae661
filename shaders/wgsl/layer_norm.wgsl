// out[r] = (x[r] - mean(x[r])) / sqrt(var(x[r]) + eps) * weight. The variance is that of the differences from the mean, in a
// second pass.
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
        sum += dot(x[base + i], vec4<f32>(1.0));
    }
    let mean = total(sum, tid) / f32(params.cols);
    var squares = 0.0;
    for (var i = tid; i < params.quads; i += LANES) {
        let inside = vec4<u32>(i * 4u) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.cols);
        let d = select(vec4<f32>(), x[base + i] - mean, inside);
        squares += dot(d, d);
    }
    let factor = 1.0 / sqrt(total(squares, tid) / f32(params.cols) + params.eps);
    for (var i = tid; i < params.quads; i += LANES) {
        out[base + i] = (x[base + i] - mean) * factor * widen(weight[i]);
    }
}
