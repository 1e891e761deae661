// Q5_K, a block of 256 elements in 44 words: four of scales, eight of fifth bits (a byte has those of eight sub-blocks), then
// codes. 32 bytes have 64 elements, the first 32 in their low halves.
//#include six_bits
fn weight_quad(i: u32) -> vec4<f32> {
    let base = i / 64u * 44u;
    let sub = i / 8u % 8u;
    let scale = six_bits(base, sub);
    let low = bits_of(weight[base + 12u + sub / 2u * 8u + i % 8u], sub % 2u * 4u, 15u);
    let fifth = bits_of(weight[base + 4u + i % 8u], sub, 1u);
    return scale.x * vec4<f32>(low | (fifth << vec4<u32>(4u))) - scale.y;
}
