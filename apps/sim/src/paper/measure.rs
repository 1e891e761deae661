//! Runs of systems over traces, several in parallel, and their results.
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "steps are small and not negative")]

use super::cluster::{Cluster, Setup};
use super::dispatch::Dispatch;
use super::goodput::Slo;
use super::run::{Run, Seen, Setting, Study, WARM_UP_US};
use super::traces::Request;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A system to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// The shipped instances as a pool, dispatched by predicted work.
    Lagoon,
    /// The same with names of hosts, and so one query a node and stripes (the study `once_a_node`).
    LagoonOnceANode,
    /// The same instances without pooling, dispatched by predicted work.
    Multi,
    /// Both as v2 §7.1 wrote them: to the most free memory, whatever waits there.
    LagoonFreeMemory,
    MultiFreeMemory,
    /// One instance over all GPUs; a pipeline, if any, is kept full.
    Single,
    /// The same with one batch in flight: an engine with one step at a time, on a pipeline.
    SingleUnpipelined,
}

impl System {
    /// The system's name in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lagoon => "Lagoon",
            Self::LagoonOnceANode => "Lagoon, one query a node",
            Self::Multi => "vLLM-multi",
            Self::LagoonFreeMemory => "Lagoon, free memory",
            Self::MultiFreeMemory => "vLLM-multi, free memory",
            Self::Single => "vLLM-single",
            Self::SingleUnpipelined => "vLLM-single, one batch in flight",
        }
    }

    /// The system's setting on a setup's GPUs.
    #[must_use]
    pub fn setting(self, setup: &Setup, block_tokens: u32) -> Setting {
        let cluster = match self {
            Self::Lagoon | Self::LagoonOnceANode | Self::Multi | Self::LagoonFreeMemory | Self::MultiFreeMemory => {
                setup.multi()
            }
            Self::Single => Cluster::single(setup.model, setup.gpus, true),
            Self::SingleUnpipelined => Cluster::single(setup.model, setup.gpus, false),
        };
        let pooled = matches!(self, Self::Lagoon | Self::LagoonOnceANode | Self::LagoonFreeMemory);
        let dispatch = match self {
            Self::LagoonFreeMemory | Self::MultiFreeMemory => Dispatch::FreeMemory,
            _ => Dispatch::LeastWork,
        };
        let study = Study { once_a_node: self == Self::LagoonOnceANode, ..Study::default() };
        Setting { dispatch, study, ..Setting::new(cluster, pooled, block_tokens) }
    }
}

/// One run: a setting and its requests.
#[derive(Clone, Debug)]
pub struct Job {
    pub setting: Setting,
    pub requests: Vec<Request>,
}

/// Results of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Generated tokens per second over the whole run: all tokens of finished requests over the makespan.
    pub tokens_per_s: f64,
    /// From the first arrival to the last end of a request, or to the cut of the run.
    pub makespan_s: f64,
    /// Share of all requests that met [`Slo::default`].
    pub met: f64,
    /// Shares of all requests whose first token was late, and whose first one was in time and others late.
    pub late: [f64; 2],
    /// Times to the first token in the order of the requests; none where there was no token.
    pub first_tokens_s: Vec<Option<f64>>,
    /// Mean over finished requests of latency per generated token, in seconds (the papers' normalized latency).
    pub latency_s_per_token: f64,
    pub first_token_s: f64,
    pub finished: usize,
    pub failed: usize,
    /// Requests neither finished nor failed when the run was cut.
    pub cut: usize,
    pub preemptions: u64,
    pub recoveries: u64,
    pub moved_blocks: u64,
    /// See [`Seen::joint`].
    pub joint: [u64; 3],
    /// Mean utilisation of the devices, and its share for peers.
    pub busy: f64,
    pub remote_request: f64,
    /// Share of all devices' time: idle while a step waited for peers' partials.
    pub awaits: f64,
    /// Steps, and sequences per step, by micro-batch.
    pub steps: [u64; 2],
    pub rows_per_step: [f64; 2],
    /// Mean share of rBlocks in use, and mean number of running requests, over all instances, in the middle half of
    /// the run.
    pub memory_used: f64,
    pub batch: f64,
    pub borrowed_max: u32,
    pub ethernet_bytes: f64,
    /// Total time that frames of queries and partials were in flight, in seconds.
    pub exchange_s: f64,
    pub events: u64,
    pub simulated_s: f64,
    /// (seconds, tokens per second) in steps of [`Measured::STEP_S`].
    pub over_time: Vec<(f64, f64)>,
    /// (seconds, borrowed blocks), at the same times.
    pub borrowed: Vec<(f64, f64)>,
    /// End of each request in seconds after its arrival; none if it did not end.
    pub ended_s: Vec<Option<f64>>,
}

