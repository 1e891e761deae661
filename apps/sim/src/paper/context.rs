//! Context lengths: throughput of the largest batch of one length, and the longest context served (v2 Figure 9, v1
//! Figure 7).

use super::cluster::{Cluster, SETUPS, Setup};
use super::measure::{Job, Measured, System, run_all};
use super::run::Setting;
use super::traces::Request;
use lagoon_types::limits::SEQUENCE_TOKENS_MAX;
use std::fmt::Write as _;

const OUTPUT: u32 = 64;

/// One bar of the figure.
#[derive(Clone, Debug)]
pub struct Bar {
    pub setup: Setup,
    pub system: System,
    pub context_tokens: u32,
    pub requests: usize,
    pub measured: Measured,
}

/// Longest context that each system serves in a setup, and all bars.
#[derive(Clone, Debug)]
pub struct Contexts {
    pub setup: Setup,
    pub multi_tokens: u32,
    pub lagoon_tokens: u32,
    pub single_tokens: u32,
}

impl Contexts {
    /// Lagoon's longest context over one instance's.
    #[must_use]
    pub fn gain(&self) -> f64 {
        f64::from(self.lagoon_tokens) / f64::from(self.multi_tokens)
    }
}

fn tokens(setting: &Setting) -> u32 {
    let all = setting.holds_tokens().min(u64::from(SEQUENCE_TOKENS_MAX));
    u32::try_from(all).unwrap_or(u32::MAX) - 1
}

/// Block size for a setup: large pools hold long contexts, and large blocks are cheaper to simulate.
#[must_use]
pub fn block_tokens(setup: &Setup) -> u32 {
    if setup.gpus > 8 { 512 } else { 256 }
}

/// The longest contexts of a setup.
#[must_use]
pub fn contexts(setup: Setup) -> Contexts {
    let of = |system: System| tokens(&system.setting(&setup, block_tokens(&setup)));
    Contexts {
        setup,
        multi_tokens: of(System::Multi),
        lagoon_tokens: of(System::Lagoon),
        single_tokens: of(System::Single),
    }
}

/// 1k, slightly more than one instance holds, and the longest that the pool holds (v2 §7.2).
fn lengths(contexts: &Contexts) -> [u32; 3] {
    [1_000, contexts.multi_tokens + contexts.multi_tokens / 20, contexts.lagoon_tokens]
}

/// As many requests of a length as a cluster holds at once, at most `most`.
fn batch(cluster: &Cluster, length: u32, most: usize) -> usize {
    let all = cluster.timing().kv_tokens() * cluster.instances() as u64;
    usize::try_from(all / u64::from(length)).unwrap_or(usize::MAX).clamp(1, most)
}

/// Measures all bars; `most` bounds the requests of one.
#[must_use]
pub fn bars(most: usize, done: &(dyn Fn(usize, usize) + Sync)) -> Vec<Bar> {
    let mut bars = Vec::new();
    let mut jobs = Vec::new();
    for setup in SETUPS {
        for length in lengths(&contexts(setup)) {
            for system in [System::Lagoon, System::Multi, System::Single] {
                let setting = system.setting(&setup, block_tokens(&setup));
                let requests = batch(&setup.multi(), length, most);
                let request = Request { arrival_us: 0, prompt_tokens: length - OUTPUT, output_tokens: OUTPUT };
                jobs.push(Job { setting, requests: vec![request; requests] });
                let measured = Measured::default();
                bars.push(Bar { setup, system, context_tokens: length, requests, measured });
            }
        }
    }
    let measured = run_all(&jobs, &|at| done(at, jobs.len()));
    for (bar, measured) in bars.iter_mut().zip(measured) {
        bar.measured = measured;
    }
    bars
}

/// All bars as CSV.
#[must_use]
pub fn to_csv(bars: &[Bar]) -> String {
    let mut text = String::from("setup,system,context_tokens,requests,finished,tokens_per_s,mean_batch\n");
    for Bar { setup, system, context_tokens, requests, measured } in bars {
        let _ = writeln!(
            text,
            "\"{}\",\"{}\",{context_tokens},{requests},{},{:.2},{:.1}",
            setup.multi().name(),
            system.name(),
            measured.finished,
            if measured.finished > 0 { measured.tokens_per_s } else { 0.0 },
            measured.batch
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paper::measure::run_one;

    #[test]
    fn the_pool_serves_contexts_that_no_instance_holds() {
        let gains: Vec<f64> = SETUPS.iter().map(|s| contexts(*s).gain()).collect();
        // v2 §7.2: 2x to 19x.
        assert!(gains.iter().all(|g| (1.9..19.5).contains(g)), "{gains:?}");
        let longest = contexts(SETUPS[3]);
        let run = |system: System, length: u32| {
            let request = Request { arrival_us: 0, prompt_tokens: length - 4, output_tokens: 4 };
            run_one(&Job { setting: system.setting(&SETUPS[3], 256), requests: vec![request] })
        };
        let served = run(System::Lagoon, longest.lagoon_tokens);
        assert_eq!((served.finished, served.recoveries, served.preemptions), (1, 0, 0));
        assert_eq!(run(System::Multi, longest.lagoon_tokens).failed, 1);
        assert_eq!(run(System::Multi, longest.multi_tokens - 256).finished, 1);
    }
}
