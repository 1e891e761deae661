// Q8_0, eight blocks of 32 elements in 17 quads: their scales (f16), then the blocks' codes (i8).
//#include bytes
//#include runs
struct Item {
    first: vec4<u32>,
    second: vec4<u32>,
    scale: f32,
}

fn item(i: u32) -> Item {
    let base = i / 8u * 17u;
    let at = base + 1u + i % 8u * 2u;
    return Item(weight[at], weight[at + 1u], half_of(base, i % 8u));
}

fn item_dot(own: Item, x: array<vec4<f32>, ITEM>) -> f32 {
    var v = x;
    var sum = vec4<f32>();
    for (var j = 0u; j < 4u; j++) {
        sum = fma(signed(own.first[j]), v[j], sum);
        sum = fma(signed(own.second[j]), v[j + 4u], sum);
    }
    return own.scale * total_of(sum);
}

fn weight_quad(i: u32) -> vec4<f32> {
    let base = i / 64u * 17u;
    return half_of(base, i / 8u % 8u) * signed(weight[base + 1u + i / 4u % 16u][i % 4u]);
}
