// Q4_0, eight blocks of 32 elements in 9 quads: their scales (f16), then the blocks' codes. Byte j of a block's has element j in
// its low half and element j + 16 in its high half.
//#include bytes
//#include runs
struct Item {
    codes: vec4<u32>,
    scale: f32,
}

fn item(i: u32) -> Item {
    let base = i / 8u * 9u;
    return Item(weight[base + 1u + i % 8u], half_of(base, i % 8u));
}

fn item_dot(own: Item, x: array<vec4<f32>, ITEM>) -> f32 {
    return own.scale * nibbles_dot(own.codes, 8.0, x);
}

fn weight_quad(i: u32) -> vec4<f32> {
    let block = i / 8u % 8u;
    let base = i / 64u * 9u;
    return half_of(base, block) * codes_of(weight[base + 1u + block][i % 4u], i / 4u % 2u * 4u, 15u, 8.0);
}
