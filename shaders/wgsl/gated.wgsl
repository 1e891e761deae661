// out[r][i] = f(x[r][i]), or f(x[r][i]) * g(x[r][n + i]) for gated activations (gate, then up), for i < n. One entry point
// an activation; one invocation makes one element.
//#include grid

struct Params {
    rows: u32,
    n: u32,
    // Floats from one row to the next.
    x_stride: u32,
    out_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;

// Of invocation `at`: its first element in x and its element in out. Invocations beyond the rows have none.
struct Place {
    inside: bool,
    x: u32,
    out: u32,
}

fn place(wid: vec3<u32>, wcount: vec3<u32>, tid: u32) -> Place {
    let at = linear_workgroup(wid, wcount) * 64u + tid;
    let row = at / params.n;
    let i = at % params.n;
    return Place(row < params.rows, row * params.x_stride + i, row * params.out_stride + i);
}

// v / (1 + exp(-z)). exp beyond 80 would overflow, and infinities do not survive every driver; the quotient is nothing in
// f32 long before.
fn times_sigmoid(v: f32, z: f32) -> f32 {
    return v / (1.0 + exp(clamp(-z, -80.0, 80.0)));
}

// By the logistic function rather than tanh, which overflows on some drivers. Beyond 16 the cubic needs no more than its sign.
fn gelu_by_tanh(v: f32) -> f32 {
    let a = clamp(v, -16.0, 16.0);
    // Twice the square root of 2 / pi, alone and times 0.044715.
    return times_sigmoid(v, a * (a * a * 0.071354814 + 1.5957691));
}

@compute @workgroup_size(64)
fn silu_mul(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let at = place(wid, wcount, tid);
    if at.inside {
        out[at.out] = times_sigmoid(x[at.x], x[at.x]) * x[at.x + params.n];
    }
}

@compute @workgroup_size(64)
fn gelu_tanh(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let at = place(wid, wcount, tid);
    if at.inside {
        out[at.out] = gelu_by_tanh(x[at.x]);
    }
}

@compute @workgroup_size(64)
fn gelu_tanh_mul(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let at = place(wid, wcount, tid);
    if at.inside {
        out[at.out] = gelu_by_tanh(x[at.x]) * x[at.x + params.n];
    }
}

// `clamped`, which min and clamp may have made of NaN, or NaN. By its bits: a driver may take comparisons with NaN as it likes.
fn or_nan(clamped: f32, v: f32) -> f32 {
    return select(clamped, v, (bitcast<u32>(v) & 0x7fffffffu) > 0x7f800000u);
}

@compute @workgroup_size(64)
fn clamped_swiglu(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) wcount: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let at = place(wid, wcount, tid);
    if at.inside {
        // SWIGLU_LIMIT and SWIGLU_ALPHA.
        let gate = or_nan(min(x[at.x], 7.0), x[at.x]);
        let up = or_nan(clamp(x[at.x + params.n], -7.0, 7.0), x[at.x + params.n]);
        out[at.out] = (up + 1.0) * times_sigmoid(gate, 1.702 * gate);
    }
}
