// Micro attention over runs of KV, with an online softmax: the flash-attention recurrence over tiles of 16 queries
// and 32 keys. Queries of one sequence that share a KV head are one list of items (row by row, the group's heads
// within a row). A workgroup serves one work and one KV head: a tile of 16 items against a span of keys. A tile
// whose keys are split over several works leaves normalised partials in `scratch`, which `reduce` then merges.
// The host plans the works (src/plan.rs), so that nothing is empty and spans stay in one shard of the store.
//#include attention_works
//#include rows
//#include softcap

// Quads of the queries that are staged at once: all, or CHUNK of them with each chunk of the keys.
const QUERY_QUADS = ${QUERY_QUADS}u;
const KEYS = 32u;
// Quads of a head that are staged at once.
const CHUNK = 16u;
const THREADS = 64u;

var<workgroup> q_tile: array<vec4<f32>, ITEMS * QUERY_QUADS>;
// One column of padding keeps the loads free of bank conflicts.
var<workgroup> kv_tile: array<vec4<f32>, KEYS * (CHUNK + 1u)>;
var<workgroup> scores: array<f32, ITEMS * (KEYS + 1u)>;
// One value of each of the four lanes of an item, and one of the item.
var<workgroup> lanes: array<f32, ITEMS * 5u>;
var<workgroup> factors: array<f32, ITEMS>;

// Stages the queries' quads from `first` on.
fn load_queries(work: Work, kv_head: u32, first: u32, tid: u32) {
    let items = work.rows * params.group;
    for (var i = tid; i < ITEMS * QUERY_QUADS; i += THREADS) {
        let item = work.item0 + i / QUERY_QUADS;
        let e = (first + i % QUERY_QUADS) * 4u;
        var v = vec4<f32>();
        if item < items {
            let head = kv_head * params.group + item % params.group;
            let at = (work.row0 + item / params.group) * params.q_stride + head * params.head_dim + e;
            for (var j = 0u; j < 4u; j++) {
                if e + j < params.head_dim {
                    v[j] = q[at + j];
                }
            }
        }
        q_tile[i] = v;
    }
}

// Stages CHUNK quads of up to KEYS keys or values, which start `first` quads behind their slots.
fn load_keys(slot0: u32, count: u32, first: u32, chunk: u32, tid: u32) {
    for (var i = tid; i < KEYS * CHUNK; i += THREADS) {
        let key = i / CHUNK;
        let quad = chunk * CHUNK + i % CHUNK;
        var v = vec4<f32>();
        if key < count && quad < params.head_quads {
            v = widen_row((slot0 + key) * params.slot_quads + first, quad);
        }
        kv_tile[key * (CHUNK + 1u) + i % CHUNK] = v;
    }
}

fn seen(key_pos: u32, item: u32, work: Work) -> bool {
    let query_pos = work.pos0 + item / params.group;
    return key_pos <= query_pos && (params.window == 0u || key_pos + params.window > query_pos);
}

// Of the key at `key_pos` and of the one 16 positions further.
fn biases(key_pos: u32, item: u32, kv_head: u32, work: Work) -> vec2<f32> {
    if params.slopes == 0u {
        return vec2<f32>();
    }
    let slope = bitcast<f32>(words[params.slopes + kv_head * params.group + item % params.group]);
    let distance = f32(i32(key_pos) - i32(work.pos0 + item / params.group));
    return slope * vec2<f32>(distance, distance + 16.0);
}

