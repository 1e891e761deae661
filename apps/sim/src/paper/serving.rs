//! End-to-end serving: throughput and latency over request rates (v2 Figure 10, v1 Figure 8).
//!
//! First every system is flooded with requests, which gives its maximum throughput. Then all systems get the same
//! requests at the same rates, shares of the best system's maximum, which gives the curves.

use super::measure::{Job, Measured, System, run_all};
use super::run::Setting;
use super::traces::{Output, Workload};
use lagoon_plot::{Panel, Series};
use std::fmt::Write as _;

/// The systems and trace of one panel.
#[derive(Clone, Debug)]
pub struct Comparison {
    pub figure: &'static str,
    /// Title, as `trace-3, LLaMA2-7B, 2xtp1`.
    pub name: String,
    pub workload: Workload,
    pub systems: Vec<(System, Setting)>,
    pub requests: usize,
    pub output: Output,
    /// A rate that no system can serve, in requests per second.
    pub flood: f64,
}

/// One point of a curve.
#[derive(Clone, Debug)]
pub struct Point {
    /// Offered requests per second; infinite for the flood.
    pub rate: f64,
    pub measured: Measured,
}

/// A panel's results, by system, the flood first.
#[derive(Clone, Debug)]
pub struct Compared {
    pub comparison: Comparison,
    pub curves: Vec<(System, Vec<Point>)>,
}

impl Compared {
    /// Maximum throughput of a system at any offered rate, in generated tokens per second.
    #[must_use]
    pub fn max_tokens_per_s(&self, system: System) -> Option<f64> {
        self.best(system).map(|m| m.tokens_per_s)
    }

    /// The run with a system's maximum throughput.
    #[must_use]
    pub fn best(&self, system: System) -> Option<&Measured> {
        let curve = self.curves.iter().find(|(s, _)| *s == system)?;
        let runs = curve.1.iter().map(|p| &p.measured);
        runs.max_by(|a, b| a.tokens_per_s.total_cmp(&b.tokens_per_s))
    }

    /// Lagoon's maximum throughput over a system's.
    #[must_use]
    pub fn ratio(&self, system: System) -> Option<f64> {
        Some(self.max_tokens_per_s(System::Lagoon)? / self.max_tokens_per_s(system)?)
    }
}

/// Shares of the best system's maximum at which curves are measured.
pub const SHARES: [f64; 5] = [0.3, 0.6, 0.8, 0.95, 1.2];

/// Measures all comparisons; `shares` may be empty.
#[must_use]
pub fn compare(
    comparisons: &[Comparison],
    shares: &[f64],
    seed: u64,
    done: &(dyn Fn(usize, usize) + Sync),
) -> Vec<Compared> {
    let job = |c: &Comparison, setting: &Setting, rate: f64| Job {
        setting: *setting,
        requests: c.workload.requests(c.requests, c.output, rate, seed),
    };
    let floods: Vec<Job> = comparisons.iter().flat_map(|c| c.systems.iter().map(|(_, s)| job(c, s, c.flood))).collect();
    let measured = run_all(&floods, &|at| done(at, floods.len()));
    let mut measured = measured.into_iter();
    let mut all: Vec<Compared> = comparisons
        .iter()
        .map(|c| Compared {
            comparison: c.clone(),
            curves: c
                .systems
                .iter()
                .zip(&mut measured)
                .map(|((system, _), measured)| (*system, vec![Point { rate: f64::INFINITY, measured }]))
                .collect(),
        })
        .collect();
    let mut jobs = Vec::new();
    let mut rates = Vec::new();
    for compared in &all {
        let best = compared.curves.iter().filter_map(|(s, _)| compared.max_tokens_per_s(*s)).fold(0.0, f64::max);
        let requests = {
            let c = &compared.comparison;
            c.workload.requests(c.requests, c.output, 1.0, seed)
        };
        let tokens: f64 = requests.iter().map(|r| f64::from(r.output_tokens)).sum();
        let per_request = tokens / requests.len() as f64;
        for (_, setting) in &compared.comparison.systems {
            for share in shares {
                let rate = share * best / per_request;
                rates.push(rate);
                jobs.push(job(&compared.comparison, setting, rate));
            }
        }
    }
    let measured = run_all(&jobs, &|at| done(at, jobs.len()));
    let mut points = rates.into_iter().zip(measured).map(|(rate, measured)| Point { rate, measured });
    for compared in &mut all {
        for (_, curve) in &mut compared.curves {
            curve.extend(points.by_ref().take(shares.len()));
        }
    }
    all
}

/// A curve's panel: throughput against normalized latency, as in the papers.
#[must_use]
pub fn panel(compared: &Compared) -> Panel {
    let series = |(system, points): &(System, Vec<Point>)| {
        let point = |p: &Point| (p.measured.tokens_per_s, p.measured.latency_s_per_token);
        let finite = points.iter().filter(|p| p.rate.is_finite() && p.measured.finished > 0);
        Series { name: system.name().to_owned(), points: finite.map(point).collect() }
    };
    Panel {
        title: compared.comparison.name.clone(),
        x_label: "throughput, tokens/s".to_owned(),
        y_label: "latency, s per token".to_owned(),
        log_x: false,
        log_y: true,
        series: compared.curves.iter().map(series).collect(),
    }
}

/// Every point as CSV.
#[must_use]
pub fn to_csv(all: &[Compared]) -> String {
    let mut text = String::from(
        "figure,workload,system,offered_requests_per_s,tokens_per_s,latency_s_per_token,first_token_s,finished,failed,\
         cut,preemptions,recoveries,moved_blocks,device_busy,device_for_peers,device_awaits_peers,steps_local,sequences_per_local_step,steps_remote,sequences_per_remote_step,memory_used,mean_batch,borrowed_blocks_max,ethernet_gb,events,simulated_s\n",
    );
    for compared in all {
        for (system, points) in &compared.curves {
            for Point { rate, measured: m } in points {
                let _ = writeln!(
                    text,
                    "{},\"{}\",\"{}\",{},{:.2},{:.5},{:.3},{},{},{},{},{},{},{:.3},{:.3},{:.3},{},{:.1},{},{:.1},{:.3},{:.1},{},{:.2},{},{:.1}",
                    compared.comparison.figure,
                    compared.comparison.name,
                    system.name(),
                    if rate.is_finite() { format!("{rate:.4}") } else { "flood".to_owned() },
                    m.tokens_per_s,
                    m.latency_s_per_token,
                    m.first_token_s,
                    m.finished,
                    m.failed,
                    m.cut,
                    m.preemptions,
                    m.recoveries,
                    m.moved_blocks,
                    m.busy,
                    m.remote_request,
                    m.awaits,
                    m.steps[0],
                    m.rows_per_step[0],
                    m.steps[1],
                    m.rows_per_step[1],
                    m.memory_used,
                    m.batch,
                    m.borrowed_max,
                    m.ethernet_bytes / 1e9,
                    m.events,
                    m.simulated_s
                );
            }
        }
    }
    text
}
