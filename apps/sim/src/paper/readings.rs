//! v2 Figure 10 (a) under both readings of dispatch: goodput, and throughput under more requests than any system can
//! serve in time, of Lagoon and vLLM-multi over several seeds.
//!
//! v2 §7.1: requests go to the instance with the most free memory, for both systems. Read literally, that is blind to
//! queues; a request that arrives when all are full goes to whichever has a few blocks more. The other reading predicts
//! outstanding work.

use super::device::Prefill;
use super::dispatch::work_us;
use super::goodput::{Found, Search, search};
use super::measure::{Job, Measured, System, run_all};
use super::serving::Comparison;
use super::traces::Request;

/// Offered rate of [`Readings::loaded`] over the highest goodput of the compared systems.
const LOADED: f64 = 1.25;

/// Results of one panel.
#[derive(Clone, Debug)]
pub struct Readings {
    pub name: String,
    /// Goodput by system and seed.
    pub found: Vec<(System, Vec<Found>)>,
    /// Runs of all requests at [`LOADED`] times the seed's highest goodput, by system and seed.
    pub loaded: Vec<(System, Vec<Measured>)>,
}

/// Means of what `of` gives for a system's seeds over those of another one's.
fn ratios<T>(all: &[(System, Vec<T>)], over: System, under: System, of: impl Fn(&T) -> f64) -> Vec<f64> {
    let series = |system| all.iter().find(|(s, _)| *s == system).map_or(&[][..], |(_, found)| &found[..]);
    series(over).iter().zip(series(under)).map(|(a, b)| of(a) / of(b)).collect()
}

impl Readings {
    /// A system's goodput over another's, by seed.
    #[must_use]
    pub fn goodput_ratios(&self, over: System, under: System) -> Vec<f64> {
        ratios(&self.found, over, under, |found| found.rate)
    }

    /// A system's tokens per second over the whole of a loaded run over another's, by seed.
    #[must_use]
    pub fn throughput_ratios(&self, over: System, under: System) -> Vec<f64> {
        ratios(&self.loaded, over, under, |measured| measured.tokens_per_s)
    }
}

/// One search: of a panel's system with a seed.
struct One<'a> {
    panel: &'a Comparison,
    system: usize,
    seed: u64,
}

fn requests(one: &One<'_>, rate: f64) -> Vec<Request> {
    one.panel.workload.requests(one.panel.requests, one.panel.output, rate, one.seed)
}

/// Measures panels with each seed.
#[must_use]
pub fn readings(panels: &[Comparison], seeds: &[u64], done: &(dyn Fn(usize, usize) + Sync)) -> Vec<Readings> {
    let ones: Vec<One<'_>> = panels
        .iter()
        .flat_map(|panel| (0..panel.systems.len()).map(move |system| (panel, system)))
        .flat_map(|(panel, system)| seeds.iter().map(move |seed| One { panel, system, seed: *seed }))
        .collect();
    let at: Vec<_> = ones.iter().map(|one| |rate: f64| requests(one, rate)).collect();
    let start = |one: &One<'_>| {
        let setting = &one.panel.systems[one.system].1;
        let work =
            |r: &Request| work_us(&setting.timing, setting.kv_tokens, r, 0, setting.prefill == Prefill::Computed);
        let all = requests(one, 1.0);
        // What all instances could serve if they were always busy.
        setting.cluster.instances() as f64 * 1e6 * all.len() as f64 / all.iter().map(work).sum::<f64>()
    };
    let searches: Vec<Search<'_>> = ones
        .iter()
        .zip(&at)
        .map(|(one, requests)| Search { setting: one.panel.systems[one.system].1, requests, start: start(one) })
        .collect();
    let found = search(&searches, &|at| done(at, 2 * ones.len()));
    let by_system = found.chunks(seeds.len()).map(<[Found]>::to_vec);
    let mut by_system = by_system.collect::<Vec<_>>().into_iter();
    let mut all: Vec<Readings> = panels
        .iter()
        .map(|panel| Readings {
            name: panel.name.clone(),
            found: panel.systems.iter().map(|(system, _)| *system).zip(by_system.by_ref()).collect(),
            loaded: Vec::new(),
        })
        .collect();
    let highest = |panel: usize, seed: usize| all[panel].found.iter().map(|(_, f)| f[seed].rate).fold(0.0, f64::max);
    let per_panel = |panel: usize| panels[panel].systems.len() * seeds.len();
    let mut jobs = Vec::new();
    let mut before = 0;
    for panel in 0..panels.len() {
        for at in 0..per_panel(panel) {
            let one = &ones[before + at];
            let rate = LOADED * highest(panel, at % seeds.len());
            jobs.push(Job { setting: one.panel.systems[one.system].1, requests: requests(one, rate) });
        }
        before += per_panel(panel);
    }
    let measured = run_all(&jobs, &|at| done(ones.len() + at, 2 * ones.len()));
    let mut measured = measured.chunks(seeds.len()).map(<[Measured]>::to_vec);
    for (readings, panel) in all.iter_mut().zip(panels) {
        readings.loaded = panel.systems.iter().map(|(system, _)| *system).zip(measured.by_ref()).collect();
    }
    all
}
