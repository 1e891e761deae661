// A product a head: out[r][h * out_step + i] = weight[h * n + i] . x[r][h * x_step ..][.. k], where other elements of the
// output stay. Two entry points, as of matmul.wgsl: `matvec` for few rows (shared/products.wgsl), `tiled` for many. Heads begin
// anywhere in a row, also within a quad; rows of the weight are padded with zeros to whole quads. A weight larger than a binding
// lies in several shards of rows, which may cut a head; a dispatch serves one.
//#include weight
//#include grid
//#include team
//#include tile

struct Params {
    // Rows of x and of the output.
    rows: u32,
    // Outputs, inputs and quads of inputs of a head.
    n: u32,
    k: u32,
    quads: u32,
    // Heads of this dispatch: the first one, and how many.
    head0: u32,
    heads: u32,
    // Floats from one row to the next, and from a head to the next.
    x_stride: u32,
    x_step: u32,
    out_stride: u32,
    out_step: u32,
    // Rows of the weight that this shard holds.
    shard_row0: u32,
    shard_rows: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<Quad>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

// The head of this workgroup.
var<private> head: u32;

// Quad k of the inputs of a head, whose first float is at `source`: zero beyond its end, where the next head's begin.
fn x_at(source: u32, k: u32) -> vec4<f32> {
    let at = source + k * 4u;
    let shift = at % 4u;
    var v = x[at / 4u];
    if shift > 0u {
        let first = v;
        let second = x[at / 4u + 1u];
        for (var i = 0u; i < 4u; i++) {
            let at = shift + i;
            v[i] = select(first[at % 4u], second[at % 4u], at > 3u);
        }
    }
    let left = vec4<u32>(params.k - k * 4u);
    return select(vec4<f32>(), v, vec4<u32>(0u, 1u, 2u, 3u) < left);
}

fn source_of(row: u32) -> u32 {
    return row * params.x_stride + head * params.x_step;
}

fn x_quad(row: u32, k: u32) -> vec4<f32> {
    if row < params.rows && k < params.quads {
        return x_at(source_of(row), k);
    }
    return vec4<f32>();
}

// Output `i` of this head as a row of the shard: beyond its rows, if the shard lacks it.
fn shard_row(i: u32) -> u32 {
    return head * params.n + i - params.shard_row0;
}

fn w_quad(i: u32, k: u32) -> vec4<f32> {
    let row = shard_row(i);
    if i < params.n && row < params.shard_rows && k < params.quads {
        return weight_quad(row * params.quads + k);
    }
    return vec4<f32>();
}

fn store(row: u32, i: u32, value: f32) {
    if row < params.rows && i < params.n && shard_row(i) < params.shard_rows {
        out[row * params.out_stride + head * params.out_step + i] = value;
    }
}

@compute @workgroup_size(64)
fn matvec(own: Invocation) {
    let team = team_of(own);
    let block = team.count * SPAN;
    let blocks = (params.n + block - 1u) / block;
    let at = linear_workgroup(own.wid, own.wcount);
    // A workgroup of no head reads and stores nothing; all lanes meet at the barriers of add_up.
    let idle = at >= params.heads * blocks;
    head = params.head0 + at / blocks;
    let n0 = at % blocks * block + team.index * SPAN;
    let row0 = own.wid.z * ROWS;
    // Outputs that do not exist, or are in other shards, repeat the shard's last row and are not stored.
    let items = select(params.quads / ITEM, 0u, idle);
    var weights: array<u32, SPAN>;
    for (var s = 0u; s < SPAN; s++) {
        weights[s] = min(shard_row(n0 + s), params.shard_rows - 1u) * items;
    }
    var sources: array<u32, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        sources[r] = source_of(min(row0 + r, params.rows - 1u));
    }
    var totals = add_up(products(weights, sources, items, team), own);
    if idle || team.lane > 0u {
        return;
    }
    for (var i = 0u; i < OUTPUTS; i++) {
        store(row0 + i / SPAN, n0 + i % SPAN, totals[i]);
    }
}

@compute @workgroup_size(64)
fn tiled(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let tiles = (params.n + 63u) / 64u;
    let at = linear_workgroup(wid, wcount);
    if at >= params.heads * tiles {
        return;
    }
    head = params.head0 + at / tiles;
    let n0 = at % tiles * 64u;
    let m0 = wid.z * 64u;
    let block = multiply(m0, n0, tid);
    let row = m0 + tid / 8u * 4u;
    let col = n0 + tid % 8u * 4u;
    store_block(row, col, block.c00);
    store_block(row, col + 32u, block.c01);
    store_block(row + 32u, col, block.c10);
    store_block(row + 32u, col + 32u, block.c11);
}

fn store_block(row0: u32, col: u32, block: mat4x4<f32>) {
    var rows = block;
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            store(row0 + i, col + j, rows[i][j]);
        }
    }
}
