//! Role balancer (docs/adr/0017): when prefill workers queue and decode workers have spare capacity, or the other way round,
//! it changes the role of one instance of the side with spare capacity.
//!
//! A pure state machine over heartbeats. A switch costs a drain, and future load is unknown: therefore it needs lasting
//! evidence, switches one instance at a time, and pauses afterwards.
//!
//! * A side *queues* while requests wait at every instance of it: prompts behind one that is being computed (not prompts that
//!   wait for memory until decode workers fetch finished KV), or requests without memory or a place in the batch.
//! * A side *can spare* an instance while its total load on the remaining instances would be at most
//!   [`BalancerConfig::spare_load`]. Load is a mean over time: of a prefill worker, the share of time in which it computes;
//!   of a decode worker, the larger of the used shares of its batch and its memory.
//! * Both must have lasted for [`BalancerConfig::sustain_ms`], and [`BalancerConfig::dwell_ms`] must have passed since the end
//!   of the last switch, including an operator's. Faster load swings change no role; slower ones are followed one instance at
//!   a time.
//! * While an instance changes its role there is no decision, and no side loses its last instance.

use lagoon_protocol::Role;
use lagoon_types::InstanceId;
use lagoon_types::limits::{ROLE_DWELL_MS, ROLE_SUSTAIN_MS};
use std::collections::BTreeMap;

/// Configuration of the balancer.
#[derive(Clone, Debug, PartialEq)]
pub struct BalancerConfig {
    /// Time for which one side must queue and the other be able to spare an instance, at every decision.
    pub sustain_ms: u64,
    /// Pause after a switch before the next one.
    pub dwell_ms: u64,
    /// Time over which load is averaged.
    pub window_ms: u64,
    /// Largest load, from 0 to 1, that a side may have without the instance that it transfers to the other side.
    pub spare_load: f64,
}

impl Default for BalancerConfig {
    fn default() -> Self {
        Self { sustain_ms: ROLE_SUSTAIN_MS, dwell_ms: ROLE_DWELL_MS, window_ms: 5_000, spare_load: 0.5 }
    }
}

/// The balancer's view of one live instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoleView {
    pub id: InstanceId,
    pub role: Role,
    /// Role that it is changing to.
    pub becoming: Option<Role>,
    /// Whether its role can change.
    pub changes: bool,
    /// Sequences in its batch.
    pub running: u32,
    /// Prefill jobs for other instances, waiting ones included.
    pub jobs: u32,
    /// Own requests that wait for memory or a place in the batch.
    pub waiting: u32,
    /// Larger of the used shares of its batch and its memory, from 0 to 1.
    pub taken: f64,
}

/// Decision to change an instance's role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoleSwitch {
    pub id: InstanceId,
    pub from: Role,
    pub to: Role,
}

/// Side: prefill or decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Prefill,
    Decode,
}

impl Side {
    const BOTH: [Self; 2] = [Self::Prefill, Self::Decode];

    fn role(self) -> Role {
        match self {
            Self::Prefill => Role::Prefill,
            Self::Decode => Role::Decode,
        }
    }

    fn other(self) -> Self {
        match self {
            Self::Prefill => Self::Decode,
            Self::Decode => Self::Prefill,
        }
    }

    /// Whether an instance of this role does this side's work, possibly among other work.
    fn has(self, role: Role) -> bool {
        match self {
            Self::Prefill => role.prefills(),
            Self::Decode => role.serves(),
        }
    }

    /// Whether requests wait at an instance behind running ones.
    fn waits(self, view: &RoleView) -> bool {
        match self {
            Self::Prefill => view.running > 0 && view.jobs > 1,
            Self::Decode => view.waiting > 0,
        }
    }

    fn load(self, view: &RoleView) -> f64 {
        match self {
            Self::Prefill => f64::from(u8::from(view.running > 0)),
            Self::Decode => view.taken.clamp(0.0, 1.0),
        }
    }
}

/// Role balancer: loads and evidence over time.
#[derive(Debug)]
pub struct Balancer {
    config: BalancerConfig,
    /// Mean load of each instance in its role; starts at 1.
    loads: BTreeMap<InstanceId, (Role, f64)>,
    /// Start of the evidence for a switch from each side to the other.
    since_ms: [Option<u64>; 2],
    /// End of the pause.
    rest_until_ms: u64,
    seen_ms: u64,
}

