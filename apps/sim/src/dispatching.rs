//! The shipped [`Dispatcher`] before modelled instances: random requests, instances that come, go, fall behind and give requests back,
//! and reports that are old. A seed replays a run.
//!
//! Checked: a request is bound once, and again only after it was given back; none is forgotten, all are answered or refused; a waiting
//! head is passed a bounded number of times on the memory that it waits for.

use crate::rng::Rng;
use lagoon_cluster::dispatch::{
    Arrival, Ask, Dispatcher, Effect, Elsewhere, Event, InstanceLoad, Learned, Mode, PrefixHashes, Report, RequestId,
};
use lagoon_protocol::{BatchPoint, Calibration, Load};
use lagoon_types::limits::{DISPATCH_PASSES_MAX, DISPATCH_TICK_MS, GATEWAY_QUEUE_MS, HEARTBEAT_MS};
use std::collections::{BTreeMap, VecDeque};

const BLOCK_TOKENS: u32 = 16;
/// Time within which requests arrive, in milliseconds.
const ARRIVALS_MS: u64 = 20_000;

/// What a run saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub requests: u64,
    pub answered: u64,
    pub refused: u64,
    pub handed_back: u64,
    pub passes: u64,
}

/// The state of a request, from its arrival to its end, as its caller sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    At(u32),
}

/// A modelled instance: admission in turn, all or nothing, as the shipped one's.
#[derive(Debug)]
struct Instance {
    blocks_total: u64,
    batch_max: usize,
    queue: VecDeque<u64>,
    /// Requests that run, with their end and rBlocks.
    running: BTreeMap<u64, (u64, u64)>,
    is_up: bool,
    report: Option<Report<u32>>,
}

impl Instance {
    fn free(&self) -> u64 {
        self.blocks_total.saturating_sub(self.running.values().map(|(_, blocks)| blocks).sum())
    }

    fn reported(&self, number: u32, at_ms: u64, asks: &BTreeMap<u64, Ask>) -> Report<u32> {
        let queue_blocks = self.queue.iter().take(32).map(|id| small(asks[id].blocks(BLOCK_TOKENS)));
        let load = Load {
            batch_max: small(self.batch_max as u64),
            prefill_tokens: Some(self.queue.iter().map(|id| asks[id].prompt_tokens).sum()),
            queue_blocks: queue_blocks.collect(),
            ..Load::default()
        };
        let calibration = Calibration {
            batches: vec![BatchPoint { batch: 1, step_us: 1_000.0 }],
            attention_us_per_ktoken: 1.0,
            prefill_us_per_token: 50.0,
            copy_bytes_per_s: 0.0,
        };
        let load = InstanceLoad {
            calibration: Some(calibration),
            load: Some(load),
            prefills: true,
            block_tokens: BLOCK_TOKENS,
            blocks_total: small(self.blocks_total),
            blocks_free: small(self.free()),
            running: small(self.running.len() as u64),
            waiting: small(self.queue.len() as u64),
            ..InstanceLoad::default()
        };
        Report { instance: number, load, at_ms }
    }
}