impl Measured {
    /// Width of a step of [`Measured::over_time`], in seconds.
    pub const STEP_S: f64 = 5.0;

    fn of(seen: &Seen, requests: &[Request]) -> Self {
        let arrived = |at: usize| WARM_UP_US + requests[at].arrival_us;
        let since = |at: usize, us: u64| seconds(us.saturating_sub(arrived(at)));
        let done: Vec<(usize, u64)> =
            seen.outcomes.iter().enumerate().filter_map(|(at, o)| Some((at, o.end_us?))).collect();
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let failed = seen.outcomes.iter().filter(|o| o.failed).count();
        let begun = requests.iter().map(|r| WARM_UP_US + r.arrival_us).min().unwrap_or(0);
        let last = done.iter().map(|(_, end)| *end).max().unwrap_or(seen.end_us);
        let makespan_s = seconds((if done.len() + failed < requests.len() { seen.end_us } else { last }) - begun);
        let tokens: f64 = done.iter().map(|(at, _)| f64::from(seen.outcomes[*at].tokens)).sum();
        let slo = Slo::default();
        let met = (0..requests.len()).filter(|at| slo.is_met(&seen.outcomes[*at], arrived(*at))).count();
        let in_time = |(at, o): &(usize, &super::run::Outcome)| {
            o.first_us.is_some_and(|first_us| since(*at, first_us) <= slo.first_token_s)
        };
        let begun_in_time = seen.outcomes.iter().enumerate().filter(in_time).count();
        let share = |n: usize| n as f64 / requests.len().max(1) as f64;
        let per_token = |(at, end): &(usize, u64)| since(*at, *end) / f64::from(seen.outcomes[*at].tokens.max(1));
        let first = |(at, o): (usize, &super::run::Outcome)| Some(since(at, o.first_us?));
        Self {
            tokens_per_s: tokens / makespan_s.max(f64::MIN_POSITIVE),
            makespan_s,
            met: share(met),
            late: [share(requests.len() - begun_in_time), share(begun_in_time - met)],
            first_tokens_s: seen.outcomes.iter().enumerate().map(first).collect(),
            latency_s_per_token: mean(done.iter().map(per_token).collect()),
            first_token_s: mean(seen.outcomes.iter().enumerate().filter_map(first).collect()),
            finished: done.len(),
            failed,
            cut: requests.len() - done.len() - failed,
            preemptions: seen.preemptions,
            recoveries: seen.recoveries,
            moved_blocks: seen.moved_blocks,
            joint: seen.joint,
            busy: seen.busy,
            remote_request: seen.remote_request,
            awaits: seen.awaits,
            steps: seen.steps,
            rows_per_step: [0, 1]
                .map(|micro_batch| seen.rows[micro_batch] as f64 / seen.steps[micro_batch].max(1) as f64),
            memory_used: middle(seen.samples.iter().map(|s| s.memory_used)),
            batch: middle(seen.samples.iter().map(|s| s.running)),
            borrowed_max: seen.borrowed_max,
            ethernet_bytes: seen.ethernet_bytes,
            exchange_s: seconds(seen.exchange_us),
            events: seen.events,
            simulated_s: seconds(seen.end_us),
            over_time: over_time(&seen.tokens),
            borrowed: seen
                .samples
                .iter()
                .step_by((Self::STEP_S / 0.1) as usize)
                .map(|s| (seconds(s.at_us), f64::from(s.borrowed)))
                .collect(),
            ended_s: seen.outcomes.iter().enumerate().map(|(at, o)| o.end_us.map(|end| since(at, end))).collect(),
        }
    }
}

