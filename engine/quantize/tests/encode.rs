//! Quantisers against plain rounding, which is written here once more, on rows of many kinds; rows that a format holds exactly;
//! rows of zeros, and tiny and huge ones.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests: numbers of small rows")]
#![allow(clippy::print_stdout, reason = "measured errors, for --nocapture")]

use half::f16;
use lagoon_backend::WeightFormat::{self, BF16, F16, Mxfp4, Q4_0, Q4K, Q5K, Q6K, Q8_0};
use lagoon_quantize::encode::{FORMATS, encode, largest};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

const PACKED: [WeightFormat; 6] = [Q8_0, Q4_0, Q4K, Q5K, Q6K, Mxfp4];
const COLS: usize = 512;

fn round_trip(format: WeightFormat, row: &[f32], importance: Option<&[f32]>) -> Vec<f32> {
    let mut bytes = vec![0xff; format.bytes(row.len()).unwrap()];
    encode(format, row, importance, &mut bytes);
    let mut read = Vec::new();
    format.decode(&bytes, &mut read);
    read
}

fn error(row: &[f32], read: &[f32], weights: Option<&[f32]>) -> f64 {
    let square = |(i, (x, y)): (usize, (&f32, &f32))| {
        let rest = f64::from(*x) - f64::from(*y);
        weights.map_or(1.0, |weights| f64::from(weights[i])) * rest * rest
    };
    row.iter().zip(read).enumerate().map(square).sum()
}

fn relative(row: &[f32], read: &[f32]) -> f64 {
    (error(row, read, None) / error(row, &vec![0.0; row.len()], None)).sqrt()
}

fn half(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

fn code(x: f32, scale: f32, least: f32, most: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { (x / scale).round_ties_even().clamp(least, most) }
}

fn extreme(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |most: f32, x| if x.abs() > most.abs() { *x } else { most })
}

/// The plainest form of a format: scales by the extremes, codes by rounding.
fn plain(format: WeightFormat, row: &[f32]) -> Vec<f32> {
    let by_block = |len: usize, of: &dyn Fn(&[f32]) -> Vec<f32>| row.chunks(len).flat_map(of).collect();
    match format {
        Q8_0 => by_block(32, &|x| {
            let scale = half(extreme(x).abs() / 127.0);
            x.iter().map(|x| scale * code(*x, scale, -127.0, 127.0)).collect()
        }),
        Q4_0 => by_block(32, &|x| {
            let scale = half(extreme(x) / -8.0);
            x.iter().map(|x| scale * code(*x, scale, -8.0, 7.0)).collect()
        }),
        Q6K => by_block(256, &|x| {
            let scales: Vec<f32> = x.chunks(16).map(|sub| extreme(sub) / -32.0).collect();
            let unit = half(extreme(&scales) / -128.0);
            let of = |(sub, scale): (&[f32], &f32)| {
                let scale = unit * code(*scale, unit, -128.0, 127.0);
                sub.iter().map(|x| scale * code(*x, scale, -32.0, 31.0)).collect::<Vec<_>>()
            };
            x.chunks(16).zip(&scales).flat_map(of).collect()
        }),
        Q4K | Q5K => {
            let top = if format == Q4K { 15.0 } else { 31.0 };
            by_block(256, &|x| {
                let least = |x: &[f32]| -x.iter().copied().fold(0.0, f32::min);
                let step = |x: &[f32]| (x.iter().copied().fold(f32::MIN, f32::max) + least(x)).max(0.0) / top;
                let of = |f: &dyn Fn(&[f32]) -> f32| x.chunks(32).map(f).collect::<Vec<f32>>();
                let (steps, leasts) = (of(&step), of(&least));
                let unit = |of: &[f32]| half(extreme(of) / 63.0);
                let (unit_step, unit_least) = (unit(&steps), unit(&leasts));
                let sub = |(i, x): (usize, &[f32])| {
                    let step = unit_step * code(steps[i], unit_step, 0.0, 63.0);
                    let least = unit_least * code(leasts[i], unit_least, 0.0, 63.0);
                    x.iter().map(|x| step * code(x + least, step, 0.0, top) - least).collect::<Vec<_>>()
                };
                x.chunks(32).enumerate().flat_map(sub).collect()
            })
        }
        Mxfp4 => by_block(32, &|x| {
            let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
            if extreme(x) == 0.0 {
                return x.to_vec();
            }
            let scale = 2_f32.powi(extreme(x).abs().log2().floor() as i32 - 2);
            let nearest = |x: f32| {
                let far = |m: &f32| (x.abs() / scale - m).abs();
                let magnitude = magnitudes.into_iter().min_by(|a, b| far(a).total_cmp(&far(b))).unwrap();
                (magnitude * scale).copysign(x)
            };
            x.iter().map(|x| nearest(*x)).collect()
        }),
        _ => unreachable!(),
    }
}

