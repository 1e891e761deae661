//! Random pools, workloads and faults from a seed, with every checker on: the default command of `lagoon-sim`.
//!
//! A [`Scenario`] is a pure function of the seed: a pool, and a list of [`Op`]s with their times. [`run`] executes
//! it. If a checker fails, [`shrink`] searches for a shorter list that fails the same way.

mod aim;
mod check;
mod handed;
mod ops;
mod panics;
mod requests;
mod roles;
mod run;
mod scenario;
mod shrink;
mod sweep;
mod unreported;

pub use aim::Aim;
pub use ops::{Op, What};
pub use run::{Failure, Summary, replay, run};
pub use scenario::{Limits, Scenario};
pub use shrink::{Shrunk, shrink};
pub use sweep::{Sweep, sweep};
