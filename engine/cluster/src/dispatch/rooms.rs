//! What each instance can start now: its last report, corrected by what this dispatcher sent there and saw end since.
//!
//! Reports are some hundred milliseconds old. A request counts here until a report must include it, and what ended since the report
//! counts as free, so that one dispatcher's requests never wait for a report; those of others do.
//!
//! A report older than [`FENCE_MS`] has no gManager behind it: one that answers would have fenced the instance by then. What it says of
//! other dispatchers' requests may be over, and nothing will correct it: the instance counts as having this dispatcher's requests alone,
//! and gives back what it cannot start.
//!
//! All figures are computed when something changes; a look reads them and allocates nothing.

use super::policy::{InstanceLoad, Unreported};
use super::{Ask, RequestId};
use lagoon_protocol::Load;
use lagoon_types::limits::{DISPATCH_AHEAD_MS, DISPATCH_LAG_MS, FENCE_MS, HAND_BACK_REST_MS};

/// An instance's report.
#[derive(Clone, Debug, PartialEq)]
pub struct Report<K> {
    pub instance: K,
    pub load: InstanceLoad,
    /// When the instance sent it, by the caller's clock in milliseconds.
    pub at_ms: u64,
}

/// A request that went to an instance.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) at_ms: u64,
    pub(super) ask: Ask,
    /// Tokens of its prompt that were predicted to be cached there.
    pub(super) cached: u64,
    pub(super) expected: f64,
    /// Whether its answer has begun: its prompt is computed.
    pub(super) began: bool,
}

/// A request that ended, and what became free with it. A report from its time counts it still.
#[derive(Clone, Copy, Debug)]
struct Freed {
    sent_ms: u64,
    /// Reports up to this time may count it.
    until_ms: u64,
    blocks: u64,
    sequences: u32,
}

impl Freed {
    /// A request that an instance of rBlocks of `block_tokens` had until `now_ms`. Times of reports are known less well than
    /// [`DISPATCH_LAG_MS`]; but of requests that take no longer many end within it, and what a report no longer counts must not become
    /// free twice: a quarter of their time at most.
    fn new(sent: &Sent, block_tokens: u32, now_ms: u64) -> Self {
        let lag_ms = DISPATCH_LAG_MS.min(now_ms.saturating_sub(sent.at_ms) / 4);
        let (blocks, sequences) = (sent.ask.blocks(block_tokens), sent.ask.sequences.max(1));
        Self { sent_ms: sent.at_ms, until_ms: now_ms + lag_ms, blocks, sequences }
    }
}

/// An instance, and what went there.
#[derive(Debug)]
pub(super) struct Instance<K> {
    report: Report<K>,
    /// In the order of their times.
    sent: Vec<(RequestId, Sent)>,
    freed: Vec<Freed>,
    is_outdated: bool,
    /// When it gave a request back, unless a report is newer.
    behind_since_ms: Option<u64>,
    /// Its load, with what the report does not include.
    load: InstanceLoad,
    /// Prefill that it has left at a time, in microseconds: it works that off.
    ahead: (u64, f64),
}

/// What an instance can start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) places: i64,
    pub(super) blocks: i64,
    /// Whether it will have computed its prompts soon, and gave nothing back since its report.
    pub(super) is_near_idle: bool,
}

impl Room {
    /// For an instance of which no load is known.
    const UNKNOWN: Self = Self { places: i64::MAX, blocks: i64::MAX, is_near_idle: true };

    /// Whether it takes any request.
    pub(super) fn is_open(&self) -> bool {
        self.places > 0 && self.is_near_idle
    }

    /// Whether it can start a request of so many rBlocks. More sequences than it has places start one after another.
    pub(super) fn fits(&self, blocks: u64) -> bool {
        self.is_open() && self.has(blocks)
    }

    /// Whether it has a place and memory for a request of so many rBlocks, busy or not.
    pub(super) fn has(&self, blocks: u64) -> bool {
        self.places > 0 && i64::try_from(blocks).is_ok_and(|blocks| blocks <= self.blocks)
    }
}

