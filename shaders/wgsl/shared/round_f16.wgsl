// Rounding to f16, nearest even, by integers: pack2x16float and f16() may truncate on some drivers.
fn f16_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let a = bits & 0x7fffffffu;
    if a > 0x7f800000u {
        return sign | 0x7e00u;
    }
    // 65520 and beyond round to infinity.
    if a >= 0x477ff000u {
        return sign | 0x7c00u;
    }
    // Normal f16 numbers start at 2^-14; 2^-25 and below round to zero.
    if a >= 0x38800000u {
        return sign | ((a - 0x38000000u + 0xfffu + ((a >> 13u) & 1u)) >> 13u);
    }
    if a <= 0x33000000u {
        return sign;
    }
    let shift = 126u - (a >> 23u);
    let mantissa = (a & 0x7fffffu) | 0x800000u;
    let kept = mantissa >> shift;
    let half_way = 1u << (shift - 1u);
    let rest = mantissa & ((1u << shift) - 1u);
    let up = select(0u, 1u, rest > half_way || (rest == half_way && (kept & 1u) == 1u));
    return sign | (kept + up);
}

fn narrow(v: vec4<f32>) -> Quad {
    return Quad(f16_bits(v.x) | (f16_bits(v.y) << 16u), f16_bits(v.z) | (f16_bits(v.w) << 16u));
}
