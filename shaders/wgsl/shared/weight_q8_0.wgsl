// Q8_0, two blocks of 32 elements in 17 words: both scales (f16), then the blocks' codes (i8).
//#include bytes
fn weight_quad(i: u32) -> vec4<f32> {
    let block = i / 8u;
    let base = block / 2u * 17u;
    let scale = unpack2x16float(weight[base])[block % 2u];
    return scale * signed(weight[base + 1u + i % 16u]);
}