impl<K: Copy> Instance<K> {
    pub(super) fn new(report: Report<K>, now_ms: u64) -> Self {
        let (load, ahead) = (InstanceLoad::default(), (0, 0.0));
        let (sent, freed) = (Vec::new(), Vec::new());
        let mut new = Self { report, sent, freed, is_outdated: false, behind_since_ms: None, load, ahead };
        new.begin_with_report(now_ms);
        new
    }

    /// Takes a newer report.
    pub(super) fn learn(&mut self, report: Report<K>, now_ms: u64) {
        self.freed.retain(|freed| freed.until_ms > report.at_ms);
        self.behind_since_ms = self.behind_since_ms.filter(|since_ms| since_ms + DISPATCH_LAG_MS > report.at_ms);
        self.report = report;
        self.begin_with_report(now_ms);
    }

    fn begin_with_report(&mut self, now_ms: u64) {
        self.is_outdated = self.is_too_old(now_ms);
        self.load = self.report.load.clone();
        if self.is_outdated {
            let batch_max = self.load.load.as_ref().map_or(0, |load| load.batch_max);
            self.load.load = Some(Load { batch_max, ..Load::default() });
        }
        self.update();
    }

    fn is_too_old(&self, now_ms: u64) -> bool {
        self.report.load.load.is_some() && now_ms >= self.report.at_ms.saturating_add(FENCE_MS)
    }

    /// Looks at the report's age.
    pub(super) fn age(&mut self, now_ms: u64) {
        if !self.is_outdated && self.is_too_old(now_ms) {
            self.freed.clear();
            self.begin_with_report(now_ms);
        }
    }

    /// Adds a request. Returns the tokens of its prompt and answer that the instance is expected to compute.
    pub(super) fn send(&mut self, id: RequestId, sent: Sent) -> u64 {
        self.sent.retain(|(other, _)| *other != id);
        let prompt = sent.ask.prompt_tokens.saturating_sub(sent.cached);
        let tokens = prompt.saturating_add(crate::perf::whole(sent.expected).max(0).unsigned_abs());
        self.sent.push((id, sent));
        self.update();
        tokens
    }

    pub(super) fn begin(&mut self, id: RequestId) {
        self.sent.iter_mut().filter(|(other, _)| *other == id).for_each(|(_, sent)| sent.began = true);
        self.update();
    }

    fn take(&mut self, id: RequestId) -> Option<Sent> {
        let at = self.sent.iter().position(|(other, _)| *other == id)?;
        Some(self.sent.remove(at).1)
    }

    /// A request that ended. `was_there`: the instance answered; one that refused it, or was not reached, frees nothing.
    pub(super) fn end(&mut self, id: RequestId, was_there: bool, now_ms: u64) -> Option<Sent> {
        let sent = self.take(id)?;
        // The next report may be from before its end.
        if self.is_known() && (was_there || sent.began || self.is_reported(&sent)) {
            self.freed.push(Freed::new(&sent, self.report.load.block_tokens, now_ms));
        }
        self.update();
        Some(sent)
    }

    /// Takes a request out that went elsewhere: the instance refused it, or is lost.
    pub(super) fn leave(&mut self, id: RequestId) -> Option<Sent> {
        let sent = self.take(id)?;
        self.update();
        Some(sent)
    }

    /// Takes a request out that the instance gave back: it is behind, and what it has free is in its next report.
    pub(super) fn withdraw(&mut self, id: RequestId, now_ms: u64) {
        if self.take(id).is_some() {
            self.behind_since_ms = Some(now_ms);
            self.update();
        }
    }

    fn is_known(&self) -> bool {
        self.report.load.load.is_some() && !self.is_outdated
    }

    /// Whether the report must include a request.
    fn is_reported(&self, sent: &Sent) -> bool {
        self.is_known() && sent.at_ms + DISPATCH_LAG_MS <= self.report.at_ms
    }

