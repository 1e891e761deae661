// out[r] (=|+=) x[r] . weight^T. Two entry points: `matvec` for few rows (each weight is read once per ROWS rows),
// `tiled` for many (64 x 64 outputs a workgroup, 4 x 4 an invocation). Rows of x and of the weight are padded with
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

@compute @workgroup_size(256)
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
    // The first half of the workgroup loads x, the second the weight: each invocation a 4 x 4 block, transposed.
    let part = tid % 128u;
    let load_k = part % 8u;
    let load_row = part / 8u;
    let store_at = load_k * 4u * 16u + (load_row ^ load_k);
    // Outputs of this invocation: rows 4 ty.., columns 4 tx...
    let tx = tid % 16u;
    let ty = tid / 16u;
    var c0 = vec4<f32>();
    var c1 = vec4<f32>();
    var c2 = vec4<f32>();
    var c3 = vec4<f32>();
    for (var k0 = 0u; k0 < params.quads; k0 += DEPTH / 4u) {
        let k = k0 + load_k;
        if tid < 128u {
            let row = m0 + load_row * 4u;
            let t = transpose(mat4x4<f32>(x_quad(row, k), x_quad(row + 1u, k), x_quad(row + 2u, k), x_quad(row + 3u, k)));
            x_tile[store_at] = t[0];
            x_tile[store_at + 16u] = t[1];
            x_tile[store_at + 32u] = t[2];
            x_tile[store_at + 48u] = t[3];
        } else {
            let row = n0 + load_row * 4u;
            let t = transpose(mat4x4<f32>(w_quad(row, k), w_quad(row + 1u, k), w_quad(row + 2u, k), w_quad(row + 3u, k)));
            w_tile[store_at] = t[0];
            w_tile[store_at + 16u] = t[1];
            w_tile[store_at + 32u] = t[2];
            w_tile[store_at + 48u] = t[3];
        }
        workgroupBarrier();
        for (var d = 0u; d < DEPTH; d++) {
            let a = x_tile[d * 16u + (ty ^ (d / 4u))];
            let b = w_tile[d * 16u + (tx ^ (d / 4u))];
            c0 = fma(vec4<f32>(a.x), b, c0);
            c1 = fma(vec4<f32>(a.y), b, c1);
            c2 = fma(vec4<f32>(a.z), b, c2);
            c3 = fma(vec4<f32>(a.w), b, c3);
        }
        workgroupBarrier();
    }
    // Shards start at multiples of four columns; weight rows beyond the end gave zeros, which is what padding holds.
    if n0 + tx * 4u < params.n {
        let row = m0 + ty * 4u;
        let col = (params.out_col0 + n0) / 4u + tx;
        store(row, col, c0);
        store(row + 1u, col, c1);
        store(row + 2u, col, c2);
        store(row + 3u, col, c3);
    }
}

fn store(row: u32, col: u32, value: vec4<f32>) {
    if row < params.rows {
        let at = row * (params.out_stride / 4u) + col;
        out_quads[at] = select(value, out_quads[at] + value, params.add == 1u);
    }
}