/// Nearly normal, of deviation 1.
fn normal(rng: &mut SmallRng) -> f32 {
    (0..12).map(|_| rng.random::<f32>()).sum::<f32>() - 6.0
}

/// Rows of many kinds by number.
fn row(kind: usize, rng: &mut SmallRng) -> Vec<f32> {
    let scale = 10_f32.powf(rng.random_range(-3.0..3.0));
    let mut x: Vec<f32> = (0..COLS).map(|_| normal(rng) * scale).collect();
    match kind {
        0 => {}
        // Outliers.
        1 => (0..5).for_each(|_| x[rng.random_range(0..COLS)] *= 30.0),
        // All of one sign, and all of the other.
        2 => x.iter_mut().for_each(|x| *x = x.abs() + scale),
        3 => x.iter_mut().for_each(|x| *x = -x.abs() - scale),
        // Sparse.
        4 => x.iter_mut().for_each(|x| *x = if x.abs() < 1.5 * scale { 0.0 } else { *x }),
        // Blocks of very different sizes.
        5 => x.chunks_mut(16).for_each(|x| {
            let scale = 10_f32.powf(rng.random_range(-2.0..1.0));
            x.iter_mut().for_each(|x| *x *= scale);
        }),
        // Even steps.
        _ => x.iter_mut().zip(0_u16..).for_each(|(x, i)| *x = scale * (f32::from(i % 37) - 18.0)),
    }
    x
}

/// Of the weighted square error that plain rounding leaves, the search leaves never more.
#[test]
fn no_row_is_worse_than_rounded() {
    for format in PACKED {
        let (mut shares, mut rows) = ([0.0, 0.0], 0);
        for seed in 0..140 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let row = row(usize::try_from(seed).unwrap() % 7, &mut rng);
            let importance: Vec<f32> = (0..COLS).map(|_| 10_f32.powf(rng.random_range(-1.0..1.0))).collect();
            let rounded = plain(format, &row);
            for (weights, share) in [None, Some(importance.as_slice())].into_iter().zip(&mut shares) {
                let (found, most) =
                    (error(&row, &round_trip(format, &row, weights), weights), error(&row, &rounded, weights));
                // The weight of a column is the share of its block's mean plus a ten-thousandth of it.
                assert!(found <= most * 1.002 + 1e-12, "{format}, seed {seed}: {found} of {most}");
                *share += if most > 0.0 { found / most } else { 1.0 };
            }
            rows += 1;
        }
        let [even, weighed] = shares.map(|share| share / f64::from(rows));
        println!("{format}: {even:.3} of the square error of rounding; {weighed:.3} with importance");
        assert!(weighed < even && even < 1.0, "{format}: {even} and {weighed}");
    }
}

/// Relative root mean square of errors on normal rows.
#[test]
fn errors_of_normal_rows_are_those_of_the_format() {
    let bounds = [(Q8_0, 0.0060), (Q6K, 0.0180), (Q5K, 0.0380), (Q4K, 0.0760), (Q4_0, 0.0950), (Mxfp4, 0.1250)];
    for (format, bound) in bounds {
        let mut rng = SmallRng::seed_from_u64(5);
        let rows: Vec<f32> = (0..64 * COLS).map(|_| normal(&mut rng)).collect();
        let (found, rounded) =
            (relative(&rows, &round_trip(format, &rows, None)), relative(&rows, &plain(format, &rows)));
        println!("{format}: {found:.5}, rounded {rounded:.5}");
        assert!(found < bound && found > 0.5 * bound, "{format}: {found} of {bound}");
    }
}