/// Mean of the middle half of a series.
fn middle(series: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = series.len();
    let half: Vec<f64> = series.skip(n / 4).take(n.div_ceil(2)).collect();
    half.iter().sum::<f64>() / half.len().max(1) as f64
}

fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

const BUCKET_S: f64 = Seen::BUCKET_US as f64 / 1e6;

fn over_time(tokens: &[u32]) -> Vec<(f64, f64)> {
    let step = (Measured::STEP_S / BUCKET_S).round() as usize;
    let rate = |(at, chunk): (usize, &[u32])| {
        let sum: f64 = chunk.iter().map(|t| f64::from(*t)).sum();
        (at as f64 * Measured::STEP_S, sum / (chunk.len() as f64 * BUCKET_S))
    };
    tokens.chunks(step).enumerate().map(rate).collect()
}

/// Executes one run.
#[must_use]
pub fn run_one(job: &Job) -> Measured {
    let mut run = Run::new(job.setting, job.requests.clone());
    run.run();
    Measured::of(&run.seen, &job.requests)
}

/// Executes all runs, one per processor at a time; results in the order of the jobs.
#[must_use]
pub fn run_all(jobs: &[Job], done: &(dyn Fn(usize) + Sync)) -> Vec<Measured> {
    each(jobs, &|at, job| {
        let measured = run_one(job);
        done(at);
        measured
    })
}

/// `of` of each item, one per processor at a time; results in the order of the items.
#[must_use]
pub fn each<T: Sync, R: Send>(items: &[T], of: &(dyn Fn(usize, &T) -> R + Sync)) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<R>>> = items.iter().map(|_| Mutex::new(None)).collect();
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(items.len()) {
            scope.spawn(|| {
                while let Some((at, item)) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, items.get(at)?)))
                {
                    let result = of(at, item);
                    *results[at].lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(result);
                }
            });
        }
    });
    let take = |slot: Mutex<Option<R>>| slot.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    results.into_iter().filter_map(take).collect()
}

#[cfg(test)]
mod tests {
    use super::super::hardware::LLAMA2_7B;
    use super::*;

    fn measured(requests: &[Request]) -> Measured {
        let setting = Setting::new(Cluster::multi(LLAMA2_7B, 2, 1), false, 256);
        run_one(&Job { setting, requests: requests.to_vec() })
    }

    /// The makespan ends with the last request, however few tokens it has: a straggler counts.
    #[test]
    fn throughput_is_that_of_the_whole_run() {
        let request = |arrival_us, output_tokens| Request { arrival_us, prompt_tokens: 500, output_tokens };
        let quick: Vec<Request> = (0..40).map(|n| request(n * 1000, 100)).collect();
        let straggler: Vec<Request> = quick.iter().copied().chain([request(40_000, 2_000)]).collect();
        let (without, with) = (measured(&quick), measured(&straggler));
        assert_eq!((without.finished, with.finished), (40, 41));
        assert!((without.tokens_per_s * without.makespan_s - 4_000.0).abs() < 1.0, "{without:?}");
        assert!((with.tokens_per_s * with.makespan_s - 6_000.0).abs() < 1.0);
        assert!(with.makespan_s > 5.0 * without.makespan_s, "{} s, {} s", with.makespan_s, without.makespan_s);
        assert!(with.tokens_per_s < without.tokens_per_s / 2.0, "the middle of the run would not show it");
        assert_eq!((without.met, with.met), (1.0, 1.0));
    }

    #[test]
    fn a_refused_request_meets_no_objective() {
        let request = |prompt_tokens| Request { arrival_us: 0, prompt_tokens, output_tokens: 10 };
        let got = measured(&[request(500), request(500_000)]);
        assert_eq!((got.finished, got.failed, got.met), (1, 1, 0.5));
        assert_eq!(got.first_tokens_s.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false]);
    }
}
