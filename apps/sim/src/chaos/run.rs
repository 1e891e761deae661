//! Executes a scenario with every checker on.

use super::check::{Checkers, FORGOTTEN_US, LONG_US};
use super::ops::{Op, What};
use super::panics;
use super::requests::{Asked, End};
use super::roles::Roles;
use super::scenario::Scenario;
use crate::place::{GMANAGER, Place};
use crate::process::Process;
use crate::symbolic::Symbolic;
use crate::world::{Emission, Step, World};
use lagoon_instance::{Event, InstanceStatus};
use lagoon_protocol::{AdminBody, AdminDrain, AdminMove, Role};
use lagoon_types::{SeqId, TokenEvent};
use lagoon_wire::Class;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// Time from the end of the last request to the last check: debts may be frozen for ten seconds.
const REST_US: u64 = 18_000_000;
/// Time from the last fault or request until every request must have ended. Shorter than a request's deadline for
/// memory: a request that only this deadline would end is never served, which is a finding.
const OVER_US: u64 = 300_000_000;
const _: () = assert!(OVER_US < lagoon_types::limits::ADMISSION_DEADLINE_MS * 1000);
/// Most events per second of simulated time, on average: more is a livelock.
const EVENTS_PER_S_MAX: u64 = 200_000;
/// Latest arrival of an order.
const LATE_US: u64 = 5_000_000;
/// Interval of checks for leases that no debtor holds.
const ORPHANS_US: u64 = 1_000_000;
/// Interval of checks of everything, in events.
const ALL_EVENTS: u64 = 512;
/// First number of the run's own calls.
const RESTART: u64 = 1 << 32;
const UNDRAIN: u64 = 1 << 33;
const ORPHANS: u64 = 1 << 34;

/// A checker's finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// Name of the checker.
    pub checker: String,
    pub detail: String,
    /// Simulated time.
    pub at_us: u64,
}

impl Failure {
    pub(super) fn new(checker: &str, detail: String) -> Self {
        Self { checker: checker.to_owned(), detail, at_us: 0 }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (s, ms) = (self.at_us / 1_000_000, self.at_us % 1_000_000 / 1000);
        write!(f, "{}, at {s}.{ms:03} s: {}", self.checker, self.detail)
    }
}

/// Counters of a run, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    pub events: u64,
    /// Simulated time.
    pub ms: u64,
    pub requests: u64,
    pub finished: u64,
    /// Refused: too long for the pool, or too many at once.
    pub refused: u64,
    /// Accepted, and ended by an error.
    pub failed: u64,
    pub cancelled: u64,
    /// Ended by the death of their instance.
    pub lost: u64,
    pub tokens: u64,
    pub faults: u64,
    pub preemptions: u64,
    pub recoveries: u64,
    /// Tokens recomputed because their KV was lost.
    pub recomputed: u64,
    /// Tokens not computed because of prefix-cache hits.
    pub prefix_hits: u64,
    /// Those of them that other instances cached and leased.
    pub prefix_leased: u64,
    /// Blocks of these hits that were shared with another sequence at the time.
    pub prefix_shared: u64,
    /// Tokens of these hits that came from host memory, and from disk.
    pub host_hits: u64,
    pub disk_hits: u64,
    /// Evictions from the prefix cache.
    pub prefix_evicted: u64,
    /// Prompts read from the worker that prefilled them; of these, those prefilled in parts, those reassigned to
    /// another worker, and those that no worker took.
    pub prefills: u64,
    pub prefills_pushed: u64,
    pub prefills_again: u64,
    pub prefills_own: u64,
    /// Blocks that stayed with the worker that prefilled them.
    pub left: u64,
    /// Tokens not read from their worker, because they were cached here.
    pub found: u64,
    /// Roles that changed.
    pub switches: u64,
    /// Prompts begun with others, and those of them that all members computed to the end; tokens computed for others.
    pub joint_begun: u64,
    pub joint_completed: u64,
    pub joint_tokens: u64,
    /// Layers merged by relays, and steps that were not relayed.
    pub relayed: u64,
    pub relays_failed: u64,
    pub partials_frames: u64,
    pub bulk_frames: u64,
}

