// Products of few rows: a workgroup is two teams of 32 lanes; each team makes SPAN outputs for each of ROWS rows of x.
const ROWS = ${ROWS}u;
const LANES = 32u;
const SPAN = 2u;
const BLOCK = 4u;
var<workgroup> sums: array<f32, 64u * SPAN * ROWS>;

// Adds up each team's sums: output i ends at the team's first lane, behind i * 64.
fn add_up(lane: u32, tid: u32) {
    for (var step = LANES / 2u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if lane < step {
            for (var i = 0u; i < SPAN * ROWS; i++) {
                sums[i * 64u + tid] += sums[i * 64u + tid + step];
            }
        }
    }
    workgroupBarrier();
}
