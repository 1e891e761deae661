// Q6_K, eight blocks of 256 elements in 105 quads: their scales (f16), then of each block eight quads of codes, four of upper bits
// and one of scales (i8) for 16 elements each. 64 bytes of codes have 128 elements, the first 64 in their low halves; 32 bytes of
// upper bits have two bits of each of them.
//#include bytes
struct Item {
    codes: vec4<u32>,
    // Those of the low halves from bit 0 of each byte on, of the high ones from bit 4 on.
    upper: vec4<u32>,
    low: f32,
    high: f32,
}

// Item i % 8 of its block: quad i % 4 of the codes of half i % 8 / 4.
fn quad_of(i: u32, j: u32) -> u32 {
    return i / 4u * 32u + i % 4u * 4u + j / 4u * 16u + j % 4u;
}

// The block's first quad, and its scale's number in the group's first quad.
fn block_of(block: u32) -> vec2<u32> {
    return vec2<u32>(block / 8u * 105u + 1u + block % 8u * 13u, block % 8u);
}

fn scale_of(at: vec2<u32>, part: u32) -> f32 {
    let word = weight[at.x + 12u][part / 4u];
    let code = bitcast<i32>(word << (24u - part % 4u * 8u)) >> 24u;
    return half_of(at.x - 1u - at.y * 13u, at.y) * f32(code);
}

fn six_bits(word: u32, shift: u32, upper: u32, upper_shift: u32) -> vec4<f32> {
    return widened(bits_of(word, shift, 15u) | (bits_of(upper, upper_shift, 3u) << vec4<u32>(4u)), 32.0);
}

fn item(i: u32) -> Item {
    let at = block_of(i / 8u);
    let half = i % 8u / 4u;
    let upper = weight[at.x + 8u + half * 2u + i % 2u] >> vec4<u32>(i % 4u / 2u * 2u);
    let part = half * 8u + i % 4u;
    return Item(weight[at.x + i % 8u], upper, scale_of(at, part), scale_of(at, part + 4u));
}

fn item_dot(own: Item, x: array<vec4<f32>, ITEM>) -> f32 {
    var v = x;
    var low = vec4<f32>();
    var high = vec4<f32>();
    for (var j = 0u; j < 4u; j++) {
        low = fma(six_bits(own.codes[j], 0u, own.upper[j], 0u), v[j], low);
        high = fma(six_bits(own.codes[j], 4u, own.upper[j], 4u), v[j + 4u], high);
    }
    return own.low * total_of(low) + own.high * total_of(high);
}

fn weight_quad(i: u32) -> vec4<f32> {
    let at = block_of(i / 64u);
    let half = i / 32u % 2u;
    let word = weight[at.x + half * 4u + i / 4u % 4u][i % 4u];
    let upper = weight[at.x + 8u + half * 2u + i / 4u % 2u][i % 4u];
    return scale_of(at, i / 4u % 16u) * six_bits(word, i / 16u % 2u * 4u, upper, i / 8u % 4u * 2u);
}
