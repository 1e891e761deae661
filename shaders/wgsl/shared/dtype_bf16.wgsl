// Four bf16 elements, two to a word: the upper halves of f32.
alias Quad = vec2<u32>;

fn widen(q: Quad) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(q.x << 16u, q.x & 0xffff0000u, q.y << 16u, q.y & 0xffff0000u));
}

// Nearest even; NaN stays NaN.
fn bf16_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if (bits & 0x7fffffffu) > 0x7f800000u {
        return (bits >> 16u) | 0x40u;
    }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

fn narrow(v: vec4<f32>) -> Quad {
    return Quad(bf16_bits(v.x) | (bf16_bits(v.y) << 16u), bf16_bits(v.z) | (bf16_bits(v.w) << 16u));
}
