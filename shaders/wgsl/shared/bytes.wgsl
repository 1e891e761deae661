// The bytes of a word of a packed weight, lowest first.
alias Quad = u32;

// Bits of each byte: those of `mask` from bit `shift` on.
fn bits_of(word: u32, shift: u32, mask: u32) -> vec4<u32> {
    return (vec4<u32>(word, word >> 8u, word >> 16u, word >> 24u) >> vec4<u32>(shift)) & vec4<u32>(mask);
}

// Each byte as a signed number.
fn signed(word: u32) -> vec4<f32> {
    let high = vec4<u32>(word << 24u, word << 16u, word << 8u, word);
    return vec4<f32>(bitcast<vec4<i32>>(high) >> vec4<u32>(24u));
}
