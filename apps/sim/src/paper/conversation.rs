//! Traces of conversations in the form that Mooncake's authors published (FAST 2025, `conversation_trace.jsonl`): one JSON
//! object a line, `timestamp` (ms), `input_length` and `output_length` (tokens) and `hash_ids`, one for each 512 tokens of
//! the prompt, equal for equal prefixes.
//!
//! [`synthetic`] draws a trace with that one's statistics from a seed, so that nothing here needs the file.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "lengths and times are small, not negative"
)]

use super::traces::Request;
use anyhow::{Context, ensure};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::Path;

/// Most requests that are read from a file.
const ENTRIES_MAX: usize = 1_000_000;
/// Longest prompt or answer that is read, in tokens.
const LENGTH_MAX: u32 = 1 << 24;
/// Tokens of a prompt behind one of its `hash_ids`.
pub const HASHED_TOKENS: u32 = 512;
/// Time between two timestamps of the published trace.
const TICK_MS: u64 = 3_000;
/// Requests per second of the published trace.
const RATE: f64 = 3.4;
/// Share of requests that continue an earlier one, drawn so that [`Statistics::reused`] is the published trace's, how many
/// earlier ones are looked at, and how far back.
const CONTINUES: f64 = 0.45;
const LOOKED_AT: usize = 16;
const LOOKED_BACK: usize = 2_000;

/// Quantiles of the published trace: share of the requests, and tokens.
const INPUTS: [(f64, f64); 19] = [
    (0.0, 891.0),
    (0.01, 894.0),
    (0.05, 901.0),
    (0.1, 964.0),
    (0.15, 1_261.0),
    (0.25, 2_306.0),
    (0.35, 4_250.0),
    (0.5, 6_909.0),
    (0.65, 11_239.0),
    (0.75, 15_368.0),
    (0.85, 21_467.0),
    (0.9, 27_367.0),
    (0.95, 39_552.0),
    (0.97, 52_219.0),
    (0.98, 66_484.0),
    (0.99, 85_401.0),
    (0.995, 100_886.0),
    (0.999, 121_301.0),
    (1.0, 126_195.0),
];
const OUTPUTS: [(f64, f64); 19] = [
    (0.0, 1.0),
    (0.01, 3.0),
    (0.05, 10.0),
    (0.1, 24.0),
    (0.15, 46.0),
    (0.25, 156.0),
    (0.35, 256.0),
    (0.5, 350.0),
    (0.65, 423.0),
    (0.75, 472.0),
    (0.85, 543.0),
    (0.9, 597.0),
    (0.95, 698.0),
    (0.97, 802.0),
    (0.98, 893.0),
    (0.99, 1_120.0),
    (0.995, 1_570.0),
    (0.999, 2_000.0),
    (1.0, 2_000.0),
];

/// One request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// In milliseconds.
    pub timestamp: u64,
    pub input_length: u32,
    pub output_length: u32,
    #[serde(default)]
    pub hash_ids: Vec<u64>,
}

/// Reads a trace.
///
/// # Errors
/// If the file cannot be read, or a line is not of the form; with its number.
pub fn read(path: &Path) -> anyhow::Result<Vec<Entry>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read the trace {}", path.display()))?;
    parse(&text).with_context(|| format!("parse the trace {}", path.display()))
}

fn parse(text: &str) -> anyhow::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let entry: Entry = serde_json::from_str(line).with_context(|| format!("line {}", at + 1))?;
        let lengths = [entry.input_length, entry.output_length];
        let fit = lengths.iter().all(|length| (1..=LENGTH_MAX).contains(length));
        ensure!(fit, "line {}: lengths {lengths:?} are not in 1..={LENGTH_MAX}", at + 1);
        ensure!(entries.len() < ENTRIES_MAX, "it has more than {ENTRIES_MAX} requests");
        entries.push(entry);
    }
    ensure!(!entries.is_empty(), "it has no requests");
    entries.sort_by_key(|entry| entry.timestamp);
    Ok(entries)
}

/// A trace as a file's text.
#[must_use]
pub fn to_jsonl(entries: &[Entry]) -> String {
    let line = |entry| serde_json::to_string(entry).unwrap_or_default() + "\n";
    entries.iter().map(line).collect()
}

/// The value at share `u` of a distribution given by quantiles; between them, interpolated.
fn quantile(of: &[(f64, f64)], u: f64) -> f64 {
    let at = of.partition_point(|(share, _)| *share <= u).clamp(1, of.len() - 1);
    let ((low, a), (high, b)) = (of[at - 1], of[at]);
    let part = ((u - low) / (high - low)).clamp(0.0, 1.0);
    a + (b - a) * part
}

