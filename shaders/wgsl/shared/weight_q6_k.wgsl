// Q6_K, a block of 256 elements in 53 words: 32 of codes, 16 of upper bits, 4 of scales (i8), and the block's scale (f16). 64
// bytes of codes have 128 elements, the first 64 in their low halves; 32 bytes of upper bits have two bits of each of them.
//#include bytes
fn weight_quad(i: u32) -> vec4<f32> {
    let base = i / 64u * 53u;
    let half = i / 32u % 2u;
    let low = bits_of(weight[base + half * 16u + i % 16u], i / 16u % 2u * 4u, 15u);
    let high = bits_of(weight[base + 32u + half * 8u + i % 8u], i / 8u % 4u * 2u, 3u);
    let scales = signed(weight[base + 48u + i / 16u % 4u]);
    let scale = unpack2x16float(weight[base + 52u]).x * scales[i / 4u % 4u];
    return scale * (vec4<f32>(low | (high << vec4<u32>(4u))) - 32.0);
}
