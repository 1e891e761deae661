// Common code of norms: one workgroup per row, whose invocations take every 128th quad. Padding is zero and, as the weight's
// is too, stays zero.
//#include total

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
