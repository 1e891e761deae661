//! Runs many seeds on several threads. Each run has one thread to itself, so results do not depend on the number of
//! threads.

use super::run::{Failure, Summary, run};
use super::scenario::{Limits, Scenario};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Results of a sweep.
#[derive(Clone, Debug, Default)]
pub struct Sweep {
    /// Counters of the runs that passed.
    pub total: Summary,
    pub runs: u64,
    /// Failures by seed.
    pub failures: Vec<(u64, Failure)>,
}

/// Runs `seeds` on `jobs` threads until all are done or `stop_after` have failed. `progress` is called after every
/// run.
#[must_use]
pub fn sweep(
    seeds: Range<u64>,
    limits: Limits,
    jobs: usize,
    stop_after: usize,
    progress: &(dyn Fn(&Sweep) + Sync),
) -> Sweep {
    let next = AtomicU64::new(seeds.start);
    let done = Mutex::new(Sweep::default());
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    let result = run(&Scenario::draw(seed, limits));
                    let mut done = done.lock().expect("a run's panics are caught in it");
                    done.runs += 1;
                    match result {
                        Ok(summary) => done.total.add(&summary),
                        Err(failure) => done.failures.push((seed, failure)),
                    }
                    if done.failures.len() >= stop_after {
                        next.store(seeds.end, Ordering::Relaxed);
                    }
                    progress(&done);
                }
            });
        }
    });
    let mut sweep = done.into_inner().expect("a run's panics are caught in it");
    sweep.failures.sort_by_key(|f| f.0);
    sweep
}
