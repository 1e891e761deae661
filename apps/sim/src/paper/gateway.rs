//! The shipped gateway's [`Dispatcher`] before a paper's cluster: requests wait in its queue, are bound late, and come back from
//! instances that fall behind. It learns what heartbeats say, as often as they come; it knows a request's longest answer.

use super::device::Device;
use super::traces::Request;
use crate::process::Process;
use lagoon_cluster::dispatch::{
    Arrival, Ask, Dispatcher, Effect, Elsewhere, Event, InstanceLoad, Learned, Mode, PrefixHashes, Report, RequestId,
};
use lagoon_protocol::Calibration;
use lagoon_types::limits::DISPATCH_TICK_MS;
use std::collections::BTreeMap;

/// The dispatcher, and its ticks. Its callers carry out the effects.
#[derive(Debug)]
pub(super) struct Gateway {
    core: Dispatcher<usize>,
    /// Whether a tick is on its way.
    ticks: bool,
    /// Cached tokens of requests that have begun, as their usage says.
    cached: BTreeMap<usize, u64>,
}

impl Gateway {
    pub(super) fn new() -> Self {
        Self { core: Dispatcher::new(Mode::LeastWork), ticks: false, cached: BTreeMap::new() }
    }

    /// Whether the instance that a request is bound to may give it back.
    pub(super) fn may_hand_back(&self, index: usize) -> bool {
        self.core.may_hand_back(id(index))
    }

    pub(super) fn arrive(
        &mut self,
        now_us: u64,
        index: usize,
        request: &Request,
        prefix: PrefixHashes,
    ) -> Vec<Effect<usize>> {
        let ask = Ask {
            prompt_tokens: request.prompt_tokens.into(),
            answer_tokens: request.output_tokens.into(),
            sequences: 1,
        };
        let arrival = Arrival { id: id(index), ask, tenant: "".into(), priority: 0, bytes: 0, prefix };
        self.handle(now_us, Event::Arrived(arrival))
    }

    pub(super) fn report<'a>(
        &mut self,
        now_us: u64,
        calibration: &Calibration,
        instances: impl Iterator<Item = (usize, &'a Process<Device>)>,
    ) -> Vec<Effect<usize>> {
        let report = |(place, process): (usize, &Process<Device>)| {
            let (instance, load) = (place, load(calibration, process));
            Report { instance, load, at_ms: now_us / 1_000 }
        };
        let reports = instances.map(report).collect();
        self.handle(now_us, Event::Reports { reports, elsewhere: Elsewhere::default() })
    }

    pub(super) fn began(&mut self, now_us: u64, index: usize) -> Vec<Effect<usize>> {
        self.handle(now_us, Event::Began { id: id(index) })
    }

    pub(super) fn ended(&mut self, now_us: u64, index: usize, tokens: u32) -> Vec<Effect<usize>> {
        let learned = Learned { cached_tokens: self.cached.remove(&index), answer_tokens: Some(tokens.into()) };
        self.handle(now_us, Event::Ended { id: id(index), learned })
    }

    pub(super) fn note_cached(&mut self, index: usize, tokens: u64) {
        self.cached.insert(index, tokens);
    }

    pub(super) fn handed_back(&mut self, now_us: u64, index: usize) -> Vec<Effect<usize>> {
        self.handle(now_us, Event::HandedBack { id: id(index) })
    }

    pub(super) fn tick(&mut self, now_us: u64) -> Vec<Effect<usize>> {
        self.ticks = false;
        self.handle(now_us, Event::Tick)
    }

    /// When the next tick is due, if requests wait and none is on its way; it is on its way then.
    pub(super) fn schedule_tick(&mut self, now_us: u64) -> Option<u64> {
        if self.ticks || !self.core.is_waiting() {
            return None;
        }
        self.ticks = true;
        Some(now_us + DISPATCH_TICK_MS * 1_000)
    }

    fn handle(&mut self, now_us: u64, event: Event<usize>) -> Vec<Effect<usize>> {
        self.core.handle(now_us / 1_000, event)
    }
}

fn id(index: usize) -> RequestId {
    RequestId(index as u64)
}

/// What an instance's heartbeat says now.
fn load(calibration: &Calibration, process: &Process<Device>) -> InstanceLoad {
    let status = process.instance.status();
    let small = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    InstanceLoad {
        calibration: Some(calibration.clone()),
        load: Some(process.instance.load()),
        prefills: true,
        block_tokens: status.block_tokens,
        blocks_total: status.blocks_total,
        blocks_free: status.blocks_free,
        // Without a gManager it lends nothing.
        blocks_lend_max: if status.registered { status.blocks_total } else { 0 },
        blocks_lent: status.blocks_lent,
        running: small(status.running),
        waiting: small(status.waiting),
        ..InstanceLoad::default()
    }
}