    /// Computes load and prefill anew.
    fn update(&mut self) {
        let reported = &self.report.load;
        let (block_tokens, prefill_us) = (reported.block_tokens, reported.prefill_us());
        let mut unreported = Unreported::default();
        let (mut at_ms, mut ahead) = (self.report.at_ms, crate::perf::as_f64(self.load.prefill_tokens()) * prefill_us);
        for (_, sent) in self.sent.iter().filter(|(_, sent)| !self.is_reported(sent)) {
            unreported.requests = unreported.requests.saturating_add(sent.ask.sequences.max(1));
            unreported.answer_tokens += sent.expected;
            unreported.blocks = unreported.blocks.saturating_add(sent.ask.blocks(block_tokens));
            if !sent.began {
                let tokens = sent.ask.prompt_tokens.saturating_sub(sent.cached);
                unreported.prompt_tokens = unreported.prompt_tokens.saturating_add(tokens);
                // A queue that was reported is worked off, and gets each request's prompt at the time of its dispatch.
                ahead = worked_off(ahead, at_ms, sent.at_ms) + crate::perf::as_f64(tokens) * prefill_us;
                at_ms = at_ms.max(sent.at_ms);
            }
        }
        // Whatever the report may include.
        let freed = || self.freed.iter().filter(|freed| freed.sent_ms < self.report.at_ms);
        let freed_blocks = freed().map(|freed| freed.blocks).fold(0, u64::saturating_add);
        let freed_places = freed().map(|freed| freed.sequences).fold(0, u32::saturating_add);
        let (free, running, waiting) = match self.is_outdated {
            true => (reported.blocks_total, 0, 0),
            false => (reported.blocks_free, reported.running, reported.waiting),
        };
        let blocks_free = u64::from(free).saturating_add(freed_blocks);
        self.load.blocks_free = u32::try_from(blocks_free).unwrap_or(u32::MAX).min(reported.blocks_total);
        self.load.running = running.saturating_sub(freed_places);
        self.load.waiting = waiting;
        self.load.unreported = unreported;
        self.ahead = (at_ms, ahead);
    }

    /// Its load, with what the report does not include.
    pub(super) fn load(&self) -> &InstanceLoad {
        &self.load
    }

    /// What it can start at `now_ms`.
    pub(super) fn room(&self, now_ms: u64) -> Room {
        let Some(reported) = &self.load.load else { return Room::UNKNOWN };
        let places = match reported.batch_max {
            0 => i64::MAX,
            most => i64::from(most) - i64::from(self.load.requests()),
        };
        let is_near_idle = self.busy_us(now_ms).is_some_and(|us| us <= 0.0);
        Room { places, blocks: self.load.room_blocks(), is_near_idle }
    }

    /// Time in microseconds until it has computed its prompts but the last [`DISPATCH_AHEAD_MS`]; `None` if it is behind.
    pub(super) fn busy_us(&self, now_ms: u64) -> Option<f64> {
        let is_behind = self.behind_since_ms.is_some_and(|since_ms| now_ms < since_ms + HAND_BACK_REST_MS);
        let (at_ms, ahead) = self.ahead;
        let busy_us = worked_off(ahead, at_ms, now_ms) - crate::perf::as_f64(DISPATCH_AHEAD_MS) * 1_000.0;
        (!is_behind).then_some(busy_us.max(0.0))
    }

    /// Tokens that it has memory for, tiers included.
    pub(super) fn token_capacity(&self) -> u64 {
        let of = &self.report.load;
        let blocks = u64::from(of.blocks_total).saturating_add(of.tier_blocks);
        // Of one that reports no memory nothing is known, but that it was sent there.
        if blocks == 0 { u64::MAX } else { blocks.saturating_mul(of.block_tokens.into()) }
    }

    /// rBlocks that it lends at most, and that it can lend now.
    pub(super) fn lendable(&self, now_ms: u64) -> (u64, u64) {
        let (most, lent) = (self.report.load.blocks_lend_max, self.report.load.blocks_lent);
        let room = self.room(now_ms);
        let free = if room.is_open() { room.blocks.max(0).unsigned_abs() } else { 0 };
        (most.into(), u64::from(most.saturating_sub(lent)).min(free))
    }

    /// Whether it has nothing to do as far as is known.
    pub(super) fn is_idle(&self) -> bool {
        self.sent.is_empty() && self.load.requests() == 0
    }

    /// Whether requests of this dispatcher are there.
    pub(super) fn has_requests(&self) -> bool {
        !self.sent.is_empty()
    }

