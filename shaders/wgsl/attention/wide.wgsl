// Micro attention for adapters that have no register file (software): an invocation serves eight items of a tile of 64, with four
// keys at a time. There a load costs each invocation several times an addition, also from workgroup memory and also where
// all read the same, so that keys and values are loaded once for eight items and by one invocation of a subgroup for all, and
// queries and outputs stay in names.
//#include attention_works
//#include rows
//#include softcap
//#include lanes

// Queries, then outputs, of each invocation's eight items. Each touches its own alone: what happens once for each quad is a loop over
// this memory. As branches in a row it takes Mesa ten times as long to compile.
var<workgroup> quads: array<vec4<f32>, 64u * HEAD_QUADS>;

fn place(tid: u32, i: u32) -> u32 {
    return (tid * 8u + i) * HEAD_QUADS;
}

// Copies the queries of an invocation's items; zeros where there is none.
fn take_queries(work: Work, kv_head: u32, tid: u32) {
    for (var n = 0u; n < 8u * HEAD_QUADS; n++) {
        let item = work.item0 + n / HEAD_QUADS * 8u + tid;
        let e = n % HEAD_QUADS * 4u;
        let at = (work.row0 + item / params.group) * params.q_stride
            + (kv_head * params.group + item % params.group) * params.head_dim + e;
        var quad = vec4<f32>();
        for (var j = 0u; j < 4u; j++) {
            if item < work.rows * params.group && e + j < params.head_dim {
                quad[j] = q[at + j];
            }
        }
        quads[place(tid, 0u) + n] = quad;
    }
}

// Quads 4i to 4i + 3, by columns, of those from `at`.
fn four(at: u32, i: u32) -> mat4x4<f32> {
    let first = at + i * 4u;
    return mat4x4<f32>(quads[first], quads[first + 1u], quads[first + 2u], quads[first + 3u]);
}

// Four quads of the rows of four keys or values: quad by quad, by columns.
struct Quads {
    a: mat4x4<f32>,
    b: mat4x4<f32>,
    c: mat4x4<f32>,
    d: mat4x4<f32>,
}

// Quads 4i to 4i + 3. Where a head ends before, its last quad again: the queries are zeros there.
fn four_rows(at: vec4<u32>, i: u32, lane: u32) -> Quads {
    // Load n of the 16 is of row n % 4.
    //#each 16/${LANES} let y${i} = quad_of_row(at, i * 4u, ${i}u * ${LANES}u + lane);
    //#each 16 let q${i} = ${BROADCAST}(y${i/LANES}, ${i%LANES}u);
    return Quads(
        mat4x4<f32>(q0, q1, q2, q3),
        mat4x4<f32>(q4, q5, q6, q7),
        mat4x4<f32>(q8, q9, q10, q11),
        mat4x4<f32>(q12, q13, q14, q15),
    );
}

fn quad_of_row(at: vec4<u32>, first: u32, n: u32) -> vec4<f32> {
    return widen_row(at[n % 4u], min(first + n / 4u, params.head_quads - 1u));
}

// Four quads of a query times those of four keys.
fn dots(q: mat4x4<f32>, keys: Quads) -> vec4<f32> {
    return q[0] * keys.a + q[1] * keys.b + q[2] * keys.c + q[3] * keys.d;
}

// Four quads of four values, by the values' weights.
fn weighed(p: vec4<f32>, values: Quads) -> mat4x4<f32> {
    return mat4x4<f32>(values.a * p, values.b * p, values.c * p, values.d * p);
}

// Four keys of consecutive positions: the first one's, and how many there are.
struct Keys {
    pos: u32,
    count: u32,
}

// Where the online softmax of an item is: its highest score, the sum of the weights by it, the weights of four keys, and the
// factor of what was before.
struct Softmax {
    top: f32,
    sum: f32,
    weights: vec4<f32>,
    decay: f32,
}

// With the products of an item's query and four keys.
fn next(before: Softmax, products: vec4<f32>, keys: Keys, item: u32, slope: f32, work: Work) -> Softmax {
    var scores = products * params.scale;
    if params.softcap > 0.0 {
        scores = capped(scores, params.softcap);
    }
    let positions = vec4<u32>(keys.pos, keys.pos + 1u, keys.pos + 2u, keys.pos + 3u);
    let query_pos = work.pos0 + item / params.group;
    scores += slope * vec4<f32>(vec4<i32>(positions) - vec4<i32>(i32(query_pos)));
    var seen = (vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(keys.count)) & (positions <= vec4<u32>(query_pos));
    if params.window > 0u {
        seen = seen & (positions + params.window > vec4<u32>(query_pos));
    }
    scores = select(vec4<f32>(NEG_MAX), scores, seen);
    let high = max(max(before.top, max(scores.x, scores.y)), max(scores.z, scores.w));
    let decay = exp(before.top - high);
    let weights = select(exp(scores - high), vec4<f32>(), scores <= vec4<f32>(NEG_MAX));
    return Softmax(high, before.sum * decay + weights.x + weights.y + weights.z + weights.w, weights, decay);
}

fn slope_of(item: u32, kv_head: u32) -> f32 {
    if params.slopes == 0u {
        return 0.0;
    }
    return bitcast<f32>(words[params.slopes + kv_head * params.group + item % params.group]);
}

