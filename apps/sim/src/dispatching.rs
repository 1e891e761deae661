//! The shipped [`Dispatcher`] and [`Replay`] before modelled instances: random requests, instances that come, go, fall behind and give
//! requests back, some requests that kill instances, and reports that are old. A seed replays a run.
//!
//! Checked: a request is bound once, and again only after it was given back; none is forgotten: each is answered, or left by its client, or
//! given up after losses, and refused only where there is no instance; a waiting
//! head is passed a bounded number of times on the memory that it waits for; no token of an answer is lost or repeated; a request that
//! kills instances kills a bounded number; a bounded number of one tenant's requests start before another tenant's only one
//! ([`run_flooded`]).

use crate::rng::Rng;
use lagoon_cluster::dispatch::{
    Arrival, Ask, Dispatcher, Effect, Elsewhere, Event, InstanceLoad, Learned, Mode, Next, PrefixHashes, Progress,
    Refusal, Replay, ReplayLimits, Report, RequestId, Resend,
};
use lagoon_protocol::{BatchPoint, Calibration, Load};
use lagoon_types::limits::{DISPATCH_PASSES_MAX, DISPATCH_TICK_MS, GATEWAY_QUEUE_MS, HEARTBEAT_MS, PREFIX_HASHES_MAX};
use std::collections::{BTreeMap, VecDeque};

const BLOCK_TOKENS: u32 = 16;
/// Conversations with common prefixes, and rBlocks of a prompt behind one prefix hash.
const CONVERSATIONS: u64 = 5;
const PIECE_BLOCKS: u64 = 4;
/// Time within which requests arrive, in milliseconds.
const ARRIVALS_MS: u64 = 20_000;
/// Pause of a gateway between two rounds over the instances, in milliseconds.
const PAUSE_MS: u64 = 250;
/// Time of one token of an answer, in milliseconds.
const TOKEN_MS: u64 = 20;

/// Requests of a flooding tenant, which arrive at once.
const FLOOD: u64 = 300;
/// Of them, those that may start between the arrival and the start of another tenant's only waiting request.
const BEFORE_MAX: u32 = 8;

/// What a run saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub requests: u64,
    pub answered: u64,
    pub refused: u64,
    pub handed_back: u64,
    pub passes: u64,
    /// Requests that an instance refused and another one was sent.
    pub sent_on: u64,
    /// Answers that another instance went on with, and requests that were not given to another one.
    pub replayed: u64,
    pub aborted: u64,
}

/// The state of a request, from its arrival to its end, as its caller sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    At(u32),
}

/// A request that runs, and the rBlocks that it holds. It streams from the first token that its client has not got.
#[derive(Clone, Copy, Debug)]
struct Run {
    begun_ms: u64,
    end_ms: u64,
    blocks: u64,
}

/// What a client has of its request's answer, and what its gateway does about it.
#[derive(Debug)]
struct Client {
    replay: Replay<u32>,
    tokens: u64,
    /// Tokens that were sent with the request to its instance, for which it goes on after them.
    resumed: u64,
    /// Whether it kills the instance where it begins.
    kills: bool,
    killed: usize,
}

/// A modelled instance: admission in turn, all or nothing, as the shipped one's.
#[derive(Debug)]
struct Instance {
    blocks_total: u64,
    batch_max: usize,
    queue: VecDeque<u64>,
    running: BTreeMap<u64, Run>,
    is_up: bool,
    report: Option<Report<u32>>,
}

impl Instance {
    fn free(&self) -> u64 {
        self.blocks_total.saturating_sub(self.running.values().map(|run| run.blocks).sum())
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
            prompt_attention_us_per_ktoken: 0.0,
        };
        let load = InstanceLoad {
            calibration: Some(calibration),
            load: Some(load),
            prefills: true,
            block_tokens: BLOCK_TOKENS,
            blocks_total: small(self.blocks_total),
            blocks_lend_max: small(self.blocks_total),
            blocks_free: small(self.free()),
            running: small(self.running.len() as u64),
            waiting: small(self.queue.len() as u64),
            ..InstanceLoad::default()
        };
        Report { instance: number, load, at_ms }
    }
}

