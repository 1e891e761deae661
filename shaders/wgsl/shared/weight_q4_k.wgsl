// Q4_K, a block of 256 elements in 36 words: four of scales, then codes. 32 bytes have 64 elements, the first 32 in their low
// halves.
//#include six_bits
fn weight_quad(i: u32) -> vec4<f32> {
    let base = i / 64u * 36u;
    let sub = i / 8u % 8u;
    let scale = six_bits(base, sub);
    let codes = bits_of(weight[base + 4u + sub / 2u * 8u + i % 8u], sub % 2u * 4u, 15u);
    return scale.x * vec4<f32>(codes) - scale.y;
}
