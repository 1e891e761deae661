// Q4_0, two blocks of 32 elements in 9 words: both scales (f16), then the blocks' codes. Byte j of a block's has element j in
// its low half and element j + 16 in its high half.
//#include bytes
fn weight_quad(i: u32) -> vec4<f32> {
    let block = i / 8u;
    let base = block / 2u * 9u;
    let scale = unpack2x16float(weight[base])[block % 2u];
    let word = weight[base + 1u + block % 2u * 4u + i % 4u];
    return scale * (vec4<f32>(bits_of(word, i / 4u % 2u * 4u, 15u)) - 8.0);
}
