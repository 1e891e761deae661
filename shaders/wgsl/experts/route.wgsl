// The choices of a mixture of experts. `route` chooses the experts of a row by their keys, those of lower index among equals,
// and weighs them by their scores; one workgroup per row. Places are those of the choices themselves, until `sort` replaces
// them by the stable order by expert; one workgroup per expert, and one behind the last.
//#include dtype
//#include grid
//#include total
//#include choices

struct Params {
    rows: u32,
    // Of all rows.
    choices: u32,
    // Experts, and floats from one row of their logits to the next.
    count: u32,
    stride: u32,
    top_k: u32,
    // Groups of consecutive experts, and those that a row chooses from.
    groups: u32,
    top_groups: u32,
    // 1: scores are sigmoids of logits; 0: their softmax.
    sigmoid: u32,
    // 1: weights are divided by their sum.
    normalised: u32,
    // 1: keys are scores plus the bias.
    biased: u32,
    // Factor on weights.
    scale: f32,
    // 1: groups are compared by the sums of their two best keys; 0: by their best keys, or there are none.
    two_best: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<Quad>;
@group(0) @binding(3) var<storage, read_write> words: array<u32>;

// EXPERTS_MAX and EXPERTS_PER_TOKEN_MAX.
const COUNT_MAX = 1024u;
const TOP_MAX = 32u;
// The key of experts that are chosen already, or not to be.
const LEAST = -3.4028234e38;
const NONE = 0xffffffffu;

var<workgroup> scores: array<f32, COUNT_MAX>;
var<workgroup> keys: array<f32, COUNT_MAX>;
// What each group is compared by.
var<workgroup> bests: array<f32, COUNT_MAX>;
var<workgroup> chosen: array<u32, TOP_MAX>;
var<workgroup> candidates: array<u32, LANES>;

// The index of the largest key, the lowest among equals; NONE if all are LEAST.
fn largest_key(tid: u32) -> u32 {
    var key = LEAST;
    var at = NONE;
    for (var i = tid; i < params.count; i += LANES) {
        if keys[i] > key {
            key = keys[i];
            at = i;
        }
    }
    workgroupBarrier();
    sums[tid] = key;
    candidates[tid] = at;
    for (var step = LANES / 2u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if tid < step {
            let other = sums[tid + step];
            let other_at = candidates[tid + step];
            if other > sums[tid] || (other == sums[tid] && other_at < candidates[tid]) {
                sums[tid] = other;
                candidates[tid] = other_at;
            }
        }
    }
    workgroupBarrier();
    return candidates[0];
}

// Makes scores of the logits in `keys`.
fn score(tid: u32) {
    if params.sigmoid == 1u {
        for (var i = tid; i < params.count; i += LANES) {
            // exp beyond 80 would overflow, and infinities do not survive every driver.
            scores[i] = 1.0 / (1.0 + exp(clamp(-keys[i], -80.0, 80.0)));
        }
        return;
    }
    let most = keys[min(largest_key(tid), params.count - 1u)];
    var sum = 0.0;
    for (var i = tid; i < params.count; i += LANES) {
        scores[i] = exp(max(keys[i] - most, -80.0));
        sum += scores[i];
    }
    let all = total(sum, tid);
    for (var i = tid; i < params.count; i += LANES) {
        scores[i] /= all;
    }
}

// Sets the keys of all but the best groups to LEAST.
fn drop_groups(tid: u32) {
    let size = params.count / params.groups;
    workgroupBarrier();
    for (var group = tid; group < params.groups; group += LANES) {
        var first = LEAST;
        var second = LEAST;
        for (var i = group * size; i < (group + 1u) * size; i++) {
            let key = keys[i];
            second = max(second, min(key, first));
            first = max(first, key);
        }
        bests[group] = first;
        if size > 1u && params.two_best == 1u {
            bests[group] = first + second;
        }
    }
    workgroupBarrier();
    for (var group = tid; group < params.groups; group += LANES) {
        var better = 0u;
        for (var other = 0u; other < params.groups; other++) {
            if bests[other] > bests[group] || (bests[other] == bests[group] && other < group) {
                better++;
            }
        }
        if better >= params.top_groups {
            for (var i = group * size; i < (group + 1u) * size; i++) {
                keys[i] = LEAST;
            }
        }
    }
}

@compute @workgroup_size(128)
fn route(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let row = linear_workgroup(wid, wcount);
    if row >= params.rows {
        return;
    }
    for (var i = tid; i < params.count; i += LANES) {
        keys[i] = logits[row * params.stride + i];
    }
    score(tid);
    // Unequal logits can have equal scores: where nothing is added to scores, logits decide.
    if params.biased == 1u || params.two_best == 1u {
        for (var i = tid; i < params.count; i += LANES) {
            keys[i] = scores[i];
            if params.biased == 1u {
                keys[i] += widen(bias[i / 4u])[i % 4u];
            }
        }
    }
    if params.top_groups < params.groups {
        drop_groups(tid);
    }
    for (var rank = 0u; rank < params.top_k; rank++) {
        workgroupBarrier();
        // Logits that are no numbers leave nothing to choose: then it is the first expert, as it must be one.
        let best = largest_key(tid);
        let expert = select(best, 0u, best == NONE);
        if tid == 0u {
            chosen[rank] = expert;
            keys[expert] = LEAST;
        }
    }
    workgroupBarrier();
    if tid >= params.top_k {
        return;
    }
    var sum = 1.0;
    if params.normalised == 1u {
        sum = 0.0;
        for (var rank = 0u; rank < params.top_k; rank++) {
            sum += scores[chosen[rank]];
        }
    }
    let factor = params.scale / max(sum, 1.1754944e-38);
    let choice = row * params.top_k + tid;
    words[expert_of(choice)] = chosen[tid];
    words[weight_of(choice)] = bitcast<u32>(scores[chosen[tid]] * factor);
    words[place_of(choice)] = choice;
    words[expert_at(choice)] = chosen[tid];
}

// Of an invocation and those before it: choices of lower experts, and of this one.
var<workgroup> counts: array<vec2<u32>, LANES>;

@compute @workgroup_size(128)
fn sort(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let expert = linear_workgroup(wid, wcount);
    if expert > params.count {
        return;
    }
    // An invocation takes consecutive choices, so that the order is stable.
    let each = (params.choices + LANES - 1u) / LANES;
    let end = min((tid + 1u) * each, params.choices);
    var own = vec2<u32>();
    for (var choice = tid * each; choice < end; choice++) {
        let other = words[expert_of(choice)];
        own += vec2<u32>(u32(other < expert), u32(other == expert));
    }
    counts[tid] = own;
    for (var step = 1u; step < LANES; step *= 2u) {
        workgroupBarrier();
        var before = vec2<u32>();
        if tid >= step {
            before = counts[tid - step];
        }
        workgroupBarrier();
        counts[tid] += before;
    }
    workgroupBarrier();
    let start = counts[LANES - 1u].x;
    if tid == 0u {
        words[start_of(expert)] = start;
    }
    var place = start + counts[tid].y - own.y;
    for (var choice = tid * each; choice < end; choice++) {
        if words[expert_of(choice)] == expert {
            words[place_of(choice)] = place;
            words[expert_at(place)] = expert;
            place++;
        }
    }
}
