//! Traces for serving with and without disaggregation, after KVDirect §5.1: Poisson arrivals and lengths drawn from a
//! seed around the averages of the paper's data sets, scaled to the model.
//!
//! The paper gives averages only. Assumed here: lengths are log-normal with sigma 0.5; a ShareGPT conversation has
//! one to eight turns, each of which sends all earlier turns again, and its user replies after an exponential time.

use anyhow::{Result, bail};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::fmt::Write as _;

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    pub arrival_s: f64,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
}

/// How requests arrive and how long they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Summaries of papers: prompts of 40,642 tokens on average, answers of 241.
    Arxiv,
    /// Conversations: prompts, with all earlier turns, of 20,471 tokens on average, answers of 2,328.
    ShareGpt,
}

impl std::str::FromStr for Kind {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "arxiv" => Ok(Self::Arxiv),
            "sharegpt" => Ok(Self::ShareGpt),
            other => bail!("{other} is no kind of trace\nhint: arxiv, sharegpt"),
        }
    }
}

/// Parameters of a trace.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    pub kind: Kind,
    pub requests: usize,
    /// Requests per second on average.
    pub rate: f64,
    /// Factor on lengths.
    pub scale: f64,
    /// Longest prompt plus answer, in tokens; longer ones are cut.
    pub tokens_max: u32,
    /// Mean time between an answer's request and the next one of its conversation, in seconds.
    pub think_s: f64,
    pub seed: u64,
}

const TURNS_MAX: u32 = 8;
const SIGMA: f64 = 0.5;
const ARXIV: (f64, f64) = (40_642.0, 241.0);
const SHAREGPT: (f64, f64) = (20_471.0, 2_328.0);

/// Mean number of earlier turns of a request: conversations have 1 to `TURNS_MAX` turns, uniformly.
fn turns_before() -> f64 {
    let requests: u32 = (1..=TURNS_MAX).sum();
    let before: u32 = (1..=TURNS_MAX).map(|turns| turns * (turns - 1) / 2).sum();
    f64::from(before) / f64::from(requests)
}

fn exponential(random: &mut ChaCha8Rng, mean: f64) -> f64 {
    -(1.0 - random.random::<f64>()).ln() * mean
}

fn log_normal(random: &mut ChaCha8Rng, mean: f64) -> f64 {
    let angle = std::f64::consts::TAU * random.random::<f64>();
    let normal = (-2.0 * (1.0 - random.random::<f64>()).ln()).sqrt() * angle.cos();
    mean * (SIGMA * normal - SIGMA * SIGMA / 2.0).exp()
}

/// Draws a trace, in the order of arrival. Equal specs give equal traces.
#[must_use]
pub fn draw(spec: &Spec) -> Vec<Request> {
    let mut random = ChaCha8Rng::seed_from_u64(spec.seed);
    let mut out = Vec::new();
    let mut at = 0.0;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "lengths are small positive numbers")]
    let tokens = |length: f64| (length * spec.scale).round().clamp(1.0, f64::from(spec.tokens_max)) as u32;
    let one = |arrival_s, prompt: f64, output: f64| {
        let output_tokens = tokens(output).min(spec.tokens_max / 2).max(1);
        let prompt_tokens = tokens(prompt).min(spec.tokens_max - output_tokens).max(1);
        Request { arrival_s, prompt_tokens, output_tokens }
    };
    // Enough conversations that no dropped one could arrive before the last request kept.
    let enough = spec.requests + spec.requests / 2 + TURNS_MAX as usize;
    while out.len() < enough {
        match spec.kind {
            Kind::Arxiv => {
                let (prompt, output) = (log_normal(&mut random, ARXIV.0), log_normal(&mut random, ARXIV.1));
                out.push(one(at, prompt, output));
                at += exponential(&mut random, 1.0 / spec.rate);
            }
            Kind::ShareGpt => {
                let before = turns_before();
                let message = (SHAREGPT.0 - before * SHAREGPT.1) / (before + 1.0);
                let (mut reply, mut turn_at) = (0.0, at);
                for _ in 0..random.random_range(1..=TURNS_MAX) {
                    reply += log_normal(&mut random, message);
                    let output = log_normal(&mut random, SHAREGPT.1);
                    out.push(one(turn_at, reply, output));
                    reply += output;
                    turn_at += exponential(&mut random, spec.think_s);
                }
                at += exponential(&mut random, f64::from(TURNS_MAX + 1) / 2.0 / spec.rate);
            }
        }
    }
    out.sort_by(|a, b| a.arrival_s.total_cmp(&b.arrival_s));
    out.truncate(spec.requests);
    out
}

/// The trace as CSV, as `lagoon bench --trace` reads it.
#[must_use]
pub fn csv(trace: &[Request]) -> String {
    let mut text = "arrival_s,prompt_tokens,output_tokens\n".to_owned();
    for Request { arrival_s, prompt_tokens, output_tokens } in trace {
        let _ = writeln!(text, "{arrival_s:.4},{prompt_tokens},{output_tokens}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(kind: Kind) -> Spec {
        Spec { kind, requests: 20_000, rate: 2.0, scale: 0.1, tokens_max: 100_000, think_s: 5.0, seed: 1 }
    }

    #[test]
    fn averages_are_the_papers() {
        for (kind, (prompt, output)) in [(Kind::Arxiv, ARXIV), (Kind::ShareGpt, SHAREGPT)] {
            let trace = draw(&spec(kind));
            let mean = |of: fn(&Request) -> u32| {
                trace.iter().map(|r| f64::from(of(r))).sum::<f64>() / trace.len() as f64 / 0.1
            };
            let got = (mean(|r| r.prompt_tokens), mean(|r| r.output_tokens));
            assert!((got.0 / prompt - 1.0).abs() < 0.04 && (got.1 / output - 1.0).abs() < 0.04, "{kind:?}: {got:?}");
            let last = trace.last().unwrap().arrival_s;
            let rate = trace.len() as f64 / last;
            assert!((rate / 2.0 - 1.0).abs() < 0.05, "{kind:?}: {rate} requests a second");
            assert!(trace.windows(2).all(|w| w[0].arrival_s <= w[1].arrival_s));
        }
    }

    #[test]
    fn a_seed_is_a_trace_and_lengths_have_a_limit() {
        let small = Spec { tokens_max: 700, scale: 1.0, requests: 300, ..spec(Kind::ShareGpt) };
        let trace = draw(&small);
        assert_eq!(trace, draw(&small));
        assert_ne!(trace, draw(&Spec { seed: 2, ..small }));
        assert_eq!(trace.len(), 300);
        assert!(trace.iter().all(|r| r.prompt_tokens >= 1 && r.prompt_tokens + r.output_tokens <= 700));
        assert!(csv(&trace).lines().count() == 301);
    }
}
