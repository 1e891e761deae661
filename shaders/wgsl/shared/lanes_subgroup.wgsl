// Invocations that load for each other: the LANES of a subgroup. Software adapters fill their subgroups; a missing lane would give
// undefined values.
struct Invocation {
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
    @builtin(subgroup_invocation_id) lane: u32,
}

fn lane_of(own: Invocation) -> u32 {
    return own.lane;
}
