// Q5_K, a block of 256 elements in 11 quads: one of scales, two of fifth bits (a byte has those of eight sub-blocks), then codes.
//#include six_bits
struct Item {
    codes: vec4<u32>,
    // Of the low halves in bit 0 of each byte, of the high ones in bit 1.
    fifth: vec4<u32>,
    low: vec2<f32>,
    high: vec2<f32>,
}

// The codes of one half of each byte, with their fifth bits.
fn five_bits(word: u32, shift: u32, fifth: u32, sub: u32) -> vec4<f32> {
    return widened(bits_of(word, shift, 15u) | (bits_of(fifth, sub, 1u) << vec4<u32>(4u)), 0.0);
}

fn item(i: u32) -> Item {
    let base = i / 8u * 11u;
    let head = weight[base];
    let sub = i % 8u / 2u * 2u;
    let fifth = weight[base + 1u + i % 2u] >> vec4<u32>(sub);
    return Item(weight[base + 3u + i % 8u], fifth, six_bits(head, sub), six_bits(head, sub + 1u));
}

fn item_dot(own: Item, x: array<vec4<f32>, ITEM>) -> f32 {
    var v = x;
    var low = vec4<f32>();
    var high = vec4<f32>();
    for (var j = 0u; j < 4u; j++) {
        low = fma(own.low.x * five_bits(own.codes[j], 0u, own.fifth[j], 0u) - own.low.y, v[j], low);
        high = fma(own.high.x * five_bits(own.codes[j], 4u, own.fifth[j], 1u) - own.high.y, v[j + 4u], high);
    }
    return total_of(low + high);
}

fn weight_quad(i: u32) -> vec4<f32> {
    let base = i / 64u * 11u;
    let sub = i / 8u % 8u;
    let scale = six_bits(weight[base], sub);
    let within = i / 4u % 2u;
    let word = weight[base + 3u + sub / 2u * 2u + within][i % 4u];
    return scale.x * five_bits(word, sub % 2u * 4u, weight[base + 1u + within][i % 4u], sub) - scale.y;
}
