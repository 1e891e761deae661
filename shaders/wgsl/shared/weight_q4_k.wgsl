// Q4_K, a block of 256 elements in 9 quads: one of scales, then codes.
//#include six_bits
struct Item {
    codes: vec4<u32>,
    low: vec2<f32>,
    high: vec2<f32>,
}

fn item(i: u32) -> Item {
    let base = i / 8u * 9u;
    let head = weight[base];
    let sub = i % 8u / 2u * 2u;
    return Item(weight[base + 1u + i % 8u], six_bits(head, sub), six_bits(head, sub + 1u));
}

fn item_dot(own: Item, x: array<vec4<f32>, ITEM>) -> f32 {
    var v = x;
    var low = vec4<f32>();
    var high = vec4<f32>();
    for (var j = 0u; j < 4u; j++) {
        low = fma(own.low.x * codes_of(own.codes[j], 0u, 15u, 0.0) - own.low.y, v[j], low);
        high = fma(own.high.x * codes_of(own.codes[j], 4u, 15u, 0.0) - own.high.y, v[j + 4u], high);
    }
    return total_of(low + high);
}

fn weight_quad(i: u32) -> vec4<f32> {
    let base = i / 64u * 9u;
    let sub = i / 8u % 8u;
    let scale = six_bits(weight[base], sub);
    let word = weight[base + 1u + sub / 2u * 2u + i / 4u % 2u][i % 4u];
    return scale.x * codes_of(word, sub % 2u * 4u, 15u, 0.0) - scale.y;
}
