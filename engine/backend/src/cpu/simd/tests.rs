//! Every instruction set that the processor has, against plain loops.

use super::*;
use half::{bf16, f16};

fn supported() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_supported())
}

struct Exp<'a>(&'a mut [f32]);

impl Kernel for Exp<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for chunk in self.0.chunks_exact_mut(S::LANES) {
            // SAFETY: a chunk is a whole vector.
            unsafe { S::store(chunk.as_mut_ptr(), math::exp::<S>(S::load(chunk.as_ptr()))) };
        }
    }
}

#[test]
fn exp_is_within_2e7_of_f64() {
    for isa in supported() {
        let inputs: Vec<f32> = (0..160_000).map(|i| -87.29 + i as f32 * (175.0 / 160_000.0)).collect();
        let mut got = inputs.clone();
        // SAFETY: supported.
        unsafe { isa.run(Exp(&mut got)) };
        for (x, got) in inputs.iter().zip(&got) {
            let want = f64::from(*x).exp();
            let error = (f64::from(*got) - want).abs() / want;
            assert!(error < 2e-7, "{isa}: exp({x}) is {got}, off by {error:e}");
        }
        let mut edges = [f32::NEG_INFINITY, -1e30, -88.0, 0.0, 100.0, 1e30, f32::INFINITY, -0.0].repeat(2);
        // SAFETY: supported.
        unsafe { isa.run(Exp(&mut edges)) };
        assert_eq!((edges[0], edges[1], edges[2], edges[3], edges[7]), (0.0, 0.0, 0.0, 1.0, 1.0), "{isa}");
        assert!(edges[4..7].iter().all(|v| v.is_finite() && *v > 2e38), "{isa}: {edges:?}");
    }
}

/// Checks each operation with lanes that differ.
struct Operations;

impl Kernel for Operations {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let n = S::LANES;
        let square: Vec<f32> = (0..n * n).map(|i| (i * i % 97) as f32 - 40.5).collect();
        let (a, b) = (&square[..n], &square[n..2 * n]);
        let mut out = vec![0.0; n * n];
        // SAFETY: vectors and squares are whole.
        unsafe {
            let (va, vb) = (S::load(a.as_ptr()), S::load(b.as_ptr()));
            let mut check = |v: S::V, want: &dyn Fn(usize) -> f32| {
                S::store(out.as_mut_ptr(), v);
                (0..n).for_each(|i| assert_eq!(out[i], want(i), "lane {i}"));
            };
            check(S::add(va, vb), &|i| a[i] + b[i]);
            check(S::sub(va, vb), &|i| a[i] - b[i]);
            check(S::mul(va, vb), &|i| a[i] * b[i]);
            check(S::div(va, vb), &|i| a[i] / b[i]);
            check(S::max(va, vb), &|i| a[i].max(b[i]));
            check(S::min(va, vb), &|i| a[i].min(b[i]));
            let nan = S::splat(f32::NAN);
            check(S::max(nan, vb), &|i| b[i]);
            check(S::min(nan, vb), &|i| b[i]);
            check(S::keep_greater(nan, vb, va), &|_| 0.0);
            check(S::keep_greater(S::max(va, nan), va, va), &|_| 0.0);
            check(S::keep_greater(va, S::min(va, nan), va), &|_| 0.0);
            check(S::fma(va, vb, S::splat(0.25)), &|i| a[i] * b[i] + 0.25);
            check(S::round(S::mul(va, S::splat(0.3))), &|i| (a[i] * 0.3).round_ties_even());
            check(S::pow2(S::round(va)), &|i| a[i].round_ties_even().exp2());
            check(S::keep_greater(va, vb, vb), &|i| if a[i] > b[i] { b[i] } else { 0.0 });
            check(S::sums(square.as_ptr()), &|i| square[i * n..][..n].iter().sum());
            assert_eq!(S::sum(va), a.iter().sum::<f32>());
            assert_eq!(S::largest(va), a.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v)));
            S::transpose(square.as_ptr(), n, out.as_mut_ptr(), n);
            (0..n * n).for_each(|i| assert_eq!(out[i], square[i % n * n + i / n], "transposed element {i}"));
        }
        parts::<S>(&square);
        halves::<S>(&square);
        bytes::<S>();
    }
}

#[inline(always)]
fn parts<S: Simd>(values: &[f32]) {
    for part in 0..S::LANES {
        // SAFETY: `exact` has the elements of the part and no more.
        unsafe {
            let exact = values[..part].to_vec();
            let mut out = vec![9.0; S::LANES];
            S::store(out.as_mut_ptr(), S::load_part(exact.as_ptr(), part));
            (0..S::LANES).for_each(|i| assert_eq!(out[i], if i < part { values[i] } else { 0.0 }));
            let mut out = vec![9.0; S::LANES];
            S::store_part(out.as_mut_ptr(), S::load(values.as_ptr()), part);
            (0..S::LANES).for_each(|i| assert_eq!(out[i], if i < part { values[i] } else { 9.0 }));
        }
    }
}

