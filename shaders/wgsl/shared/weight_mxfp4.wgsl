// MXFP4, sixteen blocks of 32 elements in 17 quads: their exponents (u8), then the blocks' codes (E2M1). Byte j of a block's has
// element j in its low half and element j + 16 in its high half.
//#include bytes
//#include runs

// Twice the magnitudes of the codes, four bits each.
const TWICE = 0xc8643210u;

struct Item {
    codes: vec4<u32>,
    scale: f32,
}

// Half of the scale of the block at `block` of the group at `base`; the least two are below the least normal number.
fn scale_of(base: u32, block: u32) -> f32 {
    let exponent = (weight[base][block / 4u] >> (block % 4u * 8u)) & 255u;
    return bitcast<f32>(select((exponent - 1u) << 23u, 0x200000u << (exponent % 2u), exponent < 2u));
}

// Twice the elements of the codes from bit `shift` of each byte on.
fn twice(word: u32, shift: u32) -> vec4<f32> {
    let codes = bits_of(word, shift, 15u);
    let magnitudes = widened((vec4<u32>(TWICE) >> ((codes & vec4<u32>(7u)) * 4u)) & vec4<u32>(15u), 0.0);
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(magnitudes) | ((codes & vec4<u32>(8u)) << vec4<u32>(28u)));
}

fn item(i: u32) -> Item {
    let base = i / 16u * 17u;
    return Item(weight[base + 1u + i % 16u], scale_of(base, i % 16u));
}

fn item_dot(own: Item, x: array<vec4<f32>, ITEM>) -> f32 {
    var v = x;
    var sum = vec4<f32>();
    for (var j = 0u; j < 4u; j++) {
        sum = fma(twice(own.codes[j], 0u), v[j], sum);
        sum = fma(twice(own.codes[j], 4u), v[j + 4u], sum);
    }
    return own.scale * total_of(sum);
}

fn weight_quad(i: u32) -> vec4<f32> {
    let block = i / 8u % 16u;
    let base = i / 128u * 17u;
    return scale_of(base, block) * twice(weight[base + 1u + block][i % 4u], i / 4u % 2u * 4u);
}
