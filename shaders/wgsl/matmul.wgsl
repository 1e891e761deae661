// out[r] (=|+=) x[r] . weight^T. Two entry points: `matvec` for few rows (each weight is read once per ROWS rows),
// `tiled` for many (64 x 64 outputs a workgroup, 8 x 8 an invocation). Rows of x and of the weight are padded with
// zeros to whole quads. A weight larger than a binding lies in several shards of rows; a dispatch serves one.
//#include dtype
//#include grid

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

// Rows of x that one matvec workgroup serves.
const ROWS = ${ROWS}u;
// A workgroup is two teams of 32 lanes; each team makes two outputs for each row of x.
const LANES = 32u;
const SPAN = 2u;
const BLOCK = 4u;
var<workgroup> sums: array<f32, 64u * SPAN * ROWS>;

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
    for (var step = LANES / 2u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if lane < step {
            for (var i = 0u; i < SPAN * ROWS; i++) {
                sums[i * 64u + tid] += sums[i * 64u + tid + step];
            }
        }
    }
    workgroupBarrier();
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

// Depth of a tile, in floats.
const DEPTH = 32u;
// Tiles are stored by depth, then by group of four rows; the group is swizzled so that neither the transposing stores
// nor the loads conflict in memory banks.
var<workgroup> x_tile: array<vec4<f32>, DEPTH * 16u>;
var<workgroup> w_tile: array<vec4<f32>, DEPTH * 16u>;

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

// Loads the 4 x 4 block of x at quad `k` of the rows from m0 + 4 group, transposed.
fn load_x(m0: u32, group: u32, k0: u32, k: u32) {
    let row = m0 + group * 4u;
    let q = k0 + k;
    let t = transpose(mat4x4<f32>(x_quad(row, q), x_quad(row + 1u, q), x_quad(row + 2u, q), x_quad(row + 3u, q)));
    let at = k * 64u + (group ^ k);
    x_tile[at] = t[0];
    x_tile[at + 16u] = t[1];
    x_tile[at + 32u] = t[2];
    x_tile[at + 48u] = t[3];
}

// As load_x, of the weight.
fn load_w(n0: u32, group: u32, k0: u32, k: u32) {
    let row = n0 + group * 4u;
    let q = k0 + k;
    let t = transpose(mat4x4<f32>(w_quad(row, q), w_quad(row + 1u, q), w_quad(row + 2u, q), w_quad(row + 3u, q)));
    let at = k * 64u + (group ^ k);
    w_tile[at] = t[0];
    w_tile[at + 16u] = t[1];
    w_tile[at + 32u] = t[2];
    w_tile[at + 48u] = t[3];
}

// Row i is a[i] b.
fn outer(a: vec4<f32>, b: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(a.x * b, a.y * b, a.z * b, a.w * b);
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
    // Of eight: an invocation loads four blocks, at this quad and in these groups of rows and 8 further.
    let low = tid % 8u;
    let high = tid / 8u;
    // Its outputs: rows 4 high.. and 4 high + 32.., columns 4 low.. and 4 low + 32...
    var c00 = mat4x4<f32>();
    var c01 = mat4x4<f32>();
    var c10 = mat4x4<f32>();
    var c11 = mat4x4<f32>();
    for (var k0 = 0u; k0 < params.quads; k0 += DEPTH / 4u) {
        load_x(m0, high, k0, low);
        load_x(m0, high + 8u, k0, low);
        load_w(n0, high, k0, low);
        load_w(n0, high + 8u, k0, low);
        workgroupBarrier();
        for (var d = 0u; d < DEPTH; d++) {
            let at_a = d * 16u + (high ^ (d / 4u));
            let at_b = d * 16u + (low ^ (d / 4u));
            let a0 = x_tile[at_a];
            let a1 = x_tile[at_a + 8u];
            let b0 = w_tile[at_b];
            let b1 = w_tile[at_b + 8u];
            c00 += outer(a0, b0);
            c01 += outer(a0, b1);
            c10 += outer(a1, b0);
            c11 += outer(a1, b1);
        }
        workgroupBarrier();
    }
    let row = m0 + high * 4u;
    let col = n0 + low * 4u;
    store(row, col, c00);
    store(row, col + 32u, c01);
    store(row + 32u, col, c10);
    store(row + 32u, col + 32u, c11);
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