#[inline(always)]
fn halves<S: Simd>(values: &[f32]) {
    let n = S::LANES;
    let (f, b): (Vec<f16>, Vec<bf16>) =
        values.iter().map(|v| (f16::from_f32(*v / 7.0), bf16::from_f32(*v / 7.0))).unzip();
    for part in 0..=n {
        let mut out = vec![0.0; 2 * n];
        // SAFETY: there are more elements than are read, and room for whole vectors.
        unsafe {
            math::widen_padded::<S, f16>(f.as_ptr(), part, out.as_mut_ptr());
            (0..n).for_each(|i| assert_eq!(out[i], if i < part { f[i].to_f32() } else { 0.0 }));
            out.fill(0.0);
            math::widen_padded::<S, bf16>(b.as_ptr(), part, out.as_mut_ptr());
            (0..n).for_each(|i| assert_eq!(out[i], if i < part { b[i].to_f32() } else { 0.0 }));
        }
    }
}

/// Codes and planes with every extreme, and scales of parts and halves.
#[inline(always)]
fn bytes<S: Simd>() {
    let n = S::LANES;
    let codes: Vec<u8> = (0..4 * n).map(|i| [255, 127, 0, 128, 200][i % 5]).collect();
    let plane = |k: usize| -> Vec<i8> { (0..4 * n).map(|i| [-128, 127, 1, -1, 64, -77, 0][(i * k) % 7]).collect() };
    let (high, low) = (plane(1), plane(3));
    let (small, ints): (Vec<u8>, Vec<i32>) = codes.iter().zip(&high).map(|(c, h)| (c & 127, i32::from(*h) - 5)).unzip();
    let mut out = vec![0.0; n];
    // SAFETY: vectors are whole.
    unsafe {
        let (vh, vl) = (S::load_bytes(high.as_ptr().cast()), S::load_bytes(low.as_ptr().cast()));
        for (codes, wide) in [(&codes, true), (&small, false)] {
            let dot = S::dot_planes(S::load_bytes(codes.as_ptr()), vh, vl, wide);
            S::store(out.as_mut_ptr(), S::to_f32(S::add_ints(dot, S::load_ints(ints.as_ptr()))));
            for lane in 0..n {
                let x = |i: usize| 256 * i32::from(high[i]) + i32::from(low[i]);
                let want: i32 = (4 * lane..4 * lane + 4).map(|i| i32::from(codes[i]) * x(i)).sum();
                assert_eq!(out[lane], (want + ints[lane]) as f32, "lane {lane}, wide {wide}");
            }
        }
        let packed = S::load_bytes(codes.as_ptr());
        let mut check = |bytes: S::B, want: &dyn Fn(u8) -> u8| {
            for (v, of) in S::widen_bytes(bytes).into_iter().enumerate() {
                S::store(out.as_mut_ptr(), of);
                (0..n).for_each(|i| assert_eq!(out[i], f32::from(want(codes[v * n + i])), "byte {}", v * n + i));
            }
        };
        for by in 0..=4 {
            check(S::and(S::move_bits(packed, by, 0), 0xff << by), &|code| code << by);
            check(S::and(S::move_bits(packed, -by, 0), 0xff >> by), &|code| code >> by);
        }
        check(S::or(S::and(packed, 0x0f), S::xor(S::and(packed, 0xf0), 0xa0)), &|code| code ^ 0xa0);
        let table = std::array::from_fn(|i| u8::try_from(i * i).unwrap());
        check(S::look_up(&table, S::and(packed, 15)), &|code| table[usize::from(code & 15)]);
        let scales: Vec<f32> = (0..16).map(|i| i as f32 + 0.5).collect();
        let vectors = [S::load(scales.as_ptr()), S::load(scales.as_ptr().add(16 - n))];
        for first in (0..8).step_by(n / 8) {
            S::store(out.as_mut_ptr(), S::spread_parts(vectors[0], first));
            (0..n).for_each(|i| assert_eq!(out[i], scales[first + i / 8]));
            S::store(out.as_mut_ptr(), S::spread_halves(vectors, first));
            (0..n).for_each(|i| assert_eq!(out[i], scales[2 * first + i / 4]));
        }
    }
}

#[test]
fn operations_match_plain_loops() {
    for isa in supported() {
        // SAFETY: supported.
        unsafe { isa.run_bytes(Operations) };
    }
}

/// Loads codes.
struct Codes<'a>(&'a [u8], &'a mut [f32]);

impl Kernel for Codes<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for (from, to) in self.0.chunks_exact(S::LANES).zip(self.1.chunks_exact_mut(S::LANES)) {
            // SAFETY: chunks are whole vectors.
            unsafe { S::store(to.as_mut_ptr(), S::load_e4m3(from.as_ptr())) };
        }
    }
}

#[test]
fn e4m3_codes_are_loaded_as_they_are_defined() {
    let codes: Vec<u8> = (0..=255).collect();
    for isa in supported() {
        let mut got = vec![0.0; codes.len()];
        // SAFETY: supported.
        unsafe { isa.run(Codes(&codes, &mut got)) };
        for (code, got) in codes.iter().zip(&got) {
            assert_eq!(got.to_bits(), (lagoon_types::e4m3::decode(*code) / E4M3_DIVISOR).to_bits(), "{isa}: {code:#x}");
        }
    }
}
