// Four E4M3 codes of KV, which are scaled by row (see rows_fp8.wgsl).
//#include e4m3
alias Quad = u32;

fn widen(q: Quad) -> vec4<f32> {
    return e4m3(q);
}
