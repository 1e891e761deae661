// Appends rows of KV in 8 bits, as `lagoon_types::kv_dtype` defines them: E4M3 codes, rounded to nearest even, and behind them
// a quad with the row's scale, the smallest power of two with which all elements round to a number of E4M3. Bits alone
// decide, so that all devices store the same bytes.
const SCALE_QUADS = 1u;

// The scale's bits, from the largest of the elements' bits without signs.
fn scale_of(largest: u32) -> u32 {
    if largest == 0u {
        return 0u;
    }
    if largest >= 0x7f800000u {
        return 0x7fc00000u;
    }
    let exponent = (largest >> 23u) + select(0u, 1u, (largest & 0x7fffffu) > 0x680000u);
    return (max(exponent, 35u) - 8u) << 23u;
}

fn narrow_scaled(v: vec4<f32>, scale: u32) -> Quad {
    if scale == 0u || scale >= 0x7f800000u {
        return 0u;
    }
    let x = v * bitcast<f32>(0x7f000000u - scale);
    let bits = bitcast<vec4<u32>>(x);
    let magnitudes = bits & vec4<u32>(0x7fffffffu);
    let even = (magnitudes >> vec4<u32>(20u)) & vec4<u32>(1u);
    let normal = ((magnitudes + vec4<u32>(0x7ffffu) + even) >> vec4<u32>(20u)) - vec4<u32>(960u);
    // The last bit of a number between 2^14 and 2^15 is worth 2^-9, as that of a subnormal code is.
    let subnormal = bitcast<vec4<u32>>(abs(x) + vec4<f32>(16384.0)) - vec4<u32>(0x46800000u);
    let codes = select(normal, subnormal, magnitudes < vec4<u32>(0x3c800000u)) | ((bits >> vec4<u32>(24u)) & vec4<u32>(0x80u));
    return codes.x | (codes.y << 8u) | (codes.z << 16u) | (codes.w << 24u);
}

fn scale_quad(scale: u32) -> Quad {
    return scale;
}
