// Products of many rows: a workgroup of 64 invocations makes 64 x 64 outputs. The including file has `params.quads` and
// defines x_quad(row, k) and w_quad(row, k): quad k of a row of the factors, zero beyond their ends.

// Depth of a tile, in floats.
const DEPTH = 32u;
// Tiles are stored by depth, then by group of four rows; the group is swizzled so that neither the transposing stores
// nor the loads conflict in memory banks.
var<workgroup> x_tile: array<vec4<f32>, DEPTH * 16u>;
var<workgroup> w_tile: array<vec4<f32>, DEPTH * 16u>;

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

// Outputs of an invocation: rows 4 (tid / 8).. and 32 further, columns 4 (tid % 8).. and 32 further.
struct Block {
    c00: mat4x4<f32>,
    c01: mat4x4<f32>,
    c10: mat4x4<f32>,
    c11: mat4x4<f32>,
}

// This invocation's part of the products of the rows from m0 with the weight's rows from n0.
fn multiply(m0: u32, n0: u32, tid: u32) -> Block {
    // Of eight: an invocation loads four blocks, at this quad and in these groups of rows and 8 further.
    let low = tid % 8u;
    let high = tid / 8u;
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
    return Block(c00, c01, c10, c11);
}