/// A trace of `requests` requests with the published trace's statistics (see [`Statistics`]). Lengths are drawn by strata;
/// lengths and arrivals are independent; requests arrive in ticks of three seconds, as there. Equal seeds give equal traces.
#[must_use]
pub fn synthetic(requests: usize, seed: u64) -> Vec<Entry> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut entries: Vec<Entry> = Vec::with_capacity(requests);
    let (mut at_s, mut next_id) = (0.0, 1);
    let [inputs, outputs] = [(); 2].map(|()| strata(requests, &mut random));
    for (input, output) in inputs.into_iter().zip(outputs) {
        at_s += -(1.0 - random.random::<f64>()).ln() / RATE;
        let input_length = quantile(&INPUTS, input) as u32;
        let output_length = quantile(&OUTPUTS, output) as u32;
        let blocks = input_length.div_ceil(HASHED_TOKENS) as usize;
        let mut hash_ids =
            if random.random_bool(CONTINUES) { longest(&entries, blocks, &mut random) } else { Vec::new() };
        if hash_ids.is_empty() {
            // Every prompt begins with the same instructions.
            hash_ids.push(0);
        }
        hash_ids.extend((next_id..).take(blocks - hash_ids.len()));
        next_id = next_id.max(hash_ids.last().map_or(0, |last| last + 1));
        let timestamp = (at_s * 1e3) as u64 / TICK_MS * TICK_MS;
        entries.push(Entry { timestamp, input_length, output_length, hash_ids });
    }
    entries
}

/// One random share in each of `n` equally wide parts of 0 to 1, in random order.
fn strata(n: usize, random: &mut ChaCha8Rng) -> Vec<f64> {
    let mut shares: Vec<f64> = (0..n).map(|at| (at as f64 + random.random::<f64>()) / n as f64).collect();
    shares.shuffle(random);
    shares
}

/// The longest of some earlier prompts that is at most `blocks` long.
fn longest(entries: &[Entry], blocks: usize, random: &mut ChaCha8Rng) -> Vec<u64> {
    let recent = &entries[entries.len().saturating_sub(LOOKED_BACK)..];
    if recent.is_empty() {
        return Vec::new();
    }
    let drawn = (0..LOOKED_AT).map(|_| &recent[random.random_range(0..recent.len())].hash_ids);
    drawn.filter(|ids| ids.len() <= blocks).max_by_key(|ids| ids.len()).cloned().unwrap_or_default()
}

/// What a synthetic trace has in common with the published one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Statistics {
    pub requests: usize,
    pub requests_per_s: f64,
    /// Tokens: mean, median, 90th and 99th percentile, maximum.
    pub input: [f64; 5],
    pub output: [f64; 5],
    /// Variance over mean of the requests of a tick: 1 for a Poisson process.
    pub dispersion: f64,
    /// Share of the prompts' blocks of 512 tokens that begin as an earlier prompt did.
    pub reused: f64,
}

impl Statistics {
    /// The published trace's.
    pub const PUBLISHED: Self = Self {
        requests: 12_031,
        requests_per_s: 3.4,
        input: [12_035.0, 6_909.0, 27_367.0, 85_401.0, 126_195.0],
        output: [343.0, 350.0, 597.0, 1_120.0, 2_000.0],
        dispersion: 1.10,
        reused: 0.366,
    };

    /// Statistics of a trace.
    #[must_use]
    pub fn of(entries: &[Entry]) -> Self {
        let seconds = entries.last().map_or(0, |e| e.timestamp + TICK_MS) as f64 / 1e3;
        let mut seen: BTreeSet<u64> = BTreeSet::new();
        let (mut reused, mut blocks) = (0, 0);
        for entry in entries {
            reused += entry.hash_ids.iter().take_while(|id| seen.contains(id)).count();
            blocks += entry.hash_ids.len();
            seen.extend(&entry.hash_ids);
        }
        let tick = |timestamp: u64| ((timestamp + TICK_MS / 2) / TICK_MS) as usize;
        let mut ticks = vec![0.0; tick(entries.last().map_or(0, |e| e.timestamp)) + 1];
        // Published times are within a few milliseconds of a tick. The last one may not be whole.
        entries.iter().for_each(|e| ticks[tick(e.timestamp)] += 1.0);
        ticks.truncate(tick(entries.last().map_or(0, |e| e.timestamp)));
        let mean = ticks.iter().sum::<f64>() / ticks.len().max(1) as f64;
        let variance = ticks.iter().map(|n| (n - mean).powi(2)).sum::<f64>() / ticks.len().max(1) as f64;
        Self {
            requests: entries.len(),
            requests_per_s: entries.len() as f64 / seconds.max(f64::MIN_POSITIVE),
            input: summary(entries.iter().map(|e| e.input_length)),
            output: summary(entries.iter().map(|e| e.output_length)),
            dispersion: variance / mean.max(f64::MIN_POSITIVE),
            reused: f64::from(reused as u32) / (blocks as f64).max(1.0),
        }
    }
}

