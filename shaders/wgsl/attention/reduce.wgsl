// Merges the partials of tiles of micro attention whose keys were split. One workgroup per tile and KV head.
//#include attention_works

const THREADS = 128u;
// Invocations of an item.
const LANES = THREADS / ITEMS;

@compute @workgroup_size(128)
fn reduce(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let index = linear_workgroup(wid, wcount);
    if index >= params.work_count * params.kv_heads {
        return;
    }
    let kv_head = index % params.kv_heads;
    let tile = params.works + (index / params.kv_heads) * 8u;
    let row0 = words[tile];
    let item = words[tile + 2u] + tid / LANES;
    let part0 = words[tile + 3u];
    let part_end = part0 + words[tile + 4u];
    let lane = tid % LANES;
    if item >= words[tile + 1u] * params.group {
        return;
    }
    var top = NEG_MAX;
    for (var part = part0; part < part_end; part++) {
        top = max(top, scratch[scratch_at(part, kv_head, tid / LANES) + HEAD_QUADS].x);
    }
    var sum = 0.0;
    for (var part = part0; part < part_end; part++) {
        sum += exp(scratch[scratch_at(part, kv_head, tid / LANES) + HEAD_QUADS].x - top);
    }
    for (var quad = lane; quad < params.head_quads; quad += LANES) {
        var value = vec4<f32>();
        for (var part = part0; part < part_end; part++) {
            let at = scratch_at(part, kv_head, tid / LANES);
            value += exp(scratch[at + HEAD_QUADS].x - top) * scratch[at + quad];
        }
        store(row0, item, kv_head, quad, value / sum);
    }
    if lane == 0u {
        store_lse(row0, item, kv_head, top + log(sum));
    }
}
