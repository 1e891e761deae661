// Q4_K and Q5_K: a block begins with its scale and its least value (f16), then 6 bits of each for eight sub-blocks. 32 bytes of
// codes have 64 elements, the first 32 in their low halves; an item is half of these bytes, with elements of two sub-blocks.
//#include bytes

// Scale and least value of sub-block `sub` of a block with such a first quad.
fn six_bits(head: vec4<u32>, sub: u32) -> vec2<f32> {
    let shift = sub % 4u * 8u;
    let first = (head.yz >> vec2<u32>(shift)) & vec2<u32>(255u);
    let low = (head.w >> shift) & 255u;
    let late = vec2<u32>(low & 15u, low >> 4u) | ((first >> vec2<u32>(6u)) << vec2<u32>(4u));
    return unpack2x16float(head.x) * vec2<f32>(select(first & vec2<u32>(63u), late, sub > 3u));
}

// Item i % 8 of its block: half i % 2 of the bytes of sub-blocks i % 8 / 2 * 2 and the next.
fn quad_of(i: u32, j: u32) -> u32 {
    return i / 2u * 16u + i % 2u * 4u + j / 4u * 8u + j % 4u;
}
