// out[r] (=|+=) x[r] . weight^T. Two entry points: `matvec` for few rows (shared/products.wgsl),
// `tiled` for many (64 x 64 outputs a workgroup, 8 x 8 an invocation). Rows of x and of the weight are padded with
// zeros to whole quads.
//#include weight
//#include matmul_params
//#include grid
//#include team
//#include tile

@group(0) @binding(3) var<storage, read_write> out_quads: array<vec4<f32>>;

fn x_at(source: u32, k: u32) -> vec4<f32> {
    return x[source + k];
}

@compute @workgroup_size(64)
fn matvec(own: Invocation) {
    let team = team_of(own);
    let n0 = (linear_workgroup(own.wid, own.wcount) * team.count + team.index) * SPAN;
    let row0 = own.wid.z * ROWS;
    // Outputs that do not exist repeat the last row and are not stored.
    let items = params.quads / ITEM;
    var weights: array<u32, SPAN>;
    for (var s = 0u; s < SPAN; s++) {
        weights[s] = min(n0 + s, params.n - 1u) * items;
    }
    var sources: array<u32, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        sources[r] = min(row0 + r, params.rows - 1u) * params.quads;
    }
    var totals = add_up(products(weights, sources, items, team), own);
    if team.lane > 0u {
        return;
    }
    for (var i = 0u; i < OUTPUTS; i++) {
        let row = row0 + i / SPAN;
        let n = n0 + i % SPAN;
        if row < params.rows && n < params.n {
            let at = row * params.out_stride + params.out_col0 + n;
            out[at] = select(totals[i], out[at] + totals[i], params.add == 1u);
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
