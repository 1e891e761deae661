//! Context lengths with a published range, mean and standard deviation (Infinite-LLM v2 Table 1), and the mixture of
//! ranges of v1 Table 2.
//!
//! Lengths are drawn by strata: the `i`-th of `n` lies at a random place of the `i`-th of `n` equally likely parts of
//! the distribution, and the whole is then shuffled. So a trace of a few hundred requests has the table's moments.
//! The largest and the smallest length are set to those of the range.
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "lengths are under 2^21 and not negative")]

use crate::rng::Rng;

/// A range with its moments, in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moments {
    pub min: u32,
    pub max: u32,
    pub mean: f64,
    pub sd: f64,
}

/// Points of the grid on which a density is inverted.
const GRID: usize = 4096;
/// Least first parameter of a beta distribution; below, it is a spike, and a mixture is used instead.
const BETA_ALPHA_MIN: f64 = 0.5;
/// Target mean of a mixture's short requests, in tokens: about a turn of a conversation.
const SHORT_MEAN_AIM: f64 = 160.0;
/// Sigma of the short requests' lognormal.
const SHORT_SIGMA: f64 = 1.0;

/// Half the width of the long requests' lengths, as a share of their centre.
const LONG_SPREAD: f64 = 0.15;

/// In `[0, 1)`.
pub(super) fn unit(rng: &mut Rng) -> f64 {
    (rng.draw() >> 11) as f64 / (1_u64 << 53) as f64
}

/// `n` lengths with these moments, in random order.
///
/// A scaled beta distribution is used if it has these moments and the shape of a bell or slope. The S traces of Table
/// 1 have nearly the largest standard deviation that range and mean allow (7786 of 8509 for trace 0), which only a
/// mixture of two groups can have: many short requests, and a few almost as long as the range.
#[must_use]
pub(super) fn sample(moments: &Moments, n: usize, rng: &mut Rng) -> Vec<u32> {
    let (lo, width) = (f64::from(moments.min), f64::from(moments.max - moments.min));
    let mu = (moments.mean - lo) / width;
    let var = (moments.sd / width).powi(2);
    let nu = mu * (1.0 - mu) / var - 1.0;
    let mut lengths = if mu * nu >= BETA_ALPHA_MIN {
        let (a, b) = (mu * nu, (1.0 - mu) * nu);
        let density = |x: f64| ((a - 1.0) * x.ln() + (b - 1.0) * (1.0 - x).ln()).exp();
        strata(&invert(density), n, rng).into_iter().map(|x| lo + width * x).collect()
    } else {
        mixture(moments, n, rng)
    };
    pin(&mut lengths, moments);
    shuffle(&mut lengths, rng);
    lengths.into_iter().map(|x| (x.round() as u32).clamp(moments.min, moments.max)).collect()
}

/// `n` lengths of v1 Table 2: log-uniform in `1..=normal_max`, and of the share `long` of them uniform in
/// `normal_max..=long_max`. The table gives ranges and ratio only; the shapes within the ranges are ours.
#[must_use]
pub(super) fn two_ranges(normal_max: u32, long_max: u32, long: f64, n: usize, rng: &mut Rng) -> Vec<u32> {
    let longs = ((n as f64 * long).round() as usize).clamp(usize::from(long > 0.0), n);
    let normal = (n - longs) as f64;
    let top = f64::from(normal_max);
    let mut lengths: Vec<f64> = (0..n - longs).map(|i| top.powf((i as f64 + unit(rng)) / normal)).collect();
    let span = f64::from(long_max - normal_max);
    lengths.extend((0..longs).map(|i| top + 1.0 + (span - 1.0) * (i as f64 + unit(rng)) / longs as f64));
    shuffle(&mut lengths, rng);
    lengths.into_iter().map(|x| (x.round() as u32).clamp(1, long_max)).collect()
}

/// The quantile function of a density over `(0, 1)`, at `GRID + 1` points.
fn invert(density: impl Fn(f64) -> f64) -> Vec<f64> {
    let mut cdf = vec![0.0; GRID + 1];
    for i in 0..GRID {
        cdf[i + 1] = cdf[i] + density((i as f64 + 0.5) / GRID as f64);
    }
    let total = cdf[GRID];
    let mut at = 0;
    let quantile = |q: f64| {
        while at + 1 < GRID && cdf[at + 1] < q * total {
            at += 1;
        }
        let inside = (q * total - cdf[at]) / (cdf[at + 1] - cdf[at]).max(f64::MIN_POSITIVE);
        (at as f64 + inside.clamp(0.0, 1.0)) / GRID as f64
    };
    (0..=GRID).map(|i| i as f64 / GRID as f64).map(quantile).collect()
}

fn strata(quantiles: &[f64], n: usize, rng: &mut Rng) -> Vec<f64> {
    let at = |q: f64| {
        let x = q * GRID as f64;
        let i = (x as usize).min(GRID - 1);
        quantiles[i] + (quantiles[i + 1] - quantiles[i]) * (x - i as f64)
    };
    (0..n).map(|i| at((i as f64 + unit(rng)) / n as f64)).collect()
}

