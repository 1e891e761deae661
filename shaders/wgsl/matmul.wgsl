// out[r] (=|+=) x[r] . weight^T. Two entry points: `matvec` for few rows (each weight is read once per ROWS rows),
// `tiled` for many (64 x 64 outputs a workgroup, 8 x 8 an invocation). Rows of x and of the weight are padded with
// zeros to whole quads. A weight larger than a binding lies in several shards of rows; a dispatch serves one.
//#include dtype
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
    // Floats from one row of the output to the next, and the column of this shard's first weight row. Multiples of 4.
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
            let a = widen(weight[w0 + k]);
            let b = widen(weight[w1 + k]);
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

fn w_quad(row: u32, k: u32) -> vec4<f32> {
    if row < params.n && k < params.quads {
        return widen(weight[row * params.quads + k]);
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
    if n0 >= params.n {
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

// Stores 4 x 4 outputs. Shards start at multiples of four columns; weight rows beyond the end gave zeros, which is what
// padding holds.
fn store(row0: u32, col: u32, block: mat4x4<f32>) {
    if col >= params.n {
        return;
    }
    var rows = block;
    for (var i = 0u; i < 4u && row0 + i < params.rows; i++) {
        let at = (row0 + i) * (params.out_stride / 4u) + (params.out_col0 + col) / 4u;
        out_quads[at] = select(rows[i], out_quads[at] + rows[i], params.add == 1u);
    }
}
