//! The creditor's side: remote attention requests of peers, KV that they write and read, lending and its threshold,
//! recall, and DGFM's freeze.
//!
//! It owns what peers may still ask for; the leases themselves are the rManager's.

pub(crate) mod freeze;
mod recall;
pub(crate) mod requests;
mod seals;
pub(crate) mod threshold;

use crate::config::InstanceConfig;
use freeze::FrozenDebt;
use requests::Requests;
use seals::Seals;
use threshold::Threshold;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Creditor {
    pub(crate) requests: Requests,
    threshold: Option<Threshold>,
    frozen: Option<FrozenDebt>,
    seals: Seals,
}

impl Creditor {
    pub(crate) fn new(config: &InstanceConfig) -> Self {
        let (requests, seals) = (Requests::default(), Seals::default());
        Self { requests, threshold: Threshold::of(config), frozen: None, seals }
    }

    /// Whether peers' work is bounded by a latency target.
    pub(crate) fn has_target(&self) -> bool {
        self.threshold.is_some()
    }

    /// Estimated time of remote attention requests since the start, in microseconds; 0 without a latency target.
    pub(crate) fn guests_us(&self) -> f64 {
        self.threshold.as_ref().map_or(0.0, Threshold::guests_us)
    }

    /// Steps that were refused for the latency target.
    pub(crate) fn shed_steps(&self) -> u64 {
        self.threshold.as_ref().map_or(0, Threshold::shed)
    }

    /// rBlocks that were sealed for debtors to map.
    pub(crate) fn sealed(&self) -> u64 {
        self.seals.sealed()
    }

    /// The cycle of the freeze; 0 without one.
    pub(crate) fn frozen_cycle(&self) -> u64 {
        self.frozen.map_or(0, |f| f.cycle)
    }
}
