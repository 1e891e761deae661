//! A whole pool in one thread and in simulated time: processes, their devices, the fabric between them, and the event
//! queue.
//!
//! [`World::step`] handles the next event. Clients' events are in [`World::emitted`]; calls planned by the caller
//! come back as [`Step::Call`]. The world notes violations of transfers; checkers look at it between steps.

mod transfers;

use crate::agenda::Agenda;
use crate::clock::Clock;
use crate::disk::Disk;
use crate::fabric::{Fabric, LinkProfile, Net};
use crate::happening::Happening;
use crate::network::{Delivery, Network};
use crate::place::{GMANAGER, Place, place_of};
use crate::process::{Coordinator, Process};
use crate::rng::Rng;
use crate::runner::SimRunner;
use crate::shared::{self, DeviceFault, Registrations};
use lagoon_backend::DeviceError;
use lagoon_cluster::GManager;
use lagoon_instance::{Effect, Event, InstanceConfig, PeerKey, TICK_MS};
use lagoon_protocol::{AdminBody, AdminQuery, AdminReply, Control, ControlBody};
use lagoon_runner::{Command, MapId, Report};
use lagoon_types::{InstanceId, SeqId, TokenEvent};
use lagoon_wire::{Class, Frame};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
pub use transfers::{Delays, Transfers};

/// Which frames a planned full queue is for.
pub type FrameFilter = Box<dyn Fn(&Frame) -> bool>;

/// Ticks between measurements of round trips, as in the shell.
const RTT_TICKS: u64 = 25;

/// Result of [`World::step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Processes handled events; see [`World::touched`].
    Handled,
    Call(u64),
}

/// An event that a client received.
#[derive(Debug)]
pub struct Emission {
    pub place: Place,
    pub seq: SeqId,
    pub event: TokenEvent,
}

/// The last lines of events, for people.
#[derive(Debug)]
pub struct Trace {
    lines: VecDeque<String>,
    limit: usize,
}

impl Trace {
    /// Keeps the last `limit` lines.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { lines: VecDeque::new(), limit }
    }

    /// The last lines, oldest first.
    #[must_use]
    pub fn into_lines(self) -> Vec<String> {
        self.lines.into()
    }

    fn add(&mut self, now_us: u64, place: Place, what: &str) {
        if self.lines.len() >= self.limit {
            self.lines.pop_front();
        }
        let what: String = what.chars().take(240).collect();
        self.lines.push_back(format!("{:>11.3} ms  node {place}  {what}", now_us as f64 / 1e3));
    }
}

/// A simulated pool; see the module's documentation.
pub struct World<R, N: Network = Fabric> {
    pub agenda: Agenda<Happening<N::Due>>,
    pub fabric: N,
    pub kv: Transfers,
    /// Processes by place; the first is the gManager's and always `None`.
    pub processes: Vec<Option<Process<R>>>,
    pub coordinator: Option<Coordinator>,
    /// Clients' events since the caller last took them.
    pub emitted: Vec<Emission>,
    /// Places whose processes handled an event in the last step.
    pub touched: Vec<Place>,
    /// Planned failures of devices.
    faulty: BTreeMap<Place, DeviceFault>,
    /// Planned full queues.
    full: BTreeMap<Place, FrameFilter>,
    /// Disk tiers of prefix caches.
    pub disks: BTreeMap<Place, Disk>,
    /// Incarnations that the gManager declared dead.
    pub fenced: BTreeSet<u64>,
    /// Time of the last device failure or full queue: such faults wait for their occasion.
    pub fired_us: Option<u64>,
    /// Trace of events, if set.
    pub trace: Option<Trace>,
    /// Memory for deliveries, and for reports, that are being handled.
    deliveries: Vec<Delivery>,
    reports: Vec<Report>,
    /// Bill of the report that is being handled.
    bill: N::Bill,
    rng: Rng,
    events: u64,
}

impl<R, N: Network> std::fmt::Debug for World<R, N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("agenda", &self.agenda).field("events", &self.events).finish_non_exhaustive()
    }
}

