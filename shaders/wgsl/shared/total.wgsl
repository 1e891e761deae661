// Sums over a workgroup of 128 invocations.
const LANES = 128u;
var<workgroup> sums: array<f32, LANES>;

// The sum of every invocation's `own`, for all of them.
fn total(own: f32, tid: u32) -> f32 {
    workgroupBarrier();
    sums[tid] = own;
    for (var step = LANES / 2u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if tid < step {
            sums[tid] += sums[tid + step];
        }
    }
    workgroupBarrier();
    return sums[0];
}
