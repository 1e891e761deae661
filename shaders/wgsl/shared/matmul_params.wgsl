// Parameters and bindings of out[r] (=|+=) x[r] . weight^T. A weight larger than a binding lies in several shards of rows; a dispatch serves one.
struct Params {
    // Rows of x and of the output.
    rows: u32,
    // Quads of a row of x and of the weight.
    quads: u32,
    // Rows of the weight in this shard.
    n: u32,
    // Floats from one row of the output to the next, a multiple of 4, and the column of this shard's first weight row.
    out_stride: u32,
    out_col0: u32,
    // 1: add to the output.
    add: u32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<Quad>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
