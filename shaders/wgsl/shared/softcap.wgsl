// cap * tanh(v / cap) by tanh(a) = 1 - 2 / (1 + exp(2 a)), without infinities, which not every driver keeps. NaN stays NaN, found
// by its bits: a driver may take comparisons with it as it likes, and clamp turns it into a number.
fn capped(v: vec4<f32>, cap: f32) -> vec4<f32> {
    let e = exp(clamp(v * (2.0 / cap), vec4<f32>(-80.0), vec4<f32>(80.0)));
    let nan = (bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u);
    return select(cap - 2.0 * cap / (1.0 + e), v, nan);
}
