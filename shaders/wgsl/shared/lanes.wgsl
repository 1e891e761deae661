// Invocations that load for each other, on adapters whose subgroups are not all of eight: each loads for itself.
struct Invocation {
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
}

fn lane_of(own: Invocation) -> u32 {
    return 0u;
}

fn own_value(value: vec4<f32>, lane: u32) -> vec4<f32> {
    return value;
}
