// Steps of a mixture of experts around its products (experts/grouped.wgsl), after rows are routed and sorted
// (experts/route.wgsl): `gather` copies each row to the places of its choices; `add_biases` adds their expert's bias to rows in
// that order; `combine` adds the weighted results of a row's choices to it, in the order of rank. For quads of rows with the
// same padding, which stays zero.
//#include dtype
//#include grid
//#include choices

struct Params {
    choices: u32,
    top_k: u32,
    // Quads of a row.
    quads: u32,
    // Experts whose biases this shard holds.
    shard_row0: u32,
    shard_rows: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> biases: array<Quad>;
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;

@compute @workgroup_size(64)
fn gather(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let at = linear_workgroup(wid, wcount) * 64u + tid;
    let choice = at / params.quads;
    if choice >= params.choices {
        return;
    }
    let i = at % params.quads;
    out[words[place_of(choice)] * params.quads + i] = x[choice / params.top_k * params.quads + i];
}

@compute @workgroup_size(64)
fn add_biases(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let at = linear_workgroup(wid, wcount) * 64u + tid;
    let place = at / params.quads;
    if place >= params.choices {
        return;
    }
    // Experts below the shard wrap around and fail the same test as those above it.
    let expert = words[expert_at(place)] - params.shard_row0;
    if expert >= params.shard_rows {
        return;
    }
    out[at] += widen(biases[expert * params.quads + at % params.quads]);
}

@compute @workgroup_size(64)
fn combine(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let at = linear_workgroup(wid, wcount) * 64u + tid;
    let choice0 = at / params.quads * params.top_k;
    if choice0 >= params.choices {
        return;
    }
    let i = at % params.quads;
    var sum = out[at];
    for (var rank = 0u; rank < params.top_k; rank++) {
        let choice = choice0 + rank;
        sum += bitcast<f32>(words[weight_of(choice)]) * x[words[place_of(choice)] * params.quads + i];
    }
    out[at] = sum;
}
