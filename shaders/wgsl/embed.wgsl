// Token embedding: out[i] (=|+=) weight[ids[i]], widened. One invocation copies four elements. A table larger than a
// binding lies in several shards; each dispatch serves the ids of one shard.
//#include weight
//#include grid

struct Params {
    // Where the ids start in `words`.
    ids: u32,
    rows: u32,
    // Rows of the table that this shard holds.
    shard_row0: u32,
    shard_rows: u32,
    // Quads of a row, of the table and of the output alike.
    quads: u32,
    // 1: add to the output.
    add: u32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;
@group(0) @binding(2) var<storage, read> weight: array<Quad>;
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
    // Ids below the shard wrap around and fail the same test as those above it.
    let id = words[params.ids + at / params.quads] - params.shard_row0;
    if id >= params.shard_rows {
        return;
    }
    let row = weight_quad(id * params.quads + at % params.quads);
    out[at] = select(row, out[at] + row, params.add == 1u);
}
