// Products of few rows, for adapters without subgroups: a workgroup is two teams of 32 lanes.
//#include products
const LANES = 32u;
var<workgroup> sums: array<f32, 64u * OUTPUTS>;

struct Invocation {
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
}

fn team_of(own: Invocation) -> Team {
    return Team(own.tid / LANES, 64u / LANES, own.tid % LANES, LANES);
}

// Each output's sum over a team, in its first lane.
fn add_up(outputs: array<f32, OUTPUTS>, own: Invocation) -> array<f32, OUTPUTS> {
    var all = outputs;
    for (var i = 0u; i < OUTPUTS; i++) {
        sums[i * 64u + own.tid] = all[i];
    }
    for (var step = LANES / 2u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if own.tid % LANES < step {
            for (var i = 0u; i < OUTPUTS; i++) {
                sums[i * 64u + own.tid] += sums[i * 64u + own.tid + step];
            }
        }
    }
    workgroupBarrier();
    for (var i = 0u; i < OUTPUTS; i++) {
        all[i] = sums[i * 64u + own.tid];
    }
    return all;
}