impl<R: SimRunner<Bill = ()>> World<R> {
    /// A world without processes, over a network with sessions and faults.
    #[must_use]
    pub fn new(profile: LinkProfile, mut rng: Rng) -> Self {
        // A generator of its own: transfers' draws change nothing in pools without transfers.
        let transfers = Rng::new(rng.clone().draw() ^ 0x4b56);
        Self::over(Fabric::new(profile, rng.split()), rng, Transfers::new(transfers, Delays::CHAOS))
    }
}

/// Faults of processes and of a network that is, or has, a [`Fabric`].
impl<R: SimRunner<Bill = ()>, N: Network<Due = Net, Bill = ()> + AsMut<Fabric>> World<R, N> {
    /// Ends an instance's process; its state is lost.
    pub fn kill(&mut self, place: Place) -> Option<Process<R>> {
        let process = self.processes.get_mut(place)?.take()?;
        self.fabric.as_mut().stop(place, &mut self.agenda);
        self.kill_paths(place);
        Some(process)
    }

    /// Ends the gManager's process.
    pub fn kill_gmanager(&mut self) {
        if self.coordinator.take().is_some() {
            self.fabric.as_mut().stop(GMANAGER, &mut self.agenda);
        }
    }

    /// Stops a process (as by SIGSTOP) for a while.
    pub fn pause(&mut self, place: Place, us: u64) {
        let until = self.now_us() + us;
        let life = if place == GMANAGER {
            let Some(coordinator) = &mut self.coordinator else { return };
            coordinator.paused_until_us = Some(until);
            coordinator.life
        } else {
            let Some(life) = self.stop_loop(place, until, false) else { return };
            life
        };
        self.fabric.as_mut().pause(place, until, &mut self.agenda);
        self.silence_paths(place, None);
        self.agenda.at(until, Happening::Resume { place, life });
    }

    /// Stops an instance's loop for a while, as by a slow call. Its peers do not notice, and its transports go on.
    pub fn pause_loop(&mut self, place: Place, us: u64) {
        let until = self.now_us() + us;
        let Some(life) = self.stop_loop(place, until, true) else { return };
        self.fabric.as_mut().hold(place, until, self.agenda.now_us());
        self.agenda.at(until, Happening::Resume { place, life });
    }

    fn stop_loop(&mut self, place: Place, until_us: u64, transports_run: bool) -> Option<u64> {
        let process = self.processes.get_mut(place)?.as_mut()?;
        (process.paused_until_us, process.transports_run) = (Some(until_us), transports_run);
        process.dazed = true;
        Some(process.life)
    }

    /// Blocks all frames between two processes for a while.
    pub fn partition(&mut self, a: Place, b: Place, us: u64) {
        self.fabric.as_mut().partition(a, b, us, &mut self.agenda);
        self.silence_paths(a, Some(b));
    }
}

impl<R: SimRunner<Bill = N::Bill>, N: Network> World<R, N> {
    /// A world without processes. `rng` draws the first ticks.
    #[must_use]
    pub fn over(fabric: N, rng: Rng, kv: Transfers) -> Self {
        Self {
            agenda: Agenda::default(),
            fabric,
            kv,
            processes: vec![None],
            coordinator: None,
            emitted: Vec::new(),
            touched: Vec::new(),
            faulty: BTreeMap::new(),
            full: BTreeMap::new(),
            disks: BTreeMap::new(),
            fenced: BTreeSet::new(),
            fired_us: None,
            trace: None,
            deliveries: Vec::new(),
            reports: Vec::new(),
            bill: N::Bill::default(),
            rng,
            events: 0,
        }
    }

