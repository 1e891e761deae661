// Linear index of a workgroup: grids are folded into x and y, as one dimension holds at most 65535 workgroups.
// Indices beyond the work are possible and must be ignored.
fn linear_workgroup(id: vec3<u32>, count: vec3<u32>) -> u32 {
    return id.y * count.x + id.x;
}
