//! Vectors for any processor: arrays of eight, which compilers vectorise as they can.

use super::Simd;
use half::{bf16, f16};
use lagoon_types::kv_dtype::decode_code;

/// No features needed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

const LANES: usize = 8;
type V = [f32; LANES];
type W = [i16; 2 * LANES];

#[inline(always)]
fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

#[inline(always)]
unsafe fn read(n: usize, f: impl Fn(usize) -> f32) -> V {
    let mut out = [0.0; LANES];
    for (i, out) in out[..n].iter_mut().enumerate() {
        *out = f(i);
    }
    out
}

// SAFETY (of the blocks below): pointers are valid for the elements named, by the trait's contract.
impl Simd for Portable {
    type V = V;
    type I = [i32; LANES];
    type W = W;
    const LANES: usize = LANES;
    const TILE_VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> V {
        [x; LANES]
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> V {
        // SAFETY: LANES elements are valid; an array of f32 may be read unaligned.
        unsafe { p.cast::<V>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> V {
        // SAFETY: n elements are valid.
        unsafe { read(n, |i| *p.add(i)) }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, v: V) {
        // SAFETY: LANES elements are valid.
        unsafe { p.cast::<V>().write_unaligned(v) }
    }

    #[inline(always)]
    unsafe fn store_part(p: *mut f32, v: V, n: usize) {
        // SAFETY: n elements are valid.
        unsafe { std::ptr::copy_nonoverlapping(v.as_ptr(), p, n) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> V {
        // SAFETY: LANES elements are valid.
        unsafe { read(LANES, |i| f16::from_bits(*p.add(i)).to_f32()) }
    }

    #[inline(always)]
    unsafe fn load_f16_part(p: *const u16, n: usize) -> V {
        // SAFETY: n elements are valid.
        unsafe { read(n, |i| f16::from_bits(*p.add(i)).to_f32()) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> V {
        // SAFETY: LANES elements are valid.
        unsafe { read(LANES, |i| bf16::from_bits(*p.add(i)).to_f32()) }
    }

    #[inline(always)]
    unsafe fn load_bf16_part(p: *const u16, n: usize) -> V {
        // SAFETY: n elements are valid.
        unsafe { read(n, |i| bf16::from_bits(*p.add(i)).to_f32()) }
    }

    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> V {
        // SAFETY: LANES codes are valid.
        unsafe { read(LANES, |i| decode_code(*p.add(i)) / 256.0) }
    }

    #[inline(always)]
    unsafe fn add(a: V, b: V) -> V {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn sub(a: V, b: V) -> V {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn div(a: V, b: V) -> V {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    unsafe fn max(a: V, b: V) -> V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn min(a: V, b: V) -> V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    unsafe fn fma(a: V, b: V, c: V) -> V {
        // Not `mul_add`, which is a call where the processor has no such instruction.
        zip(zip(a, b, |a, b| a * b), c, |ab, c| ab + c)
    }

    #[inline(always)]
    unsafe fn round(a: V) -> V {
        // Adding 1.5 * 2^23 leaves no bits below one, for magnitudes up to 2^22.
        const MAGIC: f32 = 12_582_912.0;
        zip(a, a, |a, _| (a + MAGIC) - MAGIC)
    }

    #[inline(always)]
    unsafe fn pow2(n: V) -> V {
        // The integer in the low bits of n + 127 + 2^23 becomes the exponent.
        zip(n, n, |n, _| f32::from_bits((n + 127.0 + 8_388_608.0).to_bits() << 23))
    }

    #[inline(always)]
    unsafe fn keep_greater(a: V, b: V, x: V) -> V {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = if a[i] > b[i] { x[i] } else { 0.0 };
        }
        out
    }

    #[inline(always)]
    unsafe fn sum(v: V) -> f32 {
        ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
    }

    #[inline(always)]
    unsafe fn largest(v: V) -> f32 {
        v.iter().fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m })
    }

    #[inline(always)]
    unsafe fn sums(p: *const f32) -> V {
        let mut out = [0.0; LANES];
        for (i, out) in out.iter_mut().enumerate() {
            // SAFETY: LANES vectors are valid.
            *out = unsafe { Self::sum(Self::load(p.add(i * LANES))) };
        }
        out
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        for row in 0..LANES {
            for col in 0..LANES {
                // SAFETY: both squares are valid.
                unsafe { *to.add(col * to_stride + row) = *from.add(row * from_stride + col) };
            }
        }
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}

    #[inline(always)]
    unsafe fn f16(p: *const u16) -> f32 {
        // SAFETY: one element is valid.
        f16::from_bits(unsafe { p.read_unaligned() }).to_f32()
    }

    #[inline(always)]
    unsafe fn splat_halves(a: f32, b: f32) -> V {
        std::array::from_fn(|i| if i < LANES / 2 { a } else { b })
    }

    #[inline(always)]
    unsafe fn to_f32(a: [i32; LANES]) -> V {
        a.map(|a| a as f32)
    }

    #[inline(always)]
    unsafe fn wide(a: W) -> [V; 2] {
        [std::array::from_fn(|i| f32::from(a[i])), std::array::from_fn(|i| f32::from(a[LANES + i]))]
    }

    #[inline(always)]
    unsafe fn load_i16(p: *const i16) -> W {
        // SAFETY: `2 * LANES` elements are valid.
        unsafe { p.cast::<W>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> W {
        // SAFETY: `2 * LANES` elements are valid.
        unsafe { p.cast::<[u8; 2 * LANES]>().read() }.map(i16::from)
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> W {
        // SAFETY: `2 * LANES` elements are valid.
        unsafe { p.cast::<[i8; 2 * LANES]>().read() }.map(i16::from)
    }

    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> [W; 2] {
        // SAFETY: sixteen bytes are valid.
        unsafe {
            let bytes = Self::load_u8(p);
            [Self::and(bytes, 15), Self::shift_right(bytes, 4)]
        }
    }

    #[inline(always)]
    unsafe fn and(a: W, mask: i16) -> W {
        a.map(|a| a & mask)
    }

    #[inline(always)]
    unsafe fn or(a: W, b: W) -> W {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    unsafe fn shift_right(a: W, n: u32) -> W {
        a.map(|a| (a.cast_unsigned() >> n).cast_signed())
    }

    #[inline(always)]
    unsafe fn shift_left(a: W, n: u32) -> W {
        a.map(|a| a << n)
    }

    #[inline(always)]
    unsafe fn minus(a: W, n: i16) -> W {
        a.map(|a| a.wrapping_sub(n))
    }

    #[inline(always)]
    unsafe fn look_up(table: &[i8; 16], a: W) -> W {
        a.map(|a| i16::from(table[usize::from(a.cast_unsigned()) & 15]))
    }

    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> V {
        // As f16, whose exponent has one bit and a bias of 8 more.
        let wide = |code: u8| f16::from_bits(u16::from(code & 0x80) << 8 | u16::from(code & 0x7f) << 7).to_f32();
        // SAFETY: `LANES` elements are valid.
        unsafe { p.cast::<[u8; LANES]>().read() }.map(wide)
    }

    #[inline(always)]
    unsafe fn dot_pairs(a: W, b: W) -> [i32; LANES] {
        let product = |i: usize| i32::from(a[i]) * i32::from(b[i]);
        std::array::from_fn(|i| product(2 * i).wrapping_add(product(2 * i + 1)))
    }
}