    /// Simulated time, in microseconds.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        self.agenda.now_us()
    }

    /// Number of events that processes have handled.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events
    }

    /// The process at a place, if one lives there.
    #[must_use]
    pub fn process(&self, place: Place) -> Option<&Process<R>> {
        self.processes.get(place)?.as_ref()
    }

    /// The live instances, by place.
    pub fn live(&self) -> impl Iterator<Item = (Place, &Process<R>)> {
        self.processes.iter().enumerate().filter_map(|(place, p)| Some((place, p.as_ref()?)))
    }

    /// The process registered under a number.
    #[must_use]
    pub fn by_id(&self, id: InstanceId) -> Option<(Place, &Process<R>)> {
        self.live().find(|(_, p)| p.id() == Some(id))
    }

    /// Draws the time from an instance's start to its first tick.
    pub fn first_tick_us(&mut self) -> u64 {
        self.rng.below(TICK_MS * 1000)
    }

    /// Starts an instance's process at `place`, where none runs; its first tick is `first_us` from now.
    ///
    /// # Panics
    /// If one runs there.
    pub fn start(&mut self, place: Place, process: (InstanceConfig, R), clock: Clock, life: u64, first_us: u64) {
        let (config, runner) = process;
        if self.processes.len() <= place {
            self.processes.resize_with(place + 1, || None);
        }
        assert!(place != GMANAGER && self.processes[place].is_none(), "the place is free");
        self.kv.start(place, life, &config);
        self.processes[place] = Some(Process::new(config, runner, clock, life));
        self.fabric.start(place);
        self.fabric.connect(place, GMANAGER, &mut self.agenda);
        self.agenda.after(first_us, Happening::Tick { place, life });
    }

    /// Starts a gManager without state, which ticks every `tick_us`.
    ///
    /// # Panics
    /// If one runs.
    pub fn start_gmanager(&mut self, gmanager: GManager, clock: Clock, life: u64, tick_us: u64) {
        assert!(self.coordinator.is_none(), "a gManager runs");
        let (registered, paused_until_us) = (Registrations::default(), None);
        self.coordinator = Some(Coordinator { life, clock, gmanager, tick_us, registered, paused_until_us });
        self.fabric.start(GMANAGER);
        self.agenda.after(tick_us, Happening::Tick { place: GMANAGER, life });
    }

    /// Plans one failure of a device.
    pub fn break_device(&mut self, place: Place, fault: DeviceFault) {
        self.faulty.insert(place, fault);
    }

    /// Plans a full queue for the next of these frames to a peer.
    pub fn fill_queue(&mut self, place: Place, frames: FrameFilter) {
        self.full.insert(place, frames);
    }

    /// Plans a [`Step::Call`].
    pub fn call_at(&mut self, at_us: u64, call: u64) {
        self.agenda.at(at_us, Happening::Call(call));
    }

    /// Handles the next event; `None` if there are none.
    pub fn step(&mut self) -> Option<Step> {
        self.touched.clear();
        match self.agenda.pop()? {
            Happening::Call(call) => return Some(Step::Call(call)),
            Happening::Net(due) => self.on_net(due),
            Happening::Kv(kv) => self.on_kv(kv),
            Happening::Tick { place: GMANAGER, life } => self.on_gmanager_tick(life),
            Happening::Tick { place, life } => self.on_tick(place, life),
            Happening::Device { place, life, piece } => self.on_device(place, life, piece),
            Happening::Resume { place, life } => self.on_resume(place, life),
        }
        Some(Step::Handled)
    }

    /// Resume time of a stopped process; `None` if it runs.
    pub(crate) fn paused(&self, place: Place) -> Option<u64> {
        match place {
            GMANAGER => self.coordinator.as_ref()?.paused_until_us,
            _ => self.process(place)?.paused_until_us,
        }
    }

    /// As [`Self::paused`], for the process's transports.
    pub(crate) fn transports_paused(&self, place: Place) -> Option<u64> {
        let run = self.process(place).is_some_and(|process| process.transports_run);
        self.paused(place).filter(|_| !run)
    }

    fn on_resume(&mut self, place: Place, life: u64) {
        let now = self.now_us();
        if self.paused(place).is_none_or(|until| until > now) {
            return;
        }
        if place == GMANAGER {
            let Some(coordinator) = self.coordinator.as_mut().filter(|c| c.life == life) else { return };
            coordinator.paused_until_us = None;
        } else {
            let process = self.processes.get_mut(place).and_then(Option::as_mut).filter(|p| p.life == life);
            let Some(process) = process else { return };
            process.paused_until_us = None;
        }
        self.fabric.resume(place, &mut self.agenda);
    }

    fn on_tick(&mut self, place: Place, life: u64) {
        let Some(process) = self.processes.get_mut(place).and_then(Option::as_mut).filter(|p| p.life == life) else {
            return;
        };
        let again = Happening::Tick { place, life };
        if let Some(until) = process.paused_until_us {
            self.agenda.at(until + 1, again);
            return;
        }
        process.ticks += 1;
        let (measures, period) = (process.ticks.is_multiple_of(RTT_TICKS), process.clock.true_us(TICK_MS * 1000));
        self.agenda.after(period, again);
        self.handle(place, Event::Tick);
        self.tick_writer(place);
        if let Some(process) = self.processes.get_mut(place).and_then(Option::as_mut) {
            process.dazed = false;
        }
        if measures {
            for (peer, rtt_us) in self.fabric.round_trips(place) {
                self.handle(place, Event::Rtt { peer: PeerKey(peer as u64), rtt_us });
            }
        }
    }

    fn on_gmanager_tick(&mut self, life: u64) {
        let now = self.now_us();
        let Some(coordinator) = self.coordinator.as_mut().filter(|c| c.life == life) else { return };
        let again = Happening::Tick { place: GMANAGER, life };
        if let Some(until) = coordinator.paused_until_us {
            self.agenda.at(until + 1, again);
            return;
        }
        self.agenda.after(coordinator.clock.true_us(coordinator.tick_us), again);
        coordinator.gmanager.tick(coordinator.clock.now_ms(now));
        self.events += 1;
        self.drain_gmanager();
    }

    fn on_net(&mut self, due: N::Due) {
        let mut deliveries = std::mem::take(&mut self.deliveries);
        let processes = &self.processes;
        let accepts = |place: Place, class: usize| {
            let process = processes.get(place).and_then(Option::as_ref);
            class != Class::Bulk.index() || process.is_none_or(|p| p.instance.takes_bulk())
        };
        self.fabric.happen(due, &mut self.agenda, accepts, &mut deliveries);
        for what in deliveries.drain(..) {
            match what {
                Delivery::Up { at: GMANAGER, .. } | Delivery::Unreachable { at: GMANAGER, .. } => {}
                Delivery::Down { at: GMANAGER, peer } => {
                    if let Some(coordinator) = &mut self.coordinator {
                        coordinator.registered.lose(peer);
                    }
                }
                Delivery::Up { at, peer: GMANAGER } => self.handle(at, Event::GManagerUp),
                Delivery::Down { at, peer: GMANAGER } => self.handle(at, Event::GManagerDown),
                Delivery::Unreachable { peer: GMANAGER, .. } => {}
                Delivery::Up { at, peer } => self.handle(at, Event::PeerUp { peer: PeerKey(peer as u64) }),
                Delivery::Down { at, peer } | Delivery::Unreachable { at, peer } => {
                    self.handle(at, Event::PeerDown { peer: PeerKey(peer as u64) });
                }
                Delivery::Frame { at: GMANAGER, peer, frame } => self.on_gmanager_frame(peer, frame),
                Delivery::Frame { at, peer, frame } => self.on_frame(at, peer, frame),
            }
        }
        self.deliveries = deliveries;
    }

    fn on_frame(&mut self, at: Place, from: Place, frame: Frame) {
        let peer = (from != GMANAGER).then_some(PeerKey(from as u64));
        if let Some(event) = shared::event(peer, frame) {
            self.handle(at, event);
        }
    }

    fn on_gmanager_frame(&mut self, from: Place, frame: Frame) {
        let Frame::Control(Control { body: Some(body) }) = frame else { return };
        let now = self.now_us();
        let Some(coordinator) = &mut self.coordinator else { return };
        self.events += 1;
        let Coordinator { gmanager, clock, registered, .. } = coordinator;
        if let Some(reply) = registered.receive(gmanager, from, &body, clock.now_ms(now)) {
            self.send(GMANAGER, from, reply.into());
        }
        self.drain_gmanager();
    }

    /// Sends an operator's request to the gManager. `None` if it does not run.
    pub fn admin(&mut self, body: AdminBody) -> Option<AdminReply> {
        let now = self.now_us();
        let coordinator = self.coordinator.as_mut().filter(|c| c.paused_until_us.is_none())?;
        let query = AdminQuery { query: 1, body: Some(body) };
        let reply = coordinator.gmanager.on_admin(&query, coordinator.clock.now_ms(now));
        self.drain_gmanager();
        Some(reply)
    }

    /// Sends the gManager's messages to connected instances.
    fn drain_gmanager(&mut self) {
        while let Some(Coordinator { gmanager, registered, .. }) = &mut self.coordinator {
            let Some((place, body)) = registered.next_order(gmanager) else { return };
            if let ControlBody::Fenced(fenced) = &body {
                self.fenced.insert(fenced.incarnation);
            }
            if let Some(place) = place {
                self.send(GMANAGER, place, body.into());
            }
        }
    }

    /// Completes a device's piece of work: reports it and starts the next.
    fn on_device(&mut self, place: Place, life: u64, piece: u64) {
        let now = self.now_us();
        let process = self.processes.get_mut(place).and_then(Option::as_mut);
        let Some(process) = process.filter(|p| (p.life, p.piece) == (life, piece)) else { return };
        if let Some(until) = process.paused_until_us {
            self.agenda.at(until + 1, Happening::Device { place, life, piece });
            return;
        }
        process.runner.end(now, &mut process.reports);
        process.piece += 1;
        // A preemptive device starts anew when all reports have been handled, and at commands.
        process.busy = R::PREEMPTIVE;
        // The next piece of work may begin, and report, while these are handled.
        let mut reports = std::mem::replace(&mut process.reports, std::mem::take(&mut self.reports));
        for report in reports.drain(..) {
            let Some(process) = self.processes.get_mut(place).and_then(Option::as_mut) else { return };
            self.bill = process.runner.bill();
            let report = self.maybe_fail(place, report);
            self.handle(place, Event::Runner(report));
        }
        self.bill = N::Bill::default();
        if let Some(process) = self.processes.get_mut(place).and_then(Option::as_mut) {
            process.busy &= !R::PREEMPTIVE;
        }
        self.reports = reports;
        self.turn(place);
    }

    /// Starts the next piece of work of a device that is idle, or preempted by commands.
    fn turn(&mut self, place: Place) {
        let now = self.now_us();
        let Some(process) = self.processes.get_mut(place).and_then(Option::as_mut) else { return };
        let commands = !process.commands.is_empty();
        if process.busy && !(R::PREEMPTIVE && commands) {
            return;
        }
        process.piece += u64::from(commands);
        process.commands.drain(..).for_each(|command| process.runner.push(command, now));
        let took_us = process.runner.turn(now, &mut process.reports);
        process.busy |= took_us.is_some();
        if let Some(us) = took_us {
            self.agenda.after(us, Happening::Device { place, life: process.life, piece: process.piece });
        }
    }

    fn maybe_fail(&mut self, place: Place, report: Report) -> Report {
        let Some(failed) = self.faulty.get(&place).and_then(|fault| fault.strike(&report)) else { return report };
        self.faulty.remove(&place);
        self.fired_us = Some(self.now_us());
        failed
    }

    /// Hands an event to an instance and carries out its effects, including the consequences of failures.
    pub fn handle(&mut self, place: Place, event: Event) {
        if self.process(place).is_none() {
            return;
        }
        let mut pending = Vec::new();
        self.handle_one(place, event, &mut pending);
        while let Some(event) = pending.pop() {
            self.handle_one(place, event, &mut pending);
        }
        if self.touched.last() != Some(&place) {
            self.touched.push(place);
        }
        self.turn(place);
    }

    /// Handles one event; adds those of failed effects to `failures`.
    fn handle_one(&mut self, place: Place, event: Event, failures: &mut Vec<Event>) {
        let now = self.now_us();
        let Some(process) = self.processes.get_mut(place).and_then(Option::as_mut) else { return };
        self.events += 1;
        if let Some(trace) = self.trace.as_mut().filter(|_| !matches!(event, Event::Tick)) {
            trace.add(now, place, &format!("<- {event:?}"));
        }
        let mut effects = process.instance.handle(event, process.clock.now_ms(now));
        crate::effects::note(place, &effects);
        for effect in effects.drain(..) {
            if let Some(trace) = &mut self.trace {
                trace.add(now, place, &format!("-> {effect:?}"));
            }
            failures.extend(self.apply(place, effect));
        }
        if let Some(process) = self.processes.get_mut(place).and_then(Option::as_mut) {
            process.instance.reuse(effects);
        }
    }

    fn apply(&mut self, place: Place, effect: Effect) -> Option<Event> {
        match effect {
            Effect::ToGManager(body) => {
                self.send(place, GMANAGER, body.into());
                None
            }
            Effect::Connect { quic_addr, .. } => {
                if let Some(to) = place_of(&quic_addr).filter(|to| *to != place) {
                    self.fabric.connect(place, to, &mut self.agenda);
                }
                None
            }
            Effect::Control { peer, body } => self.send_to_peer(place, peer, body.into()),
            Effect::Partials { peer, frame } => self.send_to_peer(place, peer, frame.into()),
            Effect::Bulk { peer, frame } => self.send_to_peer(place, peer, frame.into()),
            Effect::Close { peer, reason } => {
                self.fabric.release(place, place_of_key(peer), &mut self.agenda);
                self.processes[place].as_mut()?.closed.push(reason);
                None
            }
            Effect::Runner(command) => {
                self.processes[place].as_mut()?.commands.push_back(command);
                None
            }
            Effect::Emit { seq, event } => {
                self.emitted.push(Emission { place, seq, event });
                None
            }
            Effect::Transfer(effect) => {
                self.transfer(place, effect);
                None
            }
            Effect::Disk(effect) => Some(Event::Disk(self.disks.get_mut(&place)?.carry_out(effect))),
            Effect::Map { map, blocks, memory } => self.map(place, (map, blocks), &memory.socket),
            // Its process would exit; the scenario decides when.
            Effect::Drained => {
                self.processes[place].as_mut()?.drained = true;
                None
            }
            Effect::Rejected { reason } => {
                self.processes[place].as_mut()?.rejected = Some(reason);
                None
            }
        }
    }

    /// Maps another process's memory on a device, by its name, where the shell uses a socket.
    fn map(&mut self, place: Place, (map, blocks): (MapId, u32), socket: &str) -> Option<Event> {
        let found = self.live().find_map(|(_, process)| process.runner.peer_memory(socket));
        let Some(memory) = found else {
            let error = Some(DeviceError::Unsupported("nobody lends that".to_owned()));
            return Some(Event::Runner(Report::Mapped { map, error }));
        };
        self.processes[place].as_mut()?.commands.push_back(Command::Map { map, blocks, memory });
        None
    }

    fn send_to_peer(&mut self, place: Place, peer: PeerKey, frame: Frame) -> Option<Event> {
        if self.full.get(&place).is_some_and(|full| full(&frame)) {
            self.full.remove(&place);
            self.fired_us = Some(self.now_us());
            return Some(Event::SendFailed { peer });
        }
        self.send(place, place_of_key(peer), frame);
        None
    }

    fn send(&mut self, from: Place, to: Place, frame: Frame) {
        self.fabric.send(from, to, frame, &self.bill, &mut self.agenda);
    }
}

fn place_of_key(peer: PeerKey) -> Place {
    usize::try_from(peer.0).unwrap_or(usize::MAX)
}
