// Products of a mixture of experts: out[p] = x[p] . weight[expert of p]^T for places p in the order by expert, whose weights
// are matrices of n rows, one behind the other. `matvec` for few rows: with ROWS > 1 it serves up to so many rows of one
// expert; with 1, choices that are not sorted, whose rows of x may be shared. `tiled` for many: 64 x 64 outputs a workgroup.
// Workgroups of a depth serve one stretch of rows. Rows of x and of the weight are padded with zeros to whole quads. A weight
// larger than a binding lies in several shards of rows, which may end within an expert; a dispatch serves one.
//#include weight
//#include grid
//#include team
//#include tile
//#include choices

struct Params {
    choices: u32,
    // Experts.
    count: u32,
    // Quads of a row of x and of the weight.
    quads: u32,
    // Rows of an expert's weight.
    n: u32,
    // Floats from one row of the output to the next.
    out_stride: u32,
    // Rows of the weight that this shard holds.
    shard_row0: u32,
    shard_rows: u32,
    // Choices that share a row of x; 1 where they are sorted.
    shared_by: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> weight: array<Quad>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

// Places of one expert, and the row of its weight that is its first, in this shard: rows before the shard wrap around and
// fail the same test as those behind it.
struct Stretch {
    first: u32,
    end: u32,
    row0: u32,
}

// Stretches of up to `rows` places before those of an expert: at least as many as there are, and one more for each expert.
fn stretches_before(expert: u32, rows: u32) -> u32 {
    return words[start_of(expert)] / rows + expert;
}

// Stretch `index` of up to `rows` places; may be empty.
fn stretch(index: u32, rows: u32) -> Stretch {
    // The last expert whose stretches do not start behind the index.
    var expert = 0u;
    for (var left = params.count; left > 1u;) {
        let half = left / 2u;
        if stretches_before(expert + half, rows) <= index {
            expert += half;
        }
        left -= half;
    }
    let first = words[start_of(expert)] + (index - stretches_before(expert, rows)) * rows;
    let end = min(first + rows, words[start_of(expert + 1u)]);
    return Stretch(first, end, expert * params.n - params.shard_row0);
}

// Whether none of the rows from `row` on, `rows` many, is in this shard.
fn outside(row: u32, rows: u32) -> bool {
    return row >= params.shard_rows && 0u - row >= rows;
}

fn x_at(source: u32, k: u32) -> vec4<f32> {
    return x[source + k];
}

@compute @workgroup_size(64)
fn matvec(own: Invocation) {
    let team = team_of(own);
    let block = team.count * SPAN;
    let block0 = linear_workgroup(own.wid, own.wcount) * block;
    let n0 = block0 + team.index * SPAN;
    var rows: Stretch;
    if ROWS == 1u {
        rows = Stretch(own.wid.z, own.wid.z + 1u, words[expert_at(own.wid.z)] * params.n - params.shard_row0);
    } else {
        rows = stretch(own.wid.z, ROWS);
    }
    // A workgroup without outputs reads and stores nothing; all lanes meet at the barriers of add_up.
    let idle = block0 >= params.n || rows.first >= rows.end || outside(rows.row0 + block0, block);
    // Outputs that do not exist repeat the shard's last row and are not stored.
    let items = select(params.quads / ITEM, 0u, idle);
    var weights: array<u32, SPAN>;
    for (var s = 0u; s < SPAN; s++) {
        weights[s] = min(rows.row0 + n0 + s, params.shard_rows - 1u) * items;
    }
    var sources: array<u32, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        sources[r] = min(rows.first + r, rows.end - 1u) / params.shared_by * params.quads;
    }
    var totals = add_up(products(weights, sources, items, team), own);
    if idle || team.lane > 0u {
        return;
    }
    for (var i = 0u; i < OUTPUTS; i++) {
        let row = rows.first + i / SPAN;
        let n = n0 + i % SPAN;
        if row < rows.end && n < params.n && rows.row0 + n < params.shard_rows {
            out[row * params.out_stride + n] = totals[i];
        }
    }
}

// The stretch of this workgroup of `tiled`.
var<private> tile_rows: Stretch;

fn x_quad(row: u32, k: u32) -> vec4<f32> {
    if row < tile_rows.end && k < params.quads {
        return x[row * params.quads + k];
    }
    return vec4<f32>();
}

fn w_quad(row: u32, k: u32) -> vec4<f32> {
    let at = tile_rows.row0 + row;
    if row < params.n && at < params.shard_rows && k < params.quads {
        return weight_quad(at * params.quads + k);
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
    let rows = stretch(wid.z, 64u);
    if n0 >= params.n || rows.first >= rows.end || outside(rows.row0 + n0, 64u) {
        return;
    }
    tile_rows = rows;
    let block = multiply(rows.first, n0, tid);
    let row = rows.first + tid / 8u * 4u;
    let col = n0 + tid % 8u * 4u;
    store(row, col, block.c00);
    store(row, col + 32u, block.c01);
    store(row + 32u, col, block.c10);
    store(row + 32u, col + 32u, block.c11);
}

// Stores those of 4 x 4 outputs that exist.
fn store(row0: u32, col0: u32, block: mat4x4<f32>) {
    var rows = block;
    for (var i = 0u; i < 4u && row0 + i < tile_rows.end; i++) {
        for (var j = 0u; j < 4u; j++) {
            let col = col0 + j;
            if col < params.n && tile_rows.row0 + col < params.shard_rows {
                out[(row0 + i) * params.out_stride + col] = rows[i][j];
            }
        }
    }
}
