// out[r] (=|+=) x[r] . weight^T of many rows, for adapters that have no register file (software): an invocation makes 32 x 16
// outputs. There a load costs each invocation several times an addition and workgroup memory is no faster than a buffer, so that
// only more outputs for each load help: those of a subgroup load rows of x for each other. Rows of x and of the weight are padded
// with zeros to whole quads.
//#include weight
//#include matmul_params
//#include grid
//#include lanes

// Inner elements of four rows of the weight, by element.
fn columns(a: u32, b: u32, c: u32, d: u32, k: u32) -> mat4x4<f32> {
    return transpose(mat4x4<f32>(weight_quad(a + k), weight_quad(b + k), weight_quad(c + k), weight_quad(d + k)));
}

@compute @workgroup_size(8)
fn wide(own: Invocation) {
    let n0 = (linear_workgroup(own.wid, own.wcount) * 8u + own.tid) * 16u;
    let m0 = own.wid.z * 32u;
    let lane = lane_of(own);
    // Outputs that do not exist repeat the last row and are not stored.
    //#each 16 let w${i} = min(n0 + ${i}u, params.n - 1u) * params.quads;
    //#each 32/${LANES} let s${i} = min(m0 + ${i}u * ${LANES}u + lane, params.rows - 1u) * params.quads;
    // Row i has columns 0 to 3 in a, 4 to 7 in b, 8 to 11 in c, 12 to 15 in d. Compilers keep names apart from each other more
    // surely than elements of an array.
    //#each 32 var a${i} = vec4<f32>(); var b${i} = vec4<f32>(); var c${i} = vec4<f32>(); var d${i} = vec4<f32>();
    for (var k = 0u; k < params.quads; k++) {
        let wa = columns(w0, w1, w2, w3, k);
        let wb = columns(w4, w5, w6, w7, k);
        let wc = columns(w8, w9, w10, w11, k);
        let wd = columns(w12, w13, w14, w15, k);
        //#each 32/${LANES} let y${i} = x[s${i} + k];
        //#each 32 let x${i} = ${BROADCAST}(y${i/LANES}, ${i%LANES}u); a${i} += wa * x${i}; b${i} += wb * x${i}; c${i} += wc * x${i}; d${i} += wd * x${i};
    }
    //#each 32 store(m0 + ${i}u, n0, mat4x4<f32>(a${i}, b${i}, c${i}, d${i}));
}

fn store(row: u32, n0: u32, values: mat4x4<f32>) {
    if row >= params.rows {
        return;
    }
    var v = values;
    for (var i = 0u; i < 16u && n0 + i < params.n; i++) {
        let at = row * params.out_stride + params.out_col0 + n0 + i;
        let value = v[i / 4u][i % 4u];
        out[at] = select(value, out[at] + value, params.add == 1u);
    }
}
