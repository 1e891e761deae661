//! Numbers of 8 bits with a sign, 4 bits of exponent with bias 7 and 3 of mantissa, without infinities: E4M3 (Micikevicius et al. 2022;
//! E4M3FN of other programs).

/// Bits of an f32 that exceed those of an E4M3: a shift of its mantissa, and the difference of the exponents' biases.
const MANTISSA_SHIFT: u32 = 20;
const BIAS_DIFFERENCE: u32 = 120;

/// The code of `x`, of magnitude at most 464, rounded to nearest even.
#[must_use]
#[inline]
pub fn encode(x: f32) -> u8 {
    // The last bit of a number between 2^14 and 2^15 is worth 2^-9, as that of a subnormal code is.
    const SUBNORMAL: f32 = 16_384.0;
    let (sign, magnitude) = ((x.to_bits() >> 24) & 0x80, x.to_bits() & 0x7fff_ffff);
    let even = (magnitude >> MANTISSA_SHIFT) & 1;
    let normal =
        ((magnitude + (1 << (MANTISSA_SHIFT - 1)) - 1 + even) >> MANTISSA_SHIFT).wrapping_sub(BIAS_DIFFERENCE << 3);
    let subnormal = (x.abs() + SUBNORMAL).to_bits() - SUBNORMAL.to_bits();
    let code = if magnitude < (BIAS_DIFFERENCE + 1) << 23 { subnormal } else { normal };
    (code | sign).to_le_bytes()[0]
}

/// The value of a code. The codes that E4M3 has for NaN are never written, readers of files refuse them, and they count as 480.
#[must_use]
#[inline]
pub fn decode(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    let normal = f32::from_bits((magnitude << MANTISSA_SHIFT) + (BIAS_DIFFERENCE << 23));
    // Subnormals are multiples of 2^-9.
    let value = if magnitude < 8 { magnitude as f32 / 512.0 } else { normal };
    if code & 0x80 == 0 { value } else { -value }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The magnitudes of E4M3, from its definition: `2^(e-7) * (1 + m/8)`, and `2^-6 * m/8` where `e` is 0.
    fn magnitudes() -> Vec<f32> {
        let number = |code: u8| {
            let (e, m) = (i32::from(code >> 3), f32::from(code & 7));
            if e == 0 { 2f32.powi(-6) * m / 8.0 } else { 2f32.powi(e - 7) * (1.0 + m / 8.0) }
        };
        (0..127).map(number).collect()
    }

    #[test]
    fn codes_are_the_numbers_of_e4m3() {
        for (code, magnitude) in (0u8..).zip(magnitudes()) {
            assert_eq!(decode(code), magnitude, "{code:#x}");
            assert_eq!(decode(code | 0x80), -magnitude, "{code:#x}");
            assert_eq!((encode(magnitude), encode(-magnitude)), (code, code | 0x80));
        }
        assert_eq!(decode(126), 448.0, "the largest");
    }

    #[test]
    fn codes_are_rounded_to_nearest_even() {
        for (code, pair) in (0u8..).zip(magnitudes().windows(2)) {
            let middle = f32::midpoint(pair[0], pair[1]);
            assert_eq!(encode(middle), code + (code & 1), "the middle of {pair:?}");
            assert_eq!(encode(middle.next_down()), code, "below the middle of {pair:?}");
            assert_eq!(encode(middle.next_up()), code + 1, "above the middle of {pair:?}");
        }
    }
}