/// Rows that are in a format already stay as they are.
#[test]
fn exact_rows_are_kept() {
    let mut rng = SmallRng::seed_from_u64(11);
    let scale = half(0.0123);
    let signed = |rng: &mut SmallRng, len: usize, least: i16, most: i16| {
        let mut x: Vec<f32> = (0..len).map(|_| f32::from(rng.random_range(least..=most))).collect();
        x[rng.random_range(0..len)] = f32::from(least);
        x
    };
    let check = |format: WeightFormat, row: &[f32]| {
        let read = round_trip(format, row, None);
        let worst = row.iter().zip(&read).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        assert!(worst <= 1e-6 * extreme(row).abs(), "{format}: {worst} of {}", extreme(row));
    };
    for _ in 0..20 {
        check(Q8_0, &signed(&mut rng, 32, -127, 127).iter().map(|x| x * scale).collect::<Vec<_>>());
        check(Q4_0, &signed(&mut rng, 32, -8, 7).iter().map(|x| x * scale).collect::<Vec<_>>());
        let mut subs: Vec<f32> = (0..16).map(|_| f32::from(rng.random_range(1_i16..=127))).collect();
        subs[rng.random_range(0..16)] = -128.0;
        let six: Vec<f32> =
            subs.iter().flat_map(|s| signed(&mut rng, 16, -32, 31).into_iter().map(move |x| x * s)).collect();
        check(Q6K, &six.iter().map(|x| x * scale).collect::<Vec<_>>());
        for (format, top) in [(Q4K, 15), (Q5K, 31)] {
            let offset = half(0.0345);
            let mut row = Vec::new();
            for sub in 0..8 {
                let (s, m) = if sub == 3 { (63, 63) } else { (rng.random_range(8..63), rng.random_range(0..63)) };
                let mut codes = signed(&mut rng, 32, 0, top);
                codes[0] = f32::from(top);
                codes[1] = 0.0;
                row.extend(codes.iter().map(|code| scale * f32::from(s as u8) * code - offset * f32::from(m as u8)));
            }
            check(format, &row);
        }
        let floats = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let power = 2_f32.powi(rng.random_range(-60..60));
        let mut row: Vec<f32> = (0..32).map(|_| floats[rng.random_range(0..8)] * power).collect();
        row[7] = -6.0 * power;
        assert_eq!(round_trip(Mxfp4, &row, None), row);
    }
    let row: Vec<f32> = (0..64).map(|_| half(normal(&mut rng))).collect();
    assert_eq!(round_trip(F16, &row, None), row);
    let row: Vec<f32> = row.iter().map(|x| f32::from_bits(x.to_bits() & 0xffff_0000)).collect();
    assert_eq!(round_trip(BF16, &row, None), row);
}

#[test]
fn odd_rows_are_near() {
    for format in PACKED {
        let zeros = vec![0.0; COLS];
        assert_eq!(round_trip(format, &zeros, None), zeros, "{format}");
        for importance in [0.0, 1e-30, 1e30] {
            let row: Vec<f32> = (0..COLS).map(|i| (i as f32 * 0.7).sin()).collect();
            let found = relative(&row, &round_trip(format, &row, Some(&vec![importance; COLS])));
            assert!(found < 0.15, "{format}, importance {importance}: {found}");
        }
        for constant in [1.0, -1.0, 3.3e-4, -777.7] {
            let row = vec![constant; COLS];
            let found = relative(&row, &round_trip(format, &row, None));
            let bound = if format == Mxfp4 { 0.2 } else { 0.01 };
            assert!(found < bound, "{format}, {constant}: {found}");
        }
        // As large as the format holds, and beyond what squares of f32 do.
        let most = largest(format).min(3e38);
        let huge: Vec<f32> = (0..COLS).map(|i| most * (i as f32 * 0.7).sin()).collect();
        let read = round_trip(format, &huge, None);
        assert!(read.iter().all(|x| x.is_finite()), "{format}");
        let found = relative(
            &huge.iter().map(|x| x / most).collect::<Vec<_>>(),
            &read.iter().map(|x| x / most).collect::<Vec<_>>(),
        );
        assert!(found < 0.15, "{format}: {found}");
        // Near the least scale: an error is at most half of that.
        for scale in [1e-6, 1e-7, 3e-8, 1e-9, 1e-30, f32::from_bits(1)] {
            let tiny: Vec<f32> = (0..COLS).map(|i| scale * (i as f32 * 0.7).sin()).collect();
            let read = round_trip(format, &tiny, None);
            let worst = tiny.iter().zip(&read).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
            assert!(worst <= 3.1e-8 + 0.3 * scale, "{format}, {scale}: {worst}");
        }
    }
    assert_eq!(FORMATS.len(), PACKED.len() + 3);
}

/// With importance, columns that matter are nearer.
#[test]
fn columns_that_matter_are_nearer() {
    let mut rng = SmallRng::seed_from_u64(3);
    for format in PACKED {
        let (mut even, mut weighed) = (0.0, 0.0);
        for _ in 0..50 {
            let row: Vec<f32> = (0..COLS).map(|_| normal(&mut rng)).collect();
            let importance: Vec<f32> = (0..COLS).map(|i| if i % 8 == 0 { 100.0 } else { 1.0 }).collect();
            even += error(&row, &round_trip(format, &row, None), Some(&importance));
            weighed += error(&row, &round_trip(format, &row, Some(&importance)), Some(&importance));
        }
        println!("{format}: {:.3} of the weighted error", weighed / even);
        assert!(weighed < even, "{format}: {weighed} of {even}");
    }
}
