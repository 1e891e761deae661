//! Vectors for any processor: `wide`'s, which are two of SSE2's on x86-64, two of NEON's on 64-bit Arm, else arrays. What takes more
//! than a few instructions is a call: inlined everywhere, it was half of this crate's compile time (ADR 5).

use super::Simd;
use half::{bf16, f16};
use lagoon_types::e4m3;
use wide::{f32x8, i32x8, u32x8};

/// No features needed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

const LANES: usize = 8;
type V = f32x8;
/// Bytes, eight a word.
type B = [u64; LANES / 2];

#[inline(always)]
unsafe fn read(n: usize, f: impl Fn(usize) -> f32) -> V {
    let mut out = [0.0; LANES];
    for (i, out) in out[..n].iter_mut().enumerate() {
        *out = f(i);
    }
    V::new(out)
}

/// `byte` in every byte of a word.
#[inline(always)]
const fn repeated(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

// SAFETY (of the blocks below): pointers are valid for the elements named, by the trait's contract.
impl Simd for Portable {
    type V = V;
    type I = i32x8;
    type B = B;
    const LANES: usize = LANES;
    const TILE_VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> V {
        V::splat(x)
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> V {
        // SAFETY: LANES elements are valid; an array of f32 may be read unaligned.
        V::new(unsafe { p.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(never)]
    unsafe fn load_part(p: *const f32, n: usize) -> V {
        // SAFETY: n elements are valid.
        unsafe { read(n, |i| *p.add(i)) }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, v: V) {
        // SAFETY: LANES elements are valid.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(v.to_array()) }
    }

    #[inline(never)]
    unsafe fn store_part(p: *mut f32, v: V, n: usize) {
        // SAFETY: n elements are valid.
        unsafe { std::ptr::copy_nonoverlapping(v.as_array().as_ptr(), p, n) }
    }

    #[inline(never)]
    unsafe fn load_f16(p: *const u16) -> V {
        // SAFETY: LANES elements are valid.
        unsafe { read(LANES, |i| f16::from_bits(*p.add(i)).to_f32()) }
    }

    #[inline(never)]
    unsafe fn load_f16_part(p: *const u16, n: usize) -> V {
        // SAFETY: n elements are valid.
        unsafe { read(n, |i| f16::from_bits(*p.add(i)).to_f32()) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> V {
        // SAFETY: LANES elements are valid.
        unsafe { read(LANES, |i| bf16::from_bits(*p.add(i)).to_f32()) }
    }

    #[inline(never)]
    unsafe fn load_bf16_part(p: *const u16, n: usize) -> V {
        // SAFETY: n elements are valid.
        unsafe { read(n, |i| bf16::from_bits(*p.add(i)).to_f32()) }
    }

    #[inline(never)]
    unsafe fn load_e4m3(p: *const u8) -> V {
        // SAFETY: LANES codes are valid.
        unsafe { read(LANES, |i| e4m3::decode(*p.add(i)) / super::E4M3_DIVISOR) }
    }

    #[inline(always)]
    unsafe fn add(a: V, b: V) -> V {
        a + b
    }

    #[inline(always)]
    unsafe fn sub(a: V, b: V) -> V {
        a - b
    }

    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        a * b
    }

    #[inline(always)]
    unsafe fn div(a: V, b: V) -> V {
        a / b
    }

    #[inline(always)]
    unsafe fn max(a: V, b: V) -> V {
        a.simd_gt(b).select(a, b)
    }

    #[inline(always)]
    unsafe fn min(a: V, b: V) -> V {
        a.simd_lt(b).select(a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: V, b: V, c: V) -> V {
        a.mul_add(b, c)
    }

    #[inline(always)]
    unsafe fn round(a: V) -> V {
        // Adding 1.5 * 2^23 leaves no bits below one, for magnitudes up to 2^22.
        const MAGIC: V = V::new([12_582_912.0; LANES]);
        (a + MAGIC) - MAGIC
    }

    #[inline(always)]
    unsafe fn pow2(n: V) -> V {
        // The integer in the low bits of n + 127 + 2^23 becomes the exponent.
        let biased = n + V::splat(127.0) + V::splat(8_388_608.0);
        bytemuck::cast(bytemuck::cast::<V, u32x8>(biased) << 23)
    }

    #[inline(always)]
    unsafe fn keep_greater(a: V, b: V, x: V) -> V {
        a.simd_gt(b) & x
    }

    #[inline(always)]
    unsafe fn sum(v: V) -> f32 {
        let v = v.to_array();
        ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
    }

    #[inline(always)]
    unsafe fn largest(v: V) -> f32 {
        v.to_array().iter().fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m })
    }

    #[inline(never)]
    unsafe fn sums(p: *const f32) -> V {
        // SAFETY: LANES vectors are valid.
        unsafe { read(LANES, |i| Self::sum(Self::load(p.add(i * LANES)))) }
    }

    #[inline(never)]
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

    #[inline(never)]
    unsafe fn f16_strided(p: *const u8, stride: usize) -> V {
        // SAFETY: eight elements are valid.
        unsafe { read(LANES, |i| Self::f16(p.add(i * stride).cast())) }
    }

    #[inline(always)]
    unsafe fn bytes_to_f32(word: u64) -> V {
        V::new(word.to_le_bytes().map(f32::from))
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> V {
        // SAFETY: LANES elements are valid.
        V::new(unsafe { p.cast::<[i8; LANES]>().read() }.map(f32::from))
    }

    #[inline(always)]
    unsafe fn to_f32(a: i32x8) -> V {
        V::from_i32x8(a)
    }

    #[inline(always)]
    unsafe fn load_ints(p: *const i32) -> i32x8 {
        // SAFETY: LANES elements are valid.
        i32x8::new(unsafe { p.cast::<[i32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn add_ints(a: i32x8, b: i32x8) -> i32x8 {
        a + b
    }

    #[inline(always)]
    unsafe fn spread_parts(scales: V, first: usize) -> V {
        V::splat(scales.as_array()[first])
    }

    #[inline(never)]
    unsafe fn spread_halves(scales: [V; 2], first: usize) -> V {
        let scales = scales[first / 4].to_array();
        V::new(std::array::from_fn(|i| scales[2 * (first % 4) + i / 4]))
    }

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> B {
        // SAFETY: `4 * LANES` bytes are valid.
        unsafe { p.cast::<B>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_parts(p: *const u8, _: usize) -> B {
        // SAFETY: 32 bytes are valid.
        unsafe { p.cast::<B>().read_unaligned() }
    }

    #[inline(never)]
    unsafe fn load_nibbles(p: *const u8, _: usize) -> B {
        // SAFETY: sixteen bytes are valid.
        let bytes = unsafe { p.cast::<[u8; 16]>().read() };
        bytemuck::cast::<[u8; 4 * LANES], B>(std::array::from_fn(|i| bytes[i % 16] >> (i / 16 * 4) & 15))
    }

    #[inline(always)]
    unsafe fn move_bits(a: B, left: i32, _: i32) -> B {
        a.map(|word| if left < 0 { word >> -left } else { word << left })
    }

    #[inline(always)]
    unsafe fn and(a: B, mask: u8) -> B {
        a.map(|word| word & repeated(mask))
    }

    #[inline(always)]
    unsafe fn or(a: B, b: B) -> B {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    unsafe fn xor(a: B, mask: u8) -> B {
        a.map(|word| word ^ repeated(mask))
    }

    #[inline(never)]
    unsafe fn look_up(table: &[u8; 16], a: B) -> B {
        bytemuck::cast(bytemuck::cast::<B, [u8; 4 * LANES]>(a).map(|code| table[usize::from(code & 15)]))
    }

    #[inline(never)]
    unsafe fn widen_bytes(a: B) -> [V; 4] {
        let bytes: [[u8; LANES]; 4] = bytemuck::cast(a);
        bytes.map(|bytes| V::new(bytes.map(f32::from)))
    }

    #[inline(never)]
    unsafe fn dot_planes(codes: B, high: B, low: B, _: bool) -> i32x8 {
        let [codes, high, low]: [[u8; 4 * LANES]; 3] = bytemuck::cast([codes, high, low]);
        let product =
            |i: usize| i32::from(codes[i]) * (256 * i32::from(high[i].cast_signed()) + i32::from(low[i].cast_signed()));
        i32x8::new(std::array::from_fn(|i| (4 * i..4 * i + 4).map(product).sum()))
    }
}
