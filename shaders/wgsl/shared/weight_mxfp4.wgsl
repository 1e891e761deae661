// MXFP4, four blocks of 32 elements in 17 words: their exponents (u8), then the blocks' codes (E2M1). Byte j of a block's has
// element j in its low half and element j + 16 in its high half.
//#include bytes

// Twice the magnitudes of the codes, four bits each.
const TWICE = 0xc8643210u;

fn weight_quad(i: u32) -> vec4<f32> {
    let block = i / 8u;
    let base = block / 4u * 17u;
    let exponent = (weight[base] >> (block % 4u * 8u)) & 255u;
    // Half of the scale, whose least two are below the least normal number.
    let scale = bitcast<f32>(select((exponent - 1u) << 23u, 0x200000u << (exponent % 2u), exponent < 2u));
    let codes = bits_of(weight[base + 1u + block % 4u * 4u + i % 4u], i / 4u % 2u * 4u, 15u);
    let magnitudes = vec4<f32>((vec4<u32>(TWICE) >> ((codes & vec4<u32>(7u)) * 4u)) & vec4<u32>(15u));
    return scale * select(magnitudes, -magnitudes, codes > vec4<u32>(7u));
}
