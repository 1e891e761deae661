// Scales of Q4_K and Q5_K: a block begins with its scale and its least value (f16), then 6 bits of each for eight sub-blocks.
//#include bytes

// Scale and least value of sub-block `sub` of the block at word `base`.
fn six_bits(base: u32, sub: u32) -> vec2<f32> {
    let shift = sub % 4u * 8u;
    let first = (vec2<u32>(weight[base + 1u], weight[base + 2u]) >> vec2<u32>(shift)) & vec2<u32>(255u);
    var codes = first & vec2<u32>(63u);
    if sub > 3u {
        let low = (weight[base + 3u] >> shift) & 255u;
        codes = vec2<u32>(low & 15u, low >> 4u) | ((first >> vec2<u32>(6u)) << vec2<u32>(4u));
    }
    return unpack2x16float(weight[base]) * vec2<f32>(codes);
}
