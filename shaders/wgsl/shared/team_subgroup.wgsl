// Products of few rows, for adapters with subgroups: each subgroup of a workgroup of 64 invocations is a team.
//#include products

struct Invocation {
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
}

// Lanes are counted rather than taken from built-ins: a subgroup need not be full.
fn team_of(own: Invocation) -> Team {
    return Team(own.subgroup, own.subgroups, subgroupExclusiveAdd(1u), subgroupAdd(1u));
}

// Each output's sum over a team, in its first lane.
fn add_up(outputs: array<f32, OUTPUTS>, own: Invocation) -> array<f32, OUTPUTS> {
    var all = outputs;
    for (var i = 0u; i < OUTPUTS; i++) {
        all[i] = subgroupAdd(all[i]);
    }
    return all;
}