impl Balancer {
    /// A balancer that starts with a pause, as after a switch.
    #[must_use]
    pub fn new(config: BalancerConfig, now_ms: u64) -> Self {
        let rest_until_ms = now_ms + config.dwell_ms;
        Self { config, loads: BTreeMap::new(), since_ms: [None; 2], rest_until_ms, seen_ms: now_ms }
    }

    /// Decides on a switch, if any, from the views of all instances that are live and not draining.
    pub fn decide(&mut self, views: &[RoleView], now_ms: u64) -> Option<RoleSwitch> {
        self.average(views, now_ms);
        if views.iter().any(|view| view.becoming.is_some()) {
            self.rest(now_ms);
        }
        for (at, side) in Side::BOTH.into_iter().enumerate() {
            let could = now_ms >= self.rest_until_ms && Self::queues(views, side.other()) && self.spares(views, side);
            self.since_ms[at] = could.then(|| self.since_ms[at].unwrap_or(now_ms));
        }
        let lasted = |since: Option<u64>| since.is_some_and(|since| now_ms >= since + self.config.sustain_ms);
        let (_, from) = self.since_ms.into_iter().zip(Side::BOTH).find(|(since, _)| lasted(*since))?;
        let idlest = self.candidates(views, from).min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))?;
        self.rest(now_ms);
        Some(RoleSwitch { id: idlest.1, from: from.role(), to: from.other().role() })
    }

    /// Restarts the pause and the evidence after a switch was ordered, or while one is in progress.
    fn rest(&mut self, now_ms: u64) {
        self.rest_until_ms = now_ms + self.config.dwell_ms;
        self.since_ms = [None; 2];
    }

    #[allow(clippy::cast_precision_loss, reason = "times of minutes at most")]
    fn average(&mut self, views: &[RoleView], now_ms: u64) {
        let passed_ms = now_ms.saturating_sub(self.seen_ms) as f64;
        self.seen_ms = self.seen_ms.max(now_ms);
        let keep = (-passed_ms / (self.config.window_ms.max(1) as f64)).exp();
        let old = std::mem::take(&mut self.loads);
        for view in views {
            let Some(side) = Side::BOTH.into_iter().find(|side| side.role() == view.role) else { continue };
            let before = old.get(&view.id).filter(|(role, _)| *role == view.role).map_or(1.0, |(_, load)| *load);
            let load = before * keep + side.load(view) * (1.0 - keep);
            self.loads.insert(view.id, (view.role, load));
        }
    }

    /// Whether requests wait at every instance of exactly this side's role.
    fn queues(views: &[RoleView], side: Side) -> bool {
        let mut of = views.iter().filter(|view| view.role == side.role() && view.becoming.is_none()).peekable();
        of.peek().is_some() && of.all(|view| side.waits(view))
    }

    /// Instances that could change from this side to the other, with their loads.
    fn candidates(&self, views: &[RoleView], side: Side) -> impl Iterator<Item = (f64, InstanceId)> {
        let may = views.iter().filter(move |view| view.role == side.role() && view.changes && view.becoming.is_none());
        may.filter_map(|view| Some((self.loads.get(&view.id)?.1, view.id)))
    }

    /// Whether the side can do its work without one instance.
    #[allow(clippy::cast_precision_loss, reason = "few instances")]
    fn spares(&self, views: &[RoleView], side: Side) -> bool {
        // An instance without readable KV cannot change its role, and computes no prompts for others.
        let does = |view: &&RoleView| side.has(view.role) && (side == Side::Decode || view.changes);
        let stays = |view: &&RoleView| does(view) && view.becoming.is_none();
        let others = views.iter().filter(stays).count().saturating_sub(1);
        let own = views.iter().filter(|view| view.role == side.role());
        let sum: f64 = own.filter_map(|view| self.loads.get(&view.id)).map(|(_, load)| load).sum();
        others > 0 && sum <= self.config.spare_load * others as f64 && self.candidates(views, side).next().is_some()
    }
}

#[cfg(test)]
mod tests;