impl Summary {
    /// Adds another run's counters.
    pub fn add(&mut self, other: &Self) {
        self.events += other.events;
        self.ms += other.ms;
        self.requests += other.requests;
        self.finished += other.finished;
        self.refused += other.refused;
        self.failed += other.failed;
        self.cancelled += other.cancelled;
        self.lost += other.lost;
        self.tokens += other.tokens;
        self.faults += other.faults;
        self.preemptions += other.preemptions;
        self.recoveries += other.recoveries;
        self.recomputed += other.recomputed;
        self.prefix_hits += other.prefix_hits;
        self.prefix_leased += other.prefix_leased;
        self.prefix_shared += other.prefix_shared;
        self.host_hits += other.host_hits;
        self.disk_hits += other.disk_hits;
        self.prefix_evicted += other.prefix_evicted;
        self.prefills += other.prefills;
        self.prefills_pushed += other.prefills_pushed;
        self.prefills_again += other.prefills_again;
        self.prefills_own += other.prefills_own;
        self.left += other.left;
        self.found += other.found;
        self.switches += other.switches;
        self.joint_begun += other.joint_begun;
        self.joint_completed += other.joint_completed;
        self.joint_tokens += other.joint_tokens;
        self.relayed += other.relayed;
        self.relays_failed += other.relays_failed;
        self.partials_frames += other.partials_frames;
        self.bulk_frames += other.bulk_frames;
    }

    /// Adds the counters of a process that ends.
    fn add_life(&mut self, status: &InstanceStatus, push: bool) {
        self.preemptions += status.preemptions;
        self.recoveries += status.recoveries;
        self.recomputed += status.recomputed_tokens;
        self.prefix_hits += status.prefix.hit_tokens;
        self.prefix_leased += status.prefix.found.pool;
        self.prefix_shared += status.prefix.shared_blocks;
        self.prefix_evicted += status.prefix.evicted_blocks;
        self.host_hits += status.prefix.found.host;
        self.disk_hits += status.prefix.found.disk;
        self.prefills += status.prefill.pulled;
        self.prefills_pushed += if push { status.prefill.pulled } else { 0 };
        self.prefills_again += status.prefill.retried;
        self.prefills_own += status.prefill.own;
        self.left += status.prefill.blocks_left;
        self.found += status.prefill.found_tokens;
        self.joint_begun += status.joint.begun;
        self.joint_completed += status.joint.completed;
        self.joint_tokens += status.joint.computed_tokens;
        self.relayed += status.relays.merged_layers;
        self.relays_failed += status.relays.failed_steps;
    }
}

struct Run<'a> {
    scenario: &'a Scenario,
    ops: &'a [Op],
    world: World<Symbolic>,
    checkers: Checkers,
    roles: Roles,
    asked: BTreeMap<usize, Asked>,
    lives: BTreeMap<Place, u64>,
    /// Drains that are being ended, with the time when each was last on or may have been.
    drains: BTreeMap<Place, u64>,
    /// Ops that have not begun.
    ahead: usize,
    /// End of the last fault that has begun.
    fault_end_us: Option<u64>,
    /// When the last long one ends.
    long_fault_end_us: Option<u64>,
    over_us: u64,
    summary: Summary,
}

/// Executes a scenario.
///
/// # Errors
/// The first finding of a checker.
pub fn run(scenario: &Scenario) -> Result<Summary, Failure> {
    replay(scenario, &scenario.ops, 0).0
}

/// Executes some of a scenario's ops, and keeps the last `trace` lines of events.
pub fn replay(scenario: &Scenario, ops: &[Op], trace: usize) -> (Result<Summary, Failure>, Vec<String>) {
    let mut world = scenario.pool.world(scenario.seed);
    world.trace = (trace > 0).then(|| crate::world::Trace::new(trace));
    let mut run = Run {
        scenario,
        ops,
        world,
        checkers: Checkers::default(),
        roles: Roles::default(),
        asked: BTreeMap::new(),
        lives: BTreeMap::new(),
        drains: BTreeMap::new(),
        ahead: ops.len(),
        fault_end_us: None,
        long_fault_end_us: None,
        over_us: 0,
        summary: Summary::default(),
    };
    let result = panics::watch(|| run.play());
    let at_us = run.world.now_us();
    let result = match result {
        Ok(Ok(())) => Ok(run.summary()),
        Ok(Err(failure)) => Err(Failure { at_us, ..failure }),
        Err(panic) => Err(Failure { checker: "panic".to_owned(), detail: panic, at_us }),
    };
    (result, run.world.trace.take().map(crate::world::Trace::into_lines).unwrap_or_default())
}