@compute @workgroup_size(8)
fn wide(own: Invocation) {
    let tid = own.tid;
    let lane = lane_of(own);
    let index = linear_workgroup(own.wid, own.wcount);
    if index >= params.work_count * params.kv_heads {
        return;
    }
    let work = load_work(index / params.kv_heads);
    let kv_head = index % params.kv_heads;
    let key_quads = kv_head * (params.code_quads + SCALE_QUADS);
    // Names of the items: a to h. Compilers keep names apart from each other more surely than elements of an array.
    //#each 8 let item${i} = work.item0 + ${i}u * 8u + tid; let slope${i} = slope_of(item${i}, kv_head);
    //#each 8 var m${i} = Softmax(NEG_MAX, 0.0, vec4<f32>(), 1.0);
    take_queries(work, kv_head, tid);
    //#each 8 let at${i} = place(tid, ${i}u);
    //#each ${HEAD_QUADS}/4 let qa${i} = four(at0, ${i}u); let qb${i} = four(at1, ${i}u); let qc${i} = four(at2, ${i}u); let qd${i} = four(at3, ${i}u);
    //#each ${HEAD_QUADS}/4 let qe${i} = four(at4, ${i}u); let qf${i} = four(at5, ${i}u); let qg${i} = four(at6, ${i}u); let qh${i} = four(at7, ${i}u);
    //#each ${HEAD_QUADS}/4 var oa${i} = mat4x4<f32>(); var ob${i} = mat4x4<f32>(); var oc${i} = mat4x4<f32>(); var od${i} = mat4x4<f32>();
    //#each ${HEAD_QUADS}/4 var oe${i} = mat4x4<f32>(); var of${i} = mat4x4<f32>(); var og${i} = mat4x4<f32>(); var oh${i} = mat4x4<f32>();

    var span = work.span;
    var skip = work.skip;
    var left = work.keys;
    while left > 0u {
        let base = words[span * 3u] + skip;
        let len = min(words[span * 3u + 1u] - skip, left);
        let pos = words[span * 3u + 2u] + skip;
        for (var k = 0u; k < len; k += 4u) {
            // Keys that do not exist repeat the last one and are not seen.
            let slots = min(vec4<u32>(k, k + 1u, k + 2u, k + 3u), vec4<u32>(len - 1u)) + base;
            let at = slots * params.slot_quads + key_quads;
            let keys = Keys(pos + k, len - k);
            //#each 8 var s${i} = vec4<f32>();
            //#each ${HEAD_QUADS}/4 { let r = four_rows(at, ${i}u, lane); s0 += dots(qa${i}, r); s1 += dots(qb${i}, r); s2 += dots(qc${i}, r); s3 += dots(qd${i}, r); s4 += dots(qe${i}, r); s5 += dots(qf${i}, r); s6 += dots(qg${i}, r); s7 += dots(qh${i}, r); }
            //#each 8 m${i} = next(m${i}, s${i}, keys, item${i}, slope${i}, work);
            let values = at + params.values;
            //#each ${HEAD_QUADS}/4 { let r = four_rows(values, ${i}u, lane); oa${i} = oa${i} * m0.decay + weighed(m0.weights, r); ob${i} = ob${i} * m1.decay + weighed(m1.weights, r); oc${i} = oc${i} * m2.decay + weighed(m2.weights, r); od${i} = od${i} * m3.decay + weighed(m3.weights, r); oe${i} = oe${i} * m4.decay + weighed(m4.weights, r); of${i} = of${i} * m5.decay + weighed(m5.weights, r); og${i} = og${i} * m6.decay + weighed(m6.weights, r); oh${i} = oh${i} * m7.decay + weighed(m7.weights, r); }
        }
        left -= len;
        span += 1u;
        skip = 0u;
    }

    // An item that sees nothing of this span weighs nothing in `reduce`; its own output is meaningless by contract.
    //#each 8 let f${i} = finish(work, item${i}, kv_head, m${i});
    //#each ${HEAD_QUADS}/4 set_four(at0, ${i}u, oa${i} * f0); set_four(at1, ${i}u, ob${i} * f1); set_four(at2, ${i}u, oc${i} * f2); set_four(at3, ${i}u, od${i} * f3);
    //#each ${HEAD_QUADS}/4 set_four(at4, ${i}u, oe${i} * f4); set_four(at5, ${i}u, of${i} * f5); set_four(at6, ${i}u, og${i} * f6); set_four(at7, ${i}u, oh${i} * f7);
    leave(work, kv_head, tid);
}

// Leaves an item's log-sum-exp; returns the factor of its output.
fn finish(work: Work, item: u32, kv_head: u32, softmax: Softmax) -> f32 {
    let sum = max(softmax.sum, 1.0e-30);
    let seen = softmax.sum > 0.0;
    if item < work.rows * params.group {
        let log_sum = select(NEG_MAX, softmax.top + log(sum), seen);
        if work.part == WHOLE {
            store_lse(work.row0, item, kv_head, log_sum);
        } else {
            scratch[scratch_at(work.part, kv_head, item - work.item0) + HEAD_QUADS] = vec4<f32>(log_sum);
        }
    }
    return select(0.0, 1.0 / sum, seen);
}

fn set_four(at: u32, i: u32, values: mat4x4<f32>) {
    let first = at + i * 4u;
    quads[first] = values[0];
    quads[first + 1u] = values[1];
    quads[first + 2u] = values[2];
    quads[first + 3u] = values[3];
}

// Leaves the outputs of an invocation's items.
fn leave(work: Work, kv_head: u32, tid: u32) {
    for (var n = 0u; n < 8u * HEAD_QUADS; n++) {
        let item = work.item0 + n / HEAD_QUADS * 8u + tid;
        let quad = n % HEAD_QUADS;
        if item < work.rows * params.group {
            let value = quads[place(tid, 0u) + n];
            if work.part == WHOLE {
                store(work.row0, item, kv_head, quad, value);
            } else {
                scratch[scratch_at(work.part, kv_head, item - work.item0) + quad] = value;
            }
        }
    }
}
