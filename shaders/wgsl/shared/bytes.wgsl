// Packed weights: codes and their widening to f32. The including file binds `weight: array<Quad>`.
alias Quad = vec4<u32>;

// Quads of an item (shared/weight.wgsl), of every packed format.
const ITEM = 8u;

// 2^23, as f32 and as its bits: codes are or-ed into it and widened by a subtraction, which is exact, and of which GPUs do more at
// once than of conversions.
const UNIT = 8388608.0;
const UNIT_BITS = 0x4b000000u;

// The codes of `mask` from bit `shift` of each byte on, less `zero`.
fn codes_of(word: u32, shift: u32, mask: u32, zero: f32) -> vec4<f32> {
    return widened(bits_of(word, shift, mask), zero);
}

// Bits of each byte: those of `mask` from bit `shift` on.
fn bits_of(word: u32, shift: u32, mask: u32) -> vec4<u32> {
    return (vec4<u32>(word, word >> 8u, word >> 16u, word >> 24u) >> vec4<u32>(shift)) & vec4<u32>(mask);
}

// Codes of at most 22 bits, less `zero`.
fn widened(codes: vec4<u32>, zero: f32) -> vec4<f32> {
    return bitcast<vec4<f32>>(codes | vec4<u32>(UNIT_BITS)) - vec4<f32>(UNIT + zero);
}

// Each byte as a signed number.
fn signed(word: u32) -> vec4<f32> {
    return codes_of(word ^ 0x80808080u, 0u, 255u, 128.0);
}

// Half `i` of a quad: an f16.
fn half_of(quad: u32, i: u32) -> f32 {
    return unpack2x16float(weight[quad][i / 2u])[i % 2u];
}

// The product of 32 elements and a lane's part of x. Byte j of the codes has element j in its low half and element j + 16 in its
// high half.
fn nibbles_dot(codes: vec4<u32>, zero: f32, x: array<vec4<f32>, ITEM>) -> f32 {
    var v = x;
    var sum = vec4<f32>();
    for (var j = 0u; j < 4u; j++) {
        sum = fma(codes_of(codes[j], 0u, 15u, zero), v[j], sum);
        sum = fma(codes_of(codes[j], 4u, 15u, zero), v[j + 4u], sum);
    }
    return total_of(sum);
}

fn total_of(v: vec4<f32>) -> f32 {
    return (v.x + v.y) + (v.z + v.w);
}