@compute @workgroup_size(64)
fn partial(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let index = linear_workgroup(wid, wcount);
    if index >= params.work_count * params.kv_heads {
        return;
    }
    let work = load_work(index / params.kv_heads);
    let kv_head = index % params.kv_heads;
    let items = work.rows * params.group - work.item0;
    let chunks = (params.head_quads + CHUNK - 1u) / CHUNK;
    let key_quads = kv_head * (params.code_quads + SCALE_QUADS);
    if QUERY_QUADS == HEAD_QUADS {
        load_queries(work, kv_head, 0u, tid);
    }

    // An invocation makes the scores of four items and the keys `key` and `key + 16`; then it is one of four lanes of
    // one item for the softmax; then it weighs two quads of the values of each chunk for two items.
    let key = tid % 16u;
    let item4 = (tid / 16u) * 4u;
    let own = tid / 4u;
    let lane = tid % 4u;
    let pair = (tid / 8u) * 2u;
    let quad = tid % 8u;
    var top = NEG_MAX;
    var sum = 0.0;
    var acc: array<vec4<f32>, HEAD_QUADS / 4u>;

    var span = work.span;
    var skip = work.skip;
    var left = work.keys;
    while left > 0u {
        let base = words[span * 3u] + skip;
        let len = min(words[span * 3u + 1u] - skip, left);
        let pos = words[span * 3u + 2u] + skip;
        for (var k0 = 0u; k0 < len; k0 += KEYS) {
            let count = min(KEYS, len - k0);
            // Scores of this tile.
            var dots0 = vec4<f32>();
            var dots1 = vec4<f32>();
            for (var c = 0u; c < chunks; c++) {
                workgroupBarrier();
                if QUERY_QUADS < HEAD_QUADS {
                    load_queries(work, kv_head, c * CHUNK, tid);
                }
                load_keys(base + k0, count, key_quads, c, tid);
                workgroupBarrier();
                if item4 < items {
                    for (var d = 0u; d < CHUNK; d++) {
                        let k_a = kv_tile[key * (CHUNK + 1u) + d];
                        let k_b = kv_tile[(key + 16u) * (CHUNK + 1u) + d];
                        let at = item4 * QUERY_QUADS + (c * CHUNK) % QUERY_QUADS + d;
                        let q_a = q_tile[at];
                        let q_b = q_tile[at + QUERY_QUADS];
                        let q_c = q_tile[at + 2u * QUERY_QUADS];
                        let q_d = q_tile[at + 3u * QUERY_QUADS];
                        dots0 += vec4<f32>(dot(q_a, k_a), dot(q_b, k_a), dot(q_c, k_a), dot(q_d, k_a));
                        dots1 += vec4<f32>(dot(q_a, k_b), dot(q_b, k_b), dot(q_c, k_b), dot(q_d, k_b));
                    }
                }
            }
            dots0 *= params.scale;
            dots1 *= params.scale;
            if params.softcap > 0.0 {
                dots0 = capped(dots0, params.softcap);
                dots1 = capped(dots1, params.softcap);
            }
            for (var i = 0u; i < 4u; i++) {
                let item = work.item0 + item4 + i;
                let at = (item4 + i) * (KEYS + 1u) + key;
                let key_pos = pos + k0 + key;
                let bias = biases(key_pos, item, kv_head, work);
                let seen0 = key < count && seen(key_pos, item, work);
                let seen1 = key + 16u < count && seen(key_pos + 16u, item, work);
                scores[at] = select(NEG_MAX, dots0[i] + bias.x, seen0);
                scores[at + 16u] = select(NEG_MAX, dots1[i] + bias.y, seen1);
            }
            workgroupBarrier();
            // New maximum of the item over its four lanes.
            let scores0 = own * (KEYS + 1u) + lane;
            var high = top;
            for (var i = 0u; i < KEYS; i += 4u) {
                high = max(high, scores[scores0 + i]);
            }
            lanes[own * 5u + lane] = high;
            workgroupBarrier();
            for (var i = 0u; i < 4u; i++) {
                high = max(high, lanes[own * 5u + i]);
            }
            let decay = exp(top - high);
            factors[own] = decay;
            top = high;
            sum *= decay;
            for (var i = 0u; i < KEYS; i += 4u) {
                let s = scores[scores0 + i];
                let p = select(exp(s - high), 0.0, s <= NEG_MAX);
                scores[scores0 + i] = p;
                sum += p;
            }
            // Weighted values of this tile.
            for (var c = 0u; c < HEAD_QUADS / CHUNK; c++) {
                if c < chunks {
                    workgroupBarrier();
                    load_keys(base + k0, count, key_quads + params.values, c, tid);
                    workgroupBarrier();
                    if pair < items {
                        let decay0 = factors[pair];
                        let decay1 = factors[pair + 1u];
                        var a0 = acc[c * 4u] * decay0;
                        var b0 = acc[c * 4u + 1u] * decay0;
                        var a1 = acc[c * 4u + 2u] * decay1;
                        var b1 = acc[c * 4u + 3u] * decay1;
                        for (var j = 0u; j < count; j++) {
                            let p0 = scores[pair * (KEYS + 1u) + j];
                            let p1 = scores[(pair + 1u) * (KEYS + 1u) + j];
                            let v_a = kv_tile[j * (CHUNK + 1u) + quad];
                            let v_b = kv_tile[j * (CHUNK + 1u) + quad + 8u];
                            a0 += p0 * v_a;
                            b0 += p0 * v_b;
                            a1 += p1 * v_a;
                            b1 += p1 * v_b;
                        }
                        acc[c * 4u] = a0;
                        acc[c * 4u + 1u] = b0;
                        acc[c * 4u + 2u] = a1;
                        acc[c * 4u + 3u] = b1;
                    }
                }
            }
        }
        left -= len;
        span += 1u;
        skip = 0u;
    }

    workgroupBarrier();
    lanes[own * 5u + lane] = sum;
    workgroupBarrier();
    sum = 0.0;
    for (var i = 0u; i < 4u; i++) {
        sum += lanes[own * 5u + i];
    }
    // An item that sees nothing of this span weighs nothing in `reduce`; its own output is meaningless by contract.
    if lane == 0u {
        let log_sum = select(NEG_MAX, top + log(max(sum, 1.0e-30)), sum > 0.0);
        factors[own] = select(0.0, 1.0 / max(sum, 1.0e-30), sum > 0.0);
        if own < items {
            if work.part == WHOLE {
                store_lse(work.row0, work.item0 + own, kv_head, log_sum);
            } else {
                scratch[scratch_at(work.part, kv_head, own) + HEAD_QUADS] = vec4<f32>(log_sum);
            }
        }
    }
    workgroupBarrier();
    for (var i = 0u; i < HEAD_QUADS / 4u; i++) {
        // In the order of `acc`: for each chunk two quads of the first item, then of the second.
        let item = pair + (i / 2u) % 2u;
        let at = (i / 4u) * CHUNK + (i % 2u) * 8u + quad;
        if item < items {
            let value = acc[i] * factors[item];
            if work.part == WHOLE {
                store(work.row0, work.item0 + item, kv_head, at, value);
            } else {
                scratch[scratch_at(work.part, kv_head, item) + at] = value;
            }
        }
    }
}
