//! Shrinks a failing scenario: delta debugging over its list of ops.

use super::ops::Op;
use super::run::{Failure, replay};
use super::scenario::Scenario;
use std::time::{Duration, Instant};

/// The shortest failing list of ops found.
#[derive(Clone, Debug)]
pub struct Shrunk {
    pub ops: Vec<Op>,
    pub failure: Failure,
    /// Number of lists tried.
    pub tried: u64,
}

/// Removes ever smaller parts of a failing scenario's ops, while the rest fails by the same checker and time is left.
#[must_use]
pub fn shrink(scenario: &Scenario, failure: &Failure, budget: Duration) -> Shrunk {
    let begun = Instant::now();
    let mut best = Shrunk { ops: scenario.ops.clone(), failure: failure.clone(), tried: 0 };
    let mut parts = 2;
    while best.ops.len() > 1 && begun.elapsed() < budget {
        let size = best.ops.len().div_ceil(parts);
        let mut shorter = None;
        for start in (0..best.ops.len()).step_by(size) {
            let end = (start + size).min(best.ops.len());
            let rest = [&best.ops[..start], &best.ops[end..]].concat();
            best.tried += 1;
            if let Err(failure) = replay(scenario, &rest, 0).0
                && failure.checker == best.failure.checker
            {
                shorter = Some((rest, failure));
                break;
            }
            if begun.elapsed() >= budget {
                break;
            }
        }
        match shorter {
            Some((ops, failure)) => {
                (best.ops, best.failure) = (ops, failure);
                parts = 2.max(parts - 1);
            }
            None if size == 1 => break,
            None => parts = (parts * 2).min(best.ops.len()),
        }
    }
    best
}
