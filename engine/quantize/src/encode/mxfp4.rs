//! MXFP4 (OCP Microscaling Formats 1.0): 32 floats of 4 bits with a power of two.

use super::{best, magnitude};

/// Half-way between neighbours of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, which the codes 0 to 7 stand for.
const BOUNDS: [f64; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// The power of two of the largest magnitude.
const LARGEST_POWER: i32 = 2;
const BIAS: i32 = 127;
/// The largest with which all magnitudes are numbers of f32.
const EXPONENT_MAX: i32 = 252;

/// The code of the nearest magnitude.
fn code(magnitude: f64) -> usize {
    BOUNDS.iter().filter(|bound| magnitude > **bound).count()
}

fn power(exponent: i32) -> f64 {
    2_f64.powi(exponent - BIAS)
}

pub(super) fn mxfp4(x: &[f32; 32], w: &[f32; 32], out: &mut [u8; 17]) {
    let most = f64::from(magnitude(x));
    if most == 0.0 {
        return;
    }
    let plain = most.log2().floor() as i32 - LARGEST_POWER + BIAS;
    let candidates = [plain, plain + 1, plain - 1].map(|exponent| exponent.clamp(0, EXPONENT_MAX));
    let error = |exponent: i32| {
        let inverse = 1.0 / power(exponent);
        let rest = |x: &f32| {
            let wanted = f64::from(x.abs()) * inverse;
            // In units of the largest element, so that squares stay in range.
            (wanted - MAGNITUDES[code(wanted)]) * power(exponent) / most
        };
        x.iter().zip(w).map(|(x, w)| f64::from(*w) * rest(x) * rest(x)).sum::<f64>() as f32
    };
    let Some((exponent, _)) = best(candidates, error) else { return };
    let inverse = 1.0 / power(exponent);
    out[0] = exponent as u8;
    let coded = |x: f32| {
        let code = code(f64::from(x.abs()) * inverse) as u8;
        // Zero has no sign.
        if x < 0.0 && code > 0 { code | 8 } else { code }
    };
    for (j, out) in out[1..].iter_mut().enumerate() {
        *out = coded(x[j]) | coded(x[j + 16]) << 4;
    }
}