/// Many short lengths and `k` long ones. For every `k`, the short mean determines the long ones' centre by the mean,
/// and is itself determined by the standard deviation. The `k` with the short mean nearest to a conversation's is
/// taken.
fn mixture(moments: &Moments, n: usize, rng: &mut Rng) -> Vec<f64> {
    let inside: Vec<f64> = (0..n).map(|_| unit(rng)).collect();
    let fits = (1..=n / 4).filter_map(|k| {
        let centre = long_centre(moments, n, k, SHORT_MEAN_AIM);
        // Skips far too few or too many long ones.
        (centre < 1.2 * f64::from(moments.max) && centre > 4.0 * moments.mean).then_some(())?;
        let shapes = shapes(n - k, &inside);
        let short_mean = solve_short_mean(moments, n, k, &shapes)?;
        Some((k, short_mean))
    });
    let off = |mean: f64| (mean / SHORT_MEAN_AIM).ln().abs();
    let best = fits.min_by(|a, b| off(a.1).total_cmp(&off(b.1)));
    let (k, short_mean) = best.unwrap_or((1, SHORT_MEAN_AIM));
    build(moments, n, k, short_mean, &shapes(n - k, &inside))
}

/// The strata of a lognormal whose mean is 1.
fn shapes(n: usize, inside: &[f64]) -> Vec<f64> {
    let mut shapes: Vec<f64> = inside.iter().take(n).enumerate().map(|(i, u)| lognormal(i, n, *u)).collect();
    let mean = shapes.iter().sum::<f64>() / n as f64;
    shapes.iter_mut().for_each(|x| *x /= mean);
    shapes
}

/// The short mean with which `k` long requests have the standard deviation, if there is one.
fn solve_short_mean(moments: &Moments, n: usize, k: usize, shapes: &[f64]) -> Option<f64> {
    let most = moments.mean * n as f64 / (n - k) as f64;
    let (mut low, mut high) = (f64::from(moments.min) + 10.0, most.min(1000.0));
    // The larger the short mean, the shorter the long requests and the smaller the deviation.
    let sd = |short_mean: f64| {
        let centre = long_centre(moments, n, k, short_mean);
        let fits = centre <= 0.97 * f64::from(moments.max) && centre > 2.0 * moments.mean;
        fits.then(|| deviation(&build(moments, n, k, short_mean, shapes)))
    };
    for _ in 0..40 {
        let middle = f64::midpoint(low, high);
        match sd(middle) {
            Some(sd) if sd < moments.sd => high = middle,
            Some(_) => low = middle,
            None if long_centre(moments, n, k, middle) > 2.0 * moments.mean => low = middle,
            None => high = middle,
        }
    }
    let found = f64::midpoint(low, high);
    sd(found).filter(|sd| (sd / moments.sd - 1.0).abs() < 0.01).map(|_| found)
}

fn long_centre(moments: &Moments, n: usize, k: usize, short_mean: f64) -> f64 {
    (moments.mean * n as f64 - short_mean * (n - k) as f64) / k as f64
}

/// Lengths of a mixture: a lognormal's strata scaled to the short mean, and long ones: one as long as the range, the
/// others evenly around their remaining centre.
fn build(moments: &Moments, n: usize, k: usize, short_mean: f64, shapes: &[f64]) -> Vec<f64> {
    let (lo, hi) = (f64::from(moments.min), f64::from(moments.max));
    let mut lengths: Vec<f64> = shapes.iter().map(|x| (x * short_mean).max(lo)).collect();
    let centre = long_centre(moments, n, k, short_mean);
    let others = (k as f64 * centre - hi) / (k as f64 - 1.0).max(1.0);
    let spread = (hi - others).min(LONG_SPREAD * others);
    let place = |i: usize| if k <= 2 { 0.0 } else { 2.0 * i as f64 / (k - 2) as f64 - 1.0 };
    lengths.extend((1..k).map(|i| others + spread * place(i - 1)));
    lengths.push(if k == 1 { centre } else { hi });
    lengths
}

/// The lognormal's value in stratum `i` of `n`.
fn lognormal(i: usize, n: usize, inside: f64) -> f64 {
    let q = (i as f64 + inside.clamp(0.0, 1.0)) / n as f64;
    (SHORT_SIGMA * normal_quantile(q.clamp(1e-6, 1.0 - 1e-6))).exp()
}

/// The standard normal's quantile, by bisection of its distribution function.
fn normal_quantile(q: f64) -> f64 {
    let (mut low, mut high) = (-6.0_f64, 6.0_f64);
    for _ in 0..40 {
        let middle = f64::midpoint(low, high);
        if normal_cdf(middle) < q {
            low = middle;
        } else {
            high = middle;
        }
    }
    f64::midpoint(low, high)
}

/// Its distribution function, within 1e-7 (Abramowitz and Stegun 26.2.17).
fn normal_cdf(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * x.abs());
    let series = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let poly = series.iter().rev().fold(0.0, |sum, c| (sum + c) * t);
    let tail = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt() * poly;
    if x > 0.0 { 1.0 - tail } else { tail }
}

/// Sets the extremes to those of the range.
fn pin(lengths: &mut [f64], moments: &Moments) {
    let by = |a: &&mut f64, b: &&mut f64| a.total_cmp(b);
    if let Some(longest) = lengths.iter_mut().max_by(by) {
        *longest = f64::from(moments.max);
    }
    if let Some(shortest) = lengths.iter_mut().min_by(by) {
        *shortest = f64::from(moments.min);
    }
}

fn shuffle(lengths: &mut [f64], rng: &mut Rng) {
    for i in (1..lengths.len()).rev() {
        lengths.swap(i, rng.index(i + 1));
    }
}

fn deviation(lengths: &[f64]) -> f64 {
    let mean = lengths.iter().sum::<f64>() / lengths.len() as f64;
    (lengths.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / lengths.len() as f64).sqrt()
}
