// Four E4M3 codes: a sign, 4 bits of exponent with bias 7, 3 bits of mantissa. NaN is taken for a number.
fn e4m3(word: u32) -> vec4<f32> {
    let codes = (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(0xffu);
    let magnitudes = codes & vec4<u32>(0x7fu);
    let normal = bitcast<vec4<f32>>((magnitudes << vec4<u32>(20u)) + vec4<u32>(0x3c000000u));
    // Subnormal codes are multiples of 2^-9.
    let values = select(normal, vec4<f32>(magnitudes) * 0.001953125, magnitudes < vec4<u32>(8u));
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(values) | ((codes & vec4<u32>(0x80u)) << vec4<u32>(24u)));
}