/// Prefixes of a request that goes on with one of [`CONVERSATIONS`].
fn prefix(id: u64, blocks: u64) -> PrefixHashes {
    let hash = |piece: u64| piece * CONVERSATIONS + id % CONVERSATIONS;
    let hashes = (0..blocks / PIECE_BLOCKS).take(PREFIX_HASHES_MAX).map(hash).collect();
    PrefixHashes { hashes, tokens_per_hash: (PIECE_BLOCKS * u64::from(BLOCK_TOKENS)) as f64 }
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
    clients: BTreeMap<u64, Client>,
    /// Requests that lost their instance, and when each is sent again.
    paused: Vec<(u64, u64)>,
    /// Passes of the head, counted from outside.
    passed: BTreeMap<u64, u32>,
    /// In a flooded pool: waiting requests of the tenant that sends few. Of one that was its only one when it arrived, how many of the other
    /// tenant's started meanwhile.
    before: BTreeMap<u64, Option<u32>>,
    /// Whether instances give requests back. Its tenant's charge for one is taken back, too, for which others of the tenant start.
    hand_backs: bool,
    faults: bool,
    outcome: Outcome,
}

/// Runs the seed's pool to the end of its requests.
///
/// # Errors
/// What was violated, and when.
pub fn run(seed: u64) -> Result<Outcome, String> {
    let mut rng = Rng::new(seed);
    let faults = |rng: &mut Rng| rng.once_in(2);
    World::draw(&mut rng, faults).run()
}

/// Runs the seed's pool with a tenant whose requests fill the queue, and another one that sends few.
///
/// # Errors
/// What was violated, and when.
pub fn run_flooded(seed: u64) -> Result<Outcome, String> {
    let mut rng = Rng::new(seed);
    let mut world = World { hand_backs: false, ..World::draw(&mut rng, |_| false) };
    world.report()?;
    for _ in 0..FLOOD {
        world.arrive_of("flood")?;
    }
    let begin_ms = world.now_ms;
    while world.now_ms < begin_ms + ARRIVALS_MS && world.states.len() > 50 {
        world.now_ms += DISPATCH_TICK_MS;
        if world.rng.once_in(30) {
            world.arrive_of("few")?;
        }
        if world.rng.once_in(HEARTBEAT_MS / DISPATCH_TICK_MS) {
            world.report()?;
        }
        for number in 0..world.instances.len() {
            world.advance(number)?;
        }
        world.handle(Event::Tick)?;
    }
    Ok(world.outcome)
}

impl World {
    fn draw(rng: &mut Rng, faults: impl Fn(&mut Rng) -> bool) -> Self {
        let count = 1 + rng.below(5);
        let instance = |rng: &mut Rng| Instance {
            blocks_total: 50 + rng.below(400),
            batch_max: 1 + rng.index(12),
            queue: VecDeque::new(),
            running: BTreeMap::new(),
            is_up: true,
            report: None,
        };
        let instances = (0..count).map(|_| instance(rng)).collect();
        let faults = faults(rng);
        Self {
            rng: rng.clone(),
            now_ms: 1_000_000,
            core: Dispatcher::new(Mode::LeastWork),
            instances,
            asks: BTreeMap::new(),
            states: BTreeMap::new(),
            clients: BTreeMap::new(),
            paused: Vec::new(),
            passed: BTreeMap::new(),
            before: BTreeMap::new(),
            hand_backs: true,
            faults,
            outcome: Outcome::default(),
        }
    }

