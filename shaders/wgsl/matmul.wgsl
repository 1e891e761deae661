// out[r] (=|+=) x[r] . weight^T. Two entry points: `matvec` for few rows (each weight is read once per ROWS rows),
// `tiled` for many (64 x 64 outputs a workgroup, 8 x 8 an invocation). Rows of x and of the weight are padded with
// zeros to whole quads. A weight larger than a binding lies in several shards of rows; a dispatch serves one.
//#include weight
//#include grid
//#include team
//#include tile

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
@group(0) @binding(3) var<storage, read_write> out_quads: array<vec4<f32>>;

@compute @workgroup_size(64)
fn matvec(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let lane = tid % LANES;
    let n0 = linear_workgroup(wid, wcount) * BLOCK + (tid / LANES) * SPAN;
    let row0 = wid.z * ROWS;
    var acc: array<f32, SPAN * ROWS>;
    if n0 < params.n {
        // The second output of the last team may not exist: it then repeats the first and is not stored.
        let w0 = n0 * params.quads;
        let w1 = min(n0 + 1u, params.n - 1u) * params.quads;
        for (var k = lane; k < params.quads; k += LANES) {
            let a = weight_quad(w0 + k);
            let b = weight_quad(w1 + k);
            for (var r = 0u; r < ROWS; r++) {
                let v = x[min(row0 + r, params.rows - 1u) * params.quads + k];
                acc[r * SPAN] += dot(a, v);
                acc[r * SPAN + 1u] += dot(b, v);
            }
        }
    }
    for (var i = 0u; i < SPAN * ROWS; i++) {
        sums[i * 64u + tid] = acc[i];
    }
    add_up(lane, tid);
    // Lane i of a team stores the team's output i.
    if lane < SPAN * ROWS {
        let row = row0 + lane / SPAN;
        let n = n0 + lane % SPAN;
        if row < params.rows && n < params.n {
            let at = row * params.out_stride + params.out_col0 + n;
            let sum = sums[lane * 64u + (tid - lane)];
            out[at] = select(sum, out[at] + sum, params.add == 1u);
        }
    }
}

fn x_quad(row: u32, k: u32) -> vec4<f32> {
    if row < params.rows && k < params.quads {
        return x[row * params.quads + k];
    }
    return vec4<f32>();
}

// Columns of a tile before this shard's first, so that tiles begin at whole quads of the output.
fn before() -> u32 {
    return params.out_col0 % 4u;
}

fn w_quad(col: u32, k: u32) -> vec4<f32> {
    // Columns before the shard wrap around and fail the same test as those behind it.
    let row = col - before();
    if row < params.n && k < params.quads {
        return weight_quad(row * params.quads + k);
    }
    return vec4<f32>();
}

@compute @workgroup_size(64)
fn tiled(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let n0 = linear_workgroup(wid, wcount) * 64u;
    let m0 = wid.z * 64u;
    if n0 >= params.n + before() {
        return;
    }
    let block = multiply(m0, n0, tid);
    let row = m0 + tid / 8u * 4u;
    let col = n0 + tid % 8u * 4u;
    store(row, col, block.c00);
    store(row, col + 32u, block.c01);
    store(row + 32u, col, block.c10);
    store(row + 32u, col + 32u, block.c11);
}

// Stores those of 4 x 4 outputs that are this shard's. Others in their quads stay: those of other shards, and padding.
fn store(row0: u32, col: u32, block: mat4x4<f32>) {
    if col >= params.n + before() {
        return;
    }
    let own = vec4<u32>(0u, 1u, 2u, 3u) + vec4<u32>(col - before()) < vec4<u32>(params.n);
    var rows = block;
    for (var i = 0u; i < 4u && row0 + i < params.rows; i++) {
        let at = (row0 + i) * (params.out_stride / 4u) + (params.out_col0 - before() + col) / 4u;
        let old = out_quads[at];
        out_quads[at] = select(old, select(rows[i], old + rows[i], params.add == 1u), own);
    }
}
