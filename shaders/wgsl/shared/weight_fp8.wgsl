// FP8, four blocks of 128 elements in 33 quads: their scales (f32), then the blocks' codes (E4M3).
//#include bytes
//#include e4m3
//#include runs
struct Item {
    first: vec4<u32>,
    second: vec4<u32>,
    scale: f32,
}

fn item(i: u32) -> Item {
    let base = i / 16u * 33u;
    let at = base + 1u + i % 16u * 2u;
    return Item(weight[at], weight[at + 1u], bitcast<f32>(weight[base][i / 4u % 4u]));
}

fn item_dot(own: Item, x: array<vec4<f32>, ITEM>) -> f32 {
    var v = x;
    var sum = vec4<f32>();
    for (var j = 0u; j < 4u; j++) {
        sum = fma(e4m3(own.first[j]), v[j], sum);
        sum = fma(e4m3(own.second[j]), v[j + 4u], sum);
    }
    return own.scale * total_of(sum);
}

fn weight_quad(i: u32) -> vec4<f32> {
    let base = i / 128u * 33u;
    return bitcast<f32>(weight[base][i / 32u % 4u]) * e4m3(weight[base + 1u + i / 4u % 32u][i % 4u]);
}