    fn run(mut self) -> Result<Outcome, String> {
        let (begin_ms, pace) = (self.now_ms, 3 + self.rng.below(20));
        self.report()?;
        while self.now_ms < begin_ms + ARRIVALS_MS + 2 * GATEWAY_QUEUE_MS {
            self.tick(self.now_ms < begin_ms + ARRIVALS_MS, pace)?;
            if self.now_ms > begin_ms + ARRIVALS_MS && self.states.is_empty() {
                return Ok(Outcome { passes: self.core.stats().passes, ..self.outcome });
            }
        }
        let left: Vec<_> = self.states.iter().take(3).collect();
        Err(format!("requests are neither answered nor refused: {left:?}"))
    }

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
            let number = self.rng.index(self.instances.len());
            self.lose(number)?;
        }
        for number in 0..self.instances.len() {
            if !self.instances[number].is_up && self.rng.once_in(80) {
                self.instances[number].is_up = true;
                self.report()?;
            }
        }
        let due = |(at_ms, _): &(u64, u64)| *at_ms <= self.now_ms;
        let (due, later): (Vec<_>, Vec<_>) = std::mem::take(&mut self.paused).into_iter().partition(due);
        self.paused = later;
        for (_, id) in due {
            self.send_again(id)?;
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
        let replay = Replay::new(ReplayLimits::default(), true);
        let kills = self.faults && self.rng.once_in(80);
        self.clients.insert(id, Client { replay, tokens: 0, resumed: 0, kills, killed: 0 });
        let arrival = Arrival { id: RequestId(id), ask, tenant, priority, bytes: 100, prefix: prefix(id, blocks) };
        self.handle(Event::Arrived(arrival))
    }

    /// Has a small request of a tenant of a flooded pool arrive.
    fn arrive_of(&mut self, tenant: &'static str) -> Result<(), String> {
        let id = self.outcome.requests;
        self.outcome.requests += 1;
        // Less than a prefix hash: nothing waits for what is cached somewhere.
        let blocks = 1 + self.rng.below(PIECE_BLOCKS - 1);
        let ask = Ask { prompt_tokens: blocks * u64::from(BLOCK_TOKENS) - 1, answer_tokens: 64, sequences: 1 };
        self.asks.insert(id, ask);
        self.states.insert(id, State::Waiting);
        let replay = Replay::new(ReplayLimits::default(), true);
        self.clients.insert(id, Client { replay, tokens: 0, resumed: 0, kills: false, killed: 0 });
        if tenant == "few" {
            let is_only = self.before.is_empty();
            self.before.insert(id, is_only.then_some(0));
        }
        let (tenant, prefix) = (tenant.into(), prefix(id, blocks));
        self.handle(Event::Arrived(Arrival { id: RequestId(id), ask, tenant, priority: 0, bytes: 100, prefix }))
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
        let due = self.instances[number].running.iter().filter(|(_, run)| run.end_ms <= now_ms);
        for id in due.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.instances[number].running.remove(&id);
            self.outcome.answered += 1;
            self.end(id)?;
        }
        let back = if self.hand_backs && self.rng.once_in(60) { self.instances[number].queue.pop_back() } else { None };
        if let Some(id) = back {
            let client = self.clients.get_mut(&id).ok_or("a request without a client waits")?;
            if client.replay.waits_for_turn() && self.core.may_hand_back(RequestId(id)) {
                client.replay.hand_back();
                self.outcome.handed_back += 1;
                self.states.insert(id, State::Waiting);
                // It waits anew.
                self.passed.remove(&id);
                self.handle(Event::HandedBack { id: RequestId(id) })?;
            } else {
                self.instances[number].queue.push_back(id);
            }
        }
        if self.faults && self.rng.once_in(60) {
            self.refuse(number)?;
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
            of.running.insert(head, Run { begun_ms: now_ms, end_ms, blocks: blocks.min(of.blocks_total) });
            self.handle(Event::Began { id: RequestId(head) })?;
            return self.begin(number, head);
        }
        Ok(())
    }

    fn end(&mut self, id: u64) -> Result<(), String> {
        self.states.remove(&id);
        self.clients.remove(&id);
        self.paused.retain(|(_, other)| *other != id);
        // It found all that has a hash.
        let pieces = |ask: &Ask| prefix(id, ask.blocks(BLOCK_TOKENS)).hashes.len() as u64;
        let cached_tokens = self.asks.get(&id).map(|ask| pieces(ask) * PIECE_BLOCKS * u64::from(BLOCK_TOKENS));
        let learned = Learned { cached_tokens, answer_tokens: Some(self.rng.below(64)) };
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

    /// A request begins at an instance: after what its client has.
    fn begin(&mut self, number: usize, id: u64) -> Result<(), String> {
        let client = self.clients.get_mut(&id).ok_or("a request without a client begins")?;
        if client.resumed != client.tokens {
            let (resumed, tokens) = (client.resumed, client.tokens);
            return Err(format!("request {id} goes on after {resumed} tokens, and its client has {tokens}"));
        }
        client.replay.answered();
        if client.kills {
            client.killed += 1;
            if client.killed > ReplayLimits::default().fruitless_max {
                return Err(format!("request {id} was given to {} instances, and killed them", client.killed));
            }
            return self.lose(number);
        }
        Ok(())
    }

    /// An instance is lost: the clients have the beginnings of its answers, and their gateway sends the requests elsewhere.
    fn lose(&mut self, number: usize) -> Result<(), String> {
        let now_ms = self.now_ms;
        let of = &mut self.instances[number];
        of.is_up = false;
        let running = std::mem::take(&mut of.running);
        let lost: Vec<u64> = of.queue.drain(..).chain(running.keys().copied()).collect();
        self.report()?;
        for id in lost {
            // One that its dispatcher bound anew meanwhile would run twice.
            let state = self.states.get(&id);
            if state != Some(&State::At(small(number as u64))) {
                return Err(format!("request {id} of a lost instance is {state:?}"));
            }
            let client = self.clients.get_mut(&id).ok_or("a request without a client is lost")?;
            let more = running.get(&id).map_or(0, |run| (now_ms - run.begun_ms) / TOKEN_MS);
            client.tokens += more;
            if more > 0 {
                client.replay.progressed();
            }
            let progress = Progress { tokens: client.tokens, ..Progress::NONE };
            match client.replay.lose(small(number as u64), progress, now_ms) {
                Ok(Resend::After(tokens)) => {
                    client.resumed = tokens;
                    self.outcome.replayed += 1;
                    self.send_again(id)?;
                }
                Ok(Resend::Nothing) => return Err(format!("request {id} is over before its end")),
                Err(_) => self.abort(id)?,
            }
        }
        Ok(())
    }

    fn abort(&mut self, id: u64) -> Result<(), String> {
        self.outcome.refused += 1;
        self.outcome.aborted += 1;
        self.end(id)
    }

    /// Sends a request that lost its instance to another one, as soon as one takes it.
    fn send_again(&mut self, id: u64) -> Result<(), String> {
        loop {
            let listed = self.core.ranked(&self.asks[&id], &PrefixHashes::default());
            let client = self.clients.get_mut(&id).ok_or("a request without a client is sent again")?;
            match client.replay.next(self.now_ms) {
                Next::Look => client.replay.round(None, listed),
                Next::Pause => {
                    self.paused.push((self.now_ms + PAUSE_MS, id));
                    return Ok(());
                }
                Next::Abort(_) => return self.abort(id),
                // One that is down cannot be reached.
                Next::Send { instance, .. } if !self.instances[instance as usize].is_up => {}
                Next::Send { instance, .. } => {
                    self.put(id, instance);
                    return self.handle(Event::Sent { id: RequestId(id), instance });
                }
            }
        }
    }

    fn handle(&mut self, event: Event<u32>) -> Result<(), String> {
        let head = self.core.head();
        for effect in self.core.handle(self.now_ms, event) {
            match effect {
                Effect::Bind { id: RequestId(id), instance } => self.bound(id, instance, head)?,
                // What the queue is bounded by is not reached here.
                Effect::Refuse { id, why } if why != Refusal::NoInstance => {
                    return Err(format!("{id:?} is refused, at {} ms: {why:?}", self.now_ms));
                }
                Effect::Refuse { id: RequestId(id), .. } => {
                    self.outcome.refused += 1;
                    self.states.remove(&id);
                    self.clients.remove(&id);
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
        if self.before.remove(&id).is_none()
            && let Some((few, Some(before))) = self.before.iter_mut().next()
        {
            *before += 1;
            if *before > BEFORE_MAX {
                return Err(format!("{before} requests of another tenant started before request {few}"));
            }
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
        let listed = self.core.ranked(&self.asks[&id], &PrefixHashes::default());
        let client = self.clients.get_mut(&id).ok_or("a request without a client is bound")?;
        client.replay.round(Some(instance), listed);
        match client.replay.next(self.now_ms) {
            Next::Send { instance: to, is_free: true } if to == instance => {}
            next => return Err(format!("request {id} is bound to {instance}, and then {next:?}")),
        }
        self.put(id, instance);
        Ok(())
    }

    /// An instance refuses a request that waits there, and another one gets it; if there is none, it stays.
    fn refuse(&mut self, number: usize) -> Result<(), String> {
        let Some(id) = self.instances[number].queue.back().copied() else { return Ok(()) };
        let client = self.clients.get_mut(&id).ok_or("a request without a client is refused")?;
        if !client.replay.waits_for_turn() {
            return Ok(());
        }
        client.replay.refuse();
        match client.replay.next(self.now_ms) {
            Next::Send { is_free: true, .. } => Err(format!("request {id} is sent on beside the budget")),
            Next::Send { instance, .. } if self.instances[instance as usize].is_up => {
                self.instances[number].queue.pop_back();
                self.put(id, instance);
                self.outcome.sent_on += 1;
                self.handle(Event::Sent { id: RequestId(id), instance })
            }
            _ => Ok(()),
        }
    }

    fn put(&mut self, id: u64, instance: u32) {
        self.states.insert(id, State::At(instance));
        self.instances[instance as usize].queue.push_back(id);
    }
}