    pub(super) fn blocks_total(&self) -> u64 {
        self.report.load.blocks_total.into()
    }

    pub(super) fn block_tokens(&self) -> u32 {
        self.report.load.block_tokens
    }
}

/// Work in microseconds that is left of `work_us` after the time between two moments.
fn worked_off(work_us: f64, from_ms: u64, to_ms: u64) -> f64 {
    (work_us - crate::perf::as_f64(to_ms.saturating_sub(from_ms)) * 1_000.0).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_protocol::{BatchPoint, Calibration, Load};

    fn report(at_ms: u64, load: Option<Load>) -> Report<u32> {
        let calibration = Calibration {
            batches: vec![BatchPoint { batch: 1, step_us: 1_000.0 }],
            attention_us_per_ktoken: 1.0,
            prefill_us_per_token: 1_000.0,
            copy_bytes_per_s: 0.0,
            prompt_attention_us_per_ktoken: 0.0,
        };
        let load = InstanceLoad {
            calibration: Some(calibration),
            load,
            prefills: true,
            block_tokens: 16,
            blocks_total: 100,
            blocks_free: 50,
            running: 2,
            ..InstanceLoad::default()
        };
        Report { instance: 1, load, at_ms }
    }

    fn sent(at_ms: u64, prompt_tokens: u64) -> Sent {
        let ask = Ask { prompt_tokens, answer_tokens: 8, sequences: 1 };
        Sent { at_ms, ask, cached: 0, expected: 8.0, began: false }
    }

    fn some(batch_max: u32) -> Option<Load> {
        Some(Load { batch_max, ..Load::default() })
    }

    #[test]
    fn what_was_sent_counts_until_a_report_includes_it() {
        let mut of = Instance::new(report(1_000, some(4)), 1_000);
        // Two blocks of growth for each of the two running, and at most a sixteenth.
        assert_eq!(of.room(1_000), Room { places: 2, blocks: 46, is_near_idle: true });
        of.send(RequestId(1), sent(1_000, 159));
        of.send(RequestId(2), sent(1_000, 15));
        assert_eq!(of.room(1_000), Room { places: 0, blocks: 35, is_near_idle: true });
        assert!(!of.room(1_000).is_open());
        of.learn(report(1_050, some(4)), 1_050);
        assert_eq!(of.room(1_050).blocks, 35, "the report may be from before");
        of.learn(report(1_100, some(4)), 1_100);
        assert_eq!(of.room(1_100).blocks, 46, "now it counts it");
        // What ends is free at once, and once.
        of.end(RequestId(1), true, 1_200).unwrap();
        assert_eq!(of.room(1_200).blocks, 58);
        of.learn(report(1_249, some(4)), 1_249);
        assert_eq!(of.room(1_249).blocks, 58, "50 ms are a quarter of its time");
        of.learn(report(1_250, some(4)), 1_250);
        assert_eq!(of.room(1_250).blocks, 46);
        // What was never reported frees nothing.
        of.send(RequestId(3), sent(1_300, 15));
        of.end(RequestId(3), true, 1_301).unwrap();
        assert_eq!(of.room(1_301).blocks, 46);
        assert!(of.end(RequestId(3), true, 1_302).is_none());
    }

    /// A chat's next turn comes at the end of the one before, which a report that arrives then still counts.
    #[test]
    fn a_report_from_before_a_requests_end_is_corrected() {
        let mut of = Instance::new(report(1_000, some(4)), 1_000);
        of.send(RequestId(1), sent(1_010, 159));
        of.end(RequestId(1), true, 1_200).unwrap();
        assert_eq!(of.room(1_200), Room { places: 2, blocks: 46, is_near_idle: true }, "the report is from before it");
        for at_ms in [1_020, 1_150, 1_220] {
            of.learn(report(at_ms, some(4)), 1_210);
            assert_eq!(of.room(1_210), Room { places: 3, blocks: 58, is_near_idle: true }, "from its time");
        }
        of.learn(report(1_300, some(4)), 1_310);
        assert_eq!(of.room(1_310), Room { places: 2, blocks: 46, is_near_idle: true }, "from after its end");
    }

    /// A refusing instance would look the emptier the more it refuses.
    #[test]
    fn what_an_instance_refused_frees_nothing() {
        let mut of = Instance::new(report(1_000, some(4)), 1_000);
        for id in 1..4 {
            of.send(RequestId(id), sent(1_010, 159));
        }
        of.leave(RequestId(1)).unwrap();
        of.end(RequestId(2), false, 1_015).unwrap();
        of.begin(RequestId(3));
        of.end(RequestId(3), false, 1_200).unwrap();
        of.learn(report(1_100, some(4)), 1_110);
        assert_eq!(of.room(1_210), Room { places: 3, blocks: 58, is_near_idle: true }, "one had begun");
    }

    /// Ten requests a tenth of a second, each of which takes a twentieth: a report counts the five that run at its time.
    #[test]
    fn short_requests_become_free_once() {
        let mut of = Instance::new(report(1_000, some(64)), 1_000);
        for n in 0..30 {
            of.send(RequestId(n), sent(1_000 + 10 * n, 15));
            if n >= 5 {
                of.end(RequestId(n - 5), true, 1_000 + 10 * n).unwrap();
            }
        }
        of.learn(report(1_290, some(64)), 1_290);
        let freed: u32 = of.freed.iter().filter(|freed| freed.sent_ms < 1_290).map(|freed| freed.sequences).sum();
        assert!(freed <= 2, "{freed} of five");
    }

    #[test]
    fn prompts_ahead_are_worked_off_and_those_that_have_begun_are_done() {
        let queued = Load { batch_max: 64, prefill_tokens: Some(900), ..Load::default() };
        let mut of = Instance::new(report(1_000, Some(queued)), 1_000);
        let near = |of: &Instance<u32>, at| of.room(at).is_near_idle;
        assert!(!near(&of, 1_000) && !near(&of, 1_399) && near(&of, 1_400));
        of.send(RequestId(1), sent(1_400, 300));
        assert!(!near(&of, 1_400) && near(&of, 1_700));
        of.begin(RequestId(1));
        assert!(near(&of, 1_400));
    }

    /// The gManager is gone: other dispatchers' requests of the last report may be over.
    #[test]
    fn of_an_outdated_report_the_own_requests_are_left() {
        let load = Load { batch_max: 4, prefill_tokens: Some(1 << 30), ..Load::default() };
        let mut of = Instance::new(report(1_000, Some(load)), 1_000);
        of.send(RequestId(1), sent(800, 159));
        of.send(RequestId(2), sent(1_000, 15));
        let (before, after) = (999 + FENCE_MS, 1_000 + FENCE_MS);
        of.age(before);
        assert_eq!(of.room(before), Room { places: 1, blocks: 45, is_near_idle: false });
        of.age(after);
        assert_eq!(of.room(after), Room { places: 2, blocks: 89, is_near_idle: true });
        // What it gives back shows that others are there.
        of.withdraw(RequestId(1), after);
        assert!(!of.room(after).is_open() && !of.room(after + HAND_BACK_REST_MS - 1).is_open());
        assert_eq!(of.room(after + HAND_BACK_REST_MS), Room { places: 3, blocks: 99, is_near_idle: true });
        of.learn(report(after, some(4)), after);
        assert!(!of.room(after).is_open(), "a report from before");
        of.learn(report(after + DISPATCH_LAG_MS, some(4)), after + DISPATCH_LAG_MS);
        assert_eq!(of.room(after + DISPATCH_LAG_MS).places, 2);
        of.end(RequestId(2), true, after + DISPATCH_LAG_MS).unwrap();
        assert_eq!(of.room(after + DISPATCH_LAG_MS).places, 3, "a report counts it again");
    }

    #[test]
    fn an_instance_of_unknown_load_takes_everything() {
        let mut of = Instance::new(report(0, None), 0);
        for n in 0..100 {
            of.send(RequestId(n), sent(n, 1_000_000));
        }
        assert_eq!(of.room(100), Room::UNKNOWN);
        assert_eq!(of.load().unreported.requests, 100, "but they count for its rank");
    }
}