fn summary(lengths: impl Iterator<Item = u32>) -> [f64; 5] {
    let mut sorted: Vec<f64> = lengths.map(f64::from).collect();
    sorted.sort_by(f64::total_cmp);
    let at = |share: f64| sorted.get((share * sorted.len() as f64) as usize).or(sorted.last()).copied().unwrap_or(0.0);
    [sorted.iter().sum::<f64>() / sorted.len().max(1) as f64, at(0.5), at(0.9), at(0.99), at(1.0)]
}

/// Scales of a replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Prompts' tokens are divided by this.
    pub prompts: f64,
    /// Answers' tokens are divided by this.
    pub outputs: f64,
    /// Requests per second on average.
    pub rate: f64,
}

/// The requests of a trace. Requests of one timestamp are spread evenly up to the next timestamp (published times are
/// multiples of three seconds), and all times are stretched to the rate. Prefixes are not kept: every prompt is its own.
#[must_use]
pub fn requests(entries: &[Entry], scale: Scale) -> Vec<Request> {
    let begin = entries.first().map_or(0, |e| e.timestamp);
    let mut at_ms: Vec<f64> = Vec::with_capacity(entries.len());
    for tick in entries.chunk_by(|a, b| a.timestamp == b.timestamp) {
        let start = (tick[0].timestamp - begin) as f64;
        let next = entries.get(at_ms.len() + tick.len()).map_or(tick[0].timestamp + TICK_MS, |e| e.timestamp);
        let width = (next - begin) as f64 - start;
        at_ms.extend((0..tick.len()).map(|at| start + width * at as f64 / tick.len() as f64));
    }
    let span_s = at_ms.last().map_or(0.0, |last| last / 1e3);
    let stretch = if span_s > 0.0 { entries.len() as f64 / scale.rate / span_s } else { 1.0 };
    let divided = |tokens: u32, by: f64| (f64::from(tokens) / by).round().max(1.0) as u32;
    let request = |(entry, at): (&Entry, f64)| Request {
        arrival_us: (at * 1e3 * stretch) as u64,
        prompt_tokens: divided(entry.input_length, scale.prompts),
        output_tokens: divided(entry.output_length, scale.outputs),
    };
    entries.iter().zip(at_ms).map(request).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_synthetic_trace_has_the_published_statistics() {
        let of = |seed| Statistics::of(&synthetic(12_031, seed));
        let published = Statistics::PUBLISHED;
        for seed in [1, 2] {
            let drawn = of(seed);
            let near = |a: f64, b: f64, within: f64| assert!((a / b - 1.0).abs() < within, "{a}, not {b}: {drawn:?}");
            near(drawn.requests_per_s, published.requests_per_s, 0.03);
            for (at, within) in [0.02, 0.02, 0.02, 0.04, 0.01].into_iter().enumerate() {
                near(drawn.input[at], published.input[at], within);
                near(drawn.output[at], published.output[at], within);
            }
            near(drawn.dispersion, published.dispersion, 0.2);
            near(drawn.reused, published.reused, 0.06);
        }
        assert_eq!(synthetic(500, 3), synthetic(500, 3), "a seed repeats a trace");
        assert_ne!(synthetic(500, 3), synthetic(500, 4));
    }

    #[test]
    fn a_trace_survives_its_file_and_bad_lines_are_named() {
        let entries = synthetic(50, 1);
        assert_eq!(parse(&to_jsonl(&entries)).unwrap(), entries);
        let error = |text: &str| format!("{:#}", parse(text).unwrap_err());
        assert!(error("").contains("no requests"));
        assert!(error("{\"timestamp\": 0, \"input_length\": 5}").contains("line 1"));
        let none = "\n{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 0, \"hash_ids\": []}";
        assert!(error(none).contains("line 2"), "{}", error(none));
    }

    #[test]
    fn a_replay_has_the_rate_and_spreads_what_came_at_once() {
        let entry = |timestamp, input_length| Entry { timestamp, input_length, output_length: 100, hash_ids: vec![] };
        let entries = [entry(6000, 545), entry(6000, 1090), entry(9000, 10), entry(12_000, 5450)];
        let scale = Scale { prompts: 54.5, outputs: 10.0, rate: 4.0 };
        let replayed = requests(&entries, scale);
        let at: Vec<u64> = replayed.iter().map(|r| r.arrival_us).collect();
        assert_eq!(at, [0, 250_000, 500_000, 1_000_000]);
        assert_eq!(replayed.iter().map(|r| r.prompt_tokens).collect::<Vec<_>>(), [10, 20, 1, 100]);
        assert!(replayed.iter().all(|r| r.output_tokens == 10));
        let long = requests(&synthetic(3_000, 5), Scale { rate: 2.0, ..scale });
        assert!((long.last().unwrap().arrival_us as f64 / 1e6 / 1_500.0 - 1.0).abs() < 0.01);
    }
}