fn small(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// A run in progress.
struct World {
    rng: Rng,
    now_ms: u64,
    core: Dispatcher<u32>,
    instances: Vec<Instance>,
    asks: BTreeMap<u64, Ask>,
    states: BTreeMap<u64, State>,
    /// Passes of the head, counted from outside.
    passed: BTreeMap<u64, u32>,
    faults: bool,
    outcome: Outcome,
}

/// Runs the seed's pool to the end of its requests.
///
/// # Errors
/// What was violated, and when.
pub fn run(seed: u64) -> Result<Outcome, String> {
    let mut rng = Rng::new(seed);
    let count = 1 + rng.below(5);
    let instance = |rng: &mut Rng| Instance {
        blocks_total: 50 + rng.below(400),
        batch_max: 1 + rng.index(12),
        queue: VecDeque::new(),
        running: BTreeMap::new(),
        is_up: true,
        report: None,
    };
    let instances = (0..count).map(|_| instance(&mut rng)).collect();
    let faults = rng.once_in(2);
    let mut world = World {
        rng,
        now_ms: 1_000_000,
        core: Dispatcher::new(Mode::LeastWork),
        instances,
        asks: BTreeMap::new(),
        states: BTreeMap::new(),
        passed: BTreeMap::new(),
        faults,
        outcome: Outcome::default(),
    };
    let (begin_ms, pace) = (world.now_ms, 3 + world.rng.below(20));
    world.report()?;
    while world.now_ms < begin_ms + ARRIVALS_MS + 2 * GATEWAY_QUEUE_MS {
        world.tick(world.now_ms < begin_ms + ARRIVALS_MS, pace)?;
        if world.now_ms > begin_ms + ARRIVALS_MS && world.states.is_empty() {
            return Ok(Outcome { passes: world.core.stats().passes, ..world.outcome });
        }
    }
    let left: Vec<_> = world.states.iter().take(3).collect();
    Err(format!("requests are neither answered nor refused: {left:?}"))
}

impl World {
    fn tick(&mut self, arrivals: bool, pace: u64) -> Result<(), String> {
        self.now_ms += DISPATCH_TICK_MS;
        if arrivals && self.rng.once_in(pace) {
            for _ in 0..=self.rng.below(3) {
                self.arrive()?;
            }
        }
        if self.rng.once_in(HEARTBEAT_MS / DISPATCH_TICK_MS) {
            self.report()?;
        }
        for number in 0..self.instances.len() {
            self.advance(number)?;
        }
        if self.faults && arrivals && self.rng.once_in(400) {
            self.fault()?;
        }
        if self.rng.once_in(200) {
            self.leave()?;
        }
        self.handle(Event::Tick)
    }

    fn arrive(&mut self) -> Result<(), String> {
        let id = self.outcome.requests;
        self.outcome.requests += 1;
        let is_long = self.rng.once_in(12);
        let blocks = if is_long { 100 + self.rng.below(600) } else { 1 + self.rng.below(20) };
        let ask = Ask { prompt_tokens: blocks * u64::from(BLOCK_TOKENS) - 1, answer_tokens: 64, sequences: 1 };
        let tenant = self.rng.pick(&["", "a", "b"]).into();
        let priority = i32::try_from(self.rng.below(5)).unwrap_or(0) - 2;
        self.asks.insert(id, ask);
        self.states.insert(id, State::Waiting);
        let arrival = Arrival { id: RequestId(id), ask, tenant, priority, bytes: 100, prefix: PrefixHashes::default() };
        self.handle(Event::Arrived(arrival))
    }

    /// Hands on reports that were made up to now; some instances have not reported anew.
    fn report(&mut self) -> Result<(), String> {
        for number in 0..self.instances.len() {
            let is_fresh = !self.rng.once_in(5);
            let of = &mut self.instances[number];
            if is_fresh || of.report.is_none() {
                of.report = Some(of.reported(small(number as u64), self.now_ms, &self.asks));
            }
        }
        let up = self.instances.iter().filter(|of| of.is_up);
        let reports = up.filter_map(|of| of.report.clone()).collect();
        self.handle(Event::Reports { reports, elsewhere: Elsewhere::default() })
    }

    /// An instance ends what is due, gives back what waits, and admits.
    fn advance(&mut self, number: usize) -> Result<(), String> {
        let now_ms = self.now_ms;
        let due = self.instances[number].running.iter().filter(|(_, (end_ms, _))| *end_ms <= now_ms);
        for id in due.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.instances[number].running.remove(&id);
            self.outcome.answered += 1;
            self.end(id)?;
        }
        let back = if self.rng.once_in(60) { self.instances[number].queue.pop_back() } else { None };
        if let Some(id) = back {
            if self.core.may_hand_back(RequestId(id)) {
                self.outcome.handed_back += 1;
                self.states.insert(id, State::Waiting);
                // It waits anew.
                self.passed.remove(&id);
                self.handle(Event::HandedBack { id: RequestId(id) })?;
            } else {
                self.instances[number].queue.push_back(id);
            }
        }
        // A pool-sized request borrows when this instance is idle.
        let of = &self.instances[number];
        let Some(head) = of.queue.front().copied().filter(|_| of.is_up && of.running.len() < of.batch_max) else {
            return Ok(());
        };
        let blocks = self.asks[&head].blocks(BLOCK_TOKENS);
        if blocks <= of.free() || of.running.is_empty() {
            let end_ms = now_ms + 200 + blocks * 10 + self.rng.below(2_000);
            let of = &mut self.instances[number];
            of.queue.pop_front();
            of.running.insert(head, (end_ms, blocks.min(of.blocks_total)));
            return self.handle(Event::Began { id: RequestId(head) });
        }
        Ok(())
    }

    fn end(&mut self, id: u64) -> Result<(), String> {
        self.states.remove(&id);
        let learned = Learned { cached_tokens: Some(0), answer_tokens: Some(self.rng.below(64)) };
        self.handle(Event::Ended { id: RequestId(id), learned })
    }

    /// A client leaves.
    fn leave(&mut self) -> Result<(), String> {
        if self.states.is_empty() {
            return Ok(());
        }
        let at = self.rng.index(self.states.len());
        let Some(id) = self.states.keys().nth(at).copied() else { return Ok(()) };
        for of in &mut self.instances {
            of.queue.retain(|queued| *queued != id);
            of.running.remove(&id);
        }
        self.outcome.refused += 1;
        self.end(id)
    }

    /// An instance is lost, and its callers send what it had to another; or it comes back.
    fn fault(&mut self) -> Result<(), String> {
        let number = self.rng.index(self.instances.len());
        let others = self.instances.iter().enumerate().any(|(other, of)| of.is_up && other != number);
        if self.instances[number].is_up && !others {
            return Ok(());
        }
        self.instances[number].is_up = !self.instances[number].is_up;
        let of = &mut self.instances[number];
        let lost: Vec<u64> = of.queue.drain(..).chain(std::mem::take(&mut of.running).into_keys()).collect();
        self.report()?;
        for id in lost {
            let Some(next) = self.core.ranked(&self.asks[&id], &PrefixHashes::default()).first().copied() else {
                return Err("no instance is ranked".to_owned());
            };
            // One that its dispatcher bound anew meanwhile would run twice.
            let state = self.states.get(&id);
            if state != Some(&State::At(small(number as u64))) {
                return Err(format!("request {id} of a lost instance is {state:?}"));
            }
            self.states.insert(id, State::At(next));
            self.instances[next as usize].queue.push_back(id);
            self.handle(Event::Sent { id: RequestId(id), instance: next })?;
        }
        Ok(())
    }

    fn handle(&mut self, event: Event<u32>) -> Result<(), String> {
        let head = self.core.head();
        for effect in self.core.handle(self.now_ms, event) {
            match effect {
                Effect::Bind { id: RequestId(id), instance } => self.bound(id, instance, head)?,
                Effect::Refuse { id: RequestId(id), .. } => {
                    self.outcome.refused += 1;
                    self.states.remove(&id);
                }
            }
        }
        let of = |wanted: fn(&State) -> bool| self.states.values().filter(|state| wanted(state)).count();
        let (waiting, bound) = (of(|state| *state == State::Waiting), of(|state| matches!(state, State::At(_))));
        let stats = self.core.stats();
        if (stats.waiting, stats.bound) != (waiting, bound) {
            return Err(format!("at {} ms {waiting} wait and {bound} are bound, not {stats:?}", self.now_ms));
        }
        Ok(())
    }

    fn bound(&mut self, id: u64, instance: u32, head: Option<(RequestId, Option<u32>)>) -> Result<(), String> {
        if self.states.get(&id) != Some(&State::Waiting) {
            return Err(format!("request {id} is bound to {instance} while it is {:?}", self.states.get(&id)));
        }
        if let Some((head, reserved)) = head
            && head.0 != id
            && self.states.get(&head.0) == Some(&State::Waiting)
            && reserved.is_none_or(|reserved| reserved == instance)
        {
            let passed = self.passed.entry(head.0).or_default();
            *passed += 1;
            if *passed > DISPATCH_PASSES_MAX {
                return Err(format!("{passed} requests passed the head {head:?} on memory that it waits for"));
            }
        }
        self.states.insert(id, State::At(instance));
        self.instances[instance as usize].queue.push_back(id);
        Ok(())
    }
}