impl Run<'_> {
    fn play(&mut self) -> Result<(), Failure> {
        for (index, op) in self.ops.iter().enumerate() {
            self.world.call_at(op.at_us, index as u64);
            self.over_us = self.over_us.max(op.what.fault_end_us(op.at_us).unwrap_or(op.at_us) + OVER_US);
        }
        self.world.call_at(ORPHANS_US, ORPHANS);
        let (mut steps, mut rest_us) = (0u64, None);
        loop {
            match self.world.step() {
                None => return Err(Failure::new("hang", "nothing ever happens again".to_owned())),
                Some(Step::Call(ORPHANS)) => {
                    self.world.call_at(self.world.now_us() + ORPHANS_US, ORPHANS);
                    let calm_us = self.calm_us();
                    self.checkers.orphans(&self.world, calm_us)?;
                }
                Some(Step::Call(call)) if call >= UNDRAIN => self.undrain(usize::try_from(call - UNDRAIN).unwrap_or(0)),
                Some(Step::Call(call)) if call >= RESTART => self.restart(usize::try_from(call - RESTART).unwrap_or(0)),
                Some(Step::Call(call)) => self.perform(usize::try_from(call).unwrap_or(0)),
                Some(Step::Handled) => {}
            }
            steps += 1;
            if self.scenario.steps_max > 0 && steps >= self.scenario.steps_max {
                return Ok(());
            }
            self.deliver()?;
            self.check(steps)?;
            let now = self.world.now_us();
            if self.ahead > 0 || self.asked.values().any(|a| a.end.is_none()) {
                rest_us = None;
                self.progress(now)?;
            } else if now > *rest_us.get_or_insert_with(|| self.rest_at(now)) {
                self.roles.at_rest(&self.world, &self.scenario.pool)?;
                return self.checkers.empty(&self.world);
            }
        }
    }

    /// Time by which a pool must be empty whose last request ended now.
    fn rest_at(&self, now: u64) -> u64 {
        (now + REST_US).max(self.last_fault_us().map_or(0, |end| end + FORGOTTEN_US + REST_US))
    }

    fn last_fault_us(&self) -> Option<u64> {
        self.fault_end_us.max(self.world.fired_us)
    }

    /// Time since the last fault, and since the last long one.
    fn calm_us(&self) -> [u64; 2] {
        let since = |end: Option<u64>| end.map_or(u64::MAX, |end| self.world.now_us().saturating_sub(end));
        [since(self.last_fault_us()), since(self.long_fault_end_us)]
    }

    fn check(&mut self, steps: u64) -> Result<(), Failure> {
        let touched = std::mem::take(&mut self.world.touched);
        for place in &touched {
            self.checkers.after(&self.world, *place)?;
            self.roles.after(&self.world, *place, &self.scenario.pool, &self.asked)?;
        }
        self.world.touched = touched;
        if steps.is_multiple_of(ALL_EVENTS) {
            self.checkers.all(&self.world)?;
        }
        Ok(())
    }

    /// Checks for hangs and livelocks.
    fn progress(&self, now: u64) -> Result<(), Failure> {
        if self.world.events() > (now / 1_000_000 + 2) * EVENTS_PER_S_MAX {
            return Err(Failure::new("livelock", format!("{} events", self.world.events())));
        }
        if self.ahead == 0 && now > self.over_us {
            let open: Vec<String> = self.asked.values().filter(|a| a.end.is_none()).map(|a| self.describe(a)).collect();
            return Err(Failure::new("hang", open.join("; ")));
        }
        Ok(())
    }

    fn describe(&self, asked: &Asked) -> String {
        let status = self.world.process(asked.place).map(|p| format!("{:?}", p.instance.status()));
        format!("request {} is not over after {} tokens: {}", asked.id, asked.tokens, status.unwrap_or_default())
    }

    /// Delivers emitted events to the clients.
    fn deliver(&mut self) -> Result<(), Failure> {
        if self.world.emitted.is_empty() {
            return Ok(());
        }
        let disturbed = self.fault_end_us.is_some();
        for emission in std::mem::take(&mut self.world.emitted) {
            let id = usize::try_from(emission.seq.0 - 1).unwrap_or(usize::MAX);
            let Some(asked) = self.asked.get_mut(&id).filter(|a| a.place == emission.place) else {
                return Err(Failure::new("answer", format!("node {} answers {}", emission.place, emission.seq)));
            };
            let cached = if let TokenEvent::Prompt { cached, .. } = emission.event { cached.total() } else { 0 };
            let cached = u32::try_from(cached).unwrap_or(u32::MAX);
            asked.receive(emission.event, &self.scenario.pool, disturbed)?;
            self.check_tenant(id, cached)?;
        }
        Ok(())
    }

    /// What was cached of a prompt was computed for another request of its tenant. A prompt that prefill workers compute may find what
    /// they computed for it before.
    fn check_tenant(&self, id: usize, cached: u32) -> Result<(), Failure> {
        let Scenario { pool, .. } = &self.scenario;
        if cached == 0 || pool.nodes.iter().any(|node| matches!(node.role, Role::Prefill | Role::Decode)) {
            return Ok(());
        }
        let asked = &self.asked[&id];
        if self.asked.values().any(|of| of.id != id && asked.may_find(cached, of, pool)) {
            return Ok(());
        }
        Err(Failure::new("tenant", format!("request {id} found {cached} tokens that none of its tenant has computed")))
    }

    /// Executes a due op.
    fn perform(&mut self, index: usize) {
        let op = self.ops[index];
        let now = self.world.now_us();
        // A stopped process takes client requests when it resumes.
        if let Some(until) = self.client_waits(&op.what) {
            self.world.call_at(until + 1, index as u64);
            return;
        }
        self.ahead -= 1;
        if let Some(end) = op.what.fault_end_us(now) {
            self.fault_end_us = Some(self.fault_end_us.map_or(end, |e| e.max(end)));
            if end - now >= LONG_US {
                self.long_fault_end_us = Some(self.long_fault_end_us.map_or(end, |e| e.max(end)));
            }
            self.over_us = self.over_us.max(end + OVER_US);
            self.summary.faults += 1;
        }
        match op.what {
            What::Submit { id, place, prompt, max_tokens, seed } => self.submit(id, place, (prompt, max_tokens, seed)),
            What::Cancel { id } => self.cancel(id),
            What::Crash { place, down_us } => self.crash(place, down_us),
            What::Cut { a, b } => self.world.fabric.cut(a, b, &mut self.world.agenda),
            What::CutKv { a, b } => self.world.cut_paths(a, b),
            What::Partition { a, b, us } => self.world.partition(a, b, us),
            What::Pause { place, us } => self.world.pause(place, us),
            What::Slow { a, b, us, for_us } => self.world.fabric.slow(a, b, us, for_us, now),
            What::Break { place, fault } => self.world.break_device(place, fault),
            What::Drain { place, us } => self.drain(place, us),
            What::Move { id, to, blocks } => self.move_blocks(id, to, blocks),
            What::Role { place, role } => self.roles.order(&mut self.world, place, role),
            What::Full { place, class } => self.world.fill_queue(place, Box::new(move |frame| frame.class() == class)),
        }
    }

    fn client_waits(&self, what: &What) -> Option<u64> {
        let place = match what {
            What::Submit { place, .. } => *place,
            What::Cancel { id } => self.asked.get(id)?.place,
            _ => return None,
        };
        self.world.process(place)?.paused_until_us
    }

    fn submit(&mut self, id: usize, place: Place, what: (u32, u32, u64)) {
        let (place, takes) =
            if self.scenario.changes_roles() { Roles::dispatch(&self.world, place) } else { (place, true) };
        let live = self.world.process(place);
        let pool_tokens = live.map_or(0, |p| p.instance.pool_tokens());
        let mut asked = Asked::new(&self.scenario.pool, (id, place), what, pool_tokens);
        let request = asked.request.clone();
        if live.is_none() {
            asked.end = Some(End::Lost);
        }
        self.asked.insert(id, asked);
        let seq = SeqId(id as u64 + 1);
        self.world.handle(place, Event::Submit { seq, request: Box::new(request) });
        let refused = |e: &Emission| (e.place, e.seq) == (place, seq) && matches!(e.event, TokenEvent::Failed(_));
        if !takes && let Some(at) = self.world.emitted.iter().position(refused) {
            self.world.emitted.remove(at);
            self.asked.entry(id).and_modify(|asked| asked.end = Some(End::Refused));
        }
    }

    fn cancel(&mut self, id: usize) {
        // Its request may have been left out, or may come later: clients cancel only requests that they have sent.
        let Some(asked) = self.asked.get_mut(&id).filter(|a| a.end.is_none()) else { return };
        asked.end = Some(End::Cancelled);
        let place = asked.place;
        self.world.handle(place, Event::Cancel { seq: SeqId(id as u64 + 1) });
    }

    fn crash(&mut self, place: Place, down_us: u64) {
        let now = self.world.now_us();
        self.world.call_at(now + down_us, RESTART + place as u64);
        if place == GMANAGER {
            self.roles.gmanager_died(&self.world);
            self.world.kill_gmanager();
            return;
        }
        let Some(process) = self.world.kill(place) else { return };
        self.summary.add_life(&process.instance.status(), self.scenario.pool.push);
        self.checkers.died(&process);
        self.roles.died(place);
        let hit = |a: &&mut Asked| a.place == place && a.end.is_none();
        self.asked.values_mut().filter(hit).for_each(|a| a.end = Some(End::Lost));
    }

    fn drain(&mut self, place: Place, us: u64) {
        let Some(id) = self.world.process(place).and_then(Process::id) else { return };
        self.world.admin(AdminBody::Drain(AdminDrain { instance: id.0, cancel: false, stop: false }));
        self.world.call_at(self.world.now_us() + us, UNDRAIN + place as u64);
    }

    /// Ends a drain; repeated until the instance has done so, because the gManager may be down or disconnected. A
    /// drain order that is late, or waits for a process that is stopped or silent, is in progress until long after
    /// that.
    fn undrain(&mut self, place: Place) {
        let now = self.world.now_us();
        let Some(process) = self.world.process(place) else { return };
        let (status, stopped) = (process.instance.status(), process.paused_until_us.is_some());
        let rows = self.world.coordinator.iter().flat_map(|c| c.gmanager.status(c.clock.now_ms(now)));
        let listed = rows.into_iter().any(|row| row.alive && status.instance.is_some_and(|id| id.0 == row.instance));
        let seen_us = self.drains.entry(place).or_insert(now);
        if status.draining || stopped || !listed {
            *seen_us = now;
        }
        let Some(id) = status.instance.filter(|_| now < *seen_us + LATE_US) else {
            self.drains.remove(&place);
            return;
        };
        self.world.admin(AdminBody::Drain(AdminDrain { instance: id.0, cancel: true, stop: false }));
        self.world.call_at(self.world.now_us() + 1_000_000, UNDRAIN + place as u64);
    }

    fn move_blocks(&mut self, id: usize, to: Place, blocks: u32) {
        let Some(asked) = self.asked.get(&id).filter(|a| a.end.is_none()) else { return };
        let debtor = self.world.process(asked.place).and_then(Process::id);
        let target = self.world.process(to).and_then(Process::id);
        let (Some(debtor), Some(target)) = (debtor, target) else { return };
        let target = if target == debtor { 0 } else { target.0 };
        let (debtor, seq) = (debtor.0, id as u64 + 1);
        let order = AdminMove { debtor, seq, blocks, source: 0, target, dry_run: false, first: None };
        self.world.admin(AdminBody::Move(order));
    }

    fn restart(&mut self, place: Place) {
        let life = self.lives.entry(place).or_default();
        *life += 1;
        let life = *life;
        if place == GMANAGER {
            if self.world.coordinator.is_none() {
                self.scenario.pool.start_gmanager(&mut self.world, life);
            }
        } else if self.world.process(place).is_none() {
            self.scenario.pool.start(&mut self.world, place, life);
        }
    }

    fn summary(&self) -> Summary {
        let count =
            |of: fn(&End) -> bool| self.asked.values().filter(|a| a.end.as_ref().is_some_and(of)).count() as u64;
        let mut of = self.summary;
        let push = self.scenario.pool.push;
        self.world.live().for_each(|(_, p)| of.add_life(&p.instance.status(), push));
        Summary {
            events: self.world.events(),
            ms: self.world.now_us() / 1000,
            requests: self.asked.len() as u64,
            finished: count(|e| *e == End::Finished),
            refused: count(|e| *e == End::Refused),
            failed: count(|e| *e == End::Failed),
            cancelled: count(|e| *e == End::Cancelled),
            lost: count(|e| *e == End::Lost),
            tokens: self.asked.values().map(|a| u64::from(a.tokens)).sum(),
            switches: self.roles.switches,
            partials_frames: self.world.fabric.traffic(Class::Partials).0,
            bulk_frames: self.world.fabric.traffic(Class::Bulk).0,
            ..of
        }
    }
}
