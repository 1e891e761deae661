//! The balancer of roles (docs/adr/0017): when prefill workers queue and decode workers have time to spare, or the other way
//! round, one instance of the side that has time gets the other role.
//!
//! A pure state machine over what heartbeats say. A switch costs a drain, and the next minutes' load is not known: so it
//! takes lasting evidence, one step at a time, and rests afterwards.
//!
//! * A side *queues* while something waits at every instance of it: prompts behind one that is computed (those that wait
//!   because decode workers have not fetched what fills the memory wait for the other side), or requests without memory or a
//!   place in the batch.
//! * A side *can spare* an instance while what all of it does would load the others by no more than
//!   [`BalancerConfig::spare_load`]. Load is a mean over time: of a prefill worker, the share of time in which it computes;
//!   of a decode worker, the larger of the shares of its batch and its memory that are taken.
//! * Both must have lasted for [`BalancerConfig::sustain_ms`], and [`BalancerConfig::dwell_ms`] must have passed since the last
//!   switch had come to its end, whoever ordered that. So a load that swings faster moves nothing, and one that swings slower
//!   is followed one instance at a time.
//! * While an instance changes its role nothing is decided, and no side loses its last instance.

use lagoon_protocol::Role;
use lagoon_types::InstanceId;
use std::collections::BTreeMap;

/// How patient the balancer is.
#[derive(Clone, Debug, PartialEq)]
pub struct BalancerConfig {
    /// Time for which one side must queue and the other one be able to spare an instance, both at every look.
    pub sustain_ms: u64,
    /// Time after a switch in which there is no other.
    pub dwell_ms: u64,
    /// Time over which load is averaged.
    pub window_ms: u64,
    /// Load, from 0 to 1, that a side may have without the instance that it gives.
    pub spare_load: f64,
}

impl Default for BalancerConfig {
    fn default() -> Self {
        Self { sustain_ms: 5_000, dwell_ms: 30_000, window_ms: 5_000, spare_load: 0.5 }
    }
}

/// What is known of one instance that is alive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoleView {
    pub id: InstanceId,
    pub role: Role,
    /// The role that it changes to.
    pub becoming: Option<Role>,
    /// It may be given another role.
    pub changes: bool,
    /// Sequences in its batch.
    pub running: u32,
    /// Prompts for others that are computed or wait here.
    pub jobs: u32,
    /// Own requests that wait for memory or a place in the batch.
    pub waiting: u32,
    /// Shares of its batch and its memory that are taken, whichever is larger: from 0 to 1.
    pub taken: f64,
}

/// An instance is to get another role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoleSwitch {
    pub id: InstanceId,
    pub from: Role,
    pub to: Role,
}

/// The two kinds of work.
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

    /// Whether an instance of this role does the work, whatever else it does.
    fn has(self, role: Role) -> bool {
        match self {
            Self::Prefill => role.prefills(),
            Self::Decode => role.serves(),
        }
    }

    /// Whether something waits at an instance behind what it does.
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

/// See the module's documentation.
#[derive(Debug)]
pub struct Balancer {
    config: BalancerConfig,
    /// Load of each instance in its role, over time. Of whom nothing is known yet, it is 1.
    loads: BTreeMap<InstanceId, (Role, f64)>,
    /// Since when an instance of this side could have gone to the other one.
    since_ms: [Option<u64>; 2],
    /// Nothing is decided before.
    rest_until_ms: u64,
    seen_ms: u64,
}

impl Balancer {
    /// One that begins now, as if after a switch: it has seen nothing yet.
    #[must_use]
    pub fn new(config: BalancerConfig, now_ms: u64) -> Self {
        let rest_until_ms = now_ms + config.dwell_ms;
        Self { config, loads: BTreeMap::new(), since_ms: [None; 2], rest_until_ms, seen_ms: now_ms }
    }

    /// What is known now of all instances that are alive and not drained. Says which is to get another role, if one is.
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

    /// A switch is in progress, or was ordered: evidence counts anew afterwards.
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

    /// Whether something waits at all of those that do nothing else.
    fn queues(views: &[RoleView], side: Side) -> bool {
        let mut of = views.iter().filter(|view| view.role == side.role() && view.becoming.is_none()).peekable();
        of.peek().is_some() && of.all(|view| side.waits(view))
    }

    /// Instances that could change from this side to the other one, with their load.
    fn candidates(&self, views: &[RoleView], side: Side) -> impl Iterator<Item = (f64, InstanceId)> {
        let may = views.iter().filter(move |view| view.role == side.role() && view.changes && view.becoming.is_none());
        may.filter_map(|view| Some((self.loads.get(&view.id)?.1, view.id)))
    }

    /// Whether the side can do its work with one instance less.
    #[allow(clippy::cast_precision_loss, reason = "few instances")]
    fn spares(&self, views: &[RoleView], side: Side) -> bool {
        // Whose KV nobody can read changes no role, and computes for nobody.
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
