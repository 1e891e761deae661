//! What each instance can start now: its last report, corrected by what this dispatcher sent there and saw end since.
//!
//! Reports are some hundred milliseconds old. A request counts here until a report must include it, and what ended since the report
//! counts as free, so that one dispatcher's requests never wait for a report; those of others do.

use super::policy::{InstanceLoad, LeastWork, Unreported};
use super::{Ask, RequestId};
use lagoon_types::limits::{DISPATCH_AHEAD_MS, DISPATCH_LAG_MS};
use std::collections::BTreeMap;

/// An instance's report.
#[derive(Clone, Debug, PartialEq)]
pub struct Report<K> {
    pub instance: K,
    pub load: InstanceLoad,
    /// When the instance sent it, by the caller's clock in milliseconds.
    pub at_ms: u64,
}

/// A request that went to an instance.
#[derive(Clone, Debug)]
pub(super) struct Sent {
    pub(super) at_ms: u64,
    pub(super) ask: Ask,
    /// Tokens of its prompt that were predicted to be cached there.
    pub(super) cached: u64,
    pub(super) expected: f64,
    /// Whether its answer has begun: its prompt is computed.
    pub(super) began: bool,
}

/// Memory and places that became free after the report.
#[derive(Clone, Copy, Debug)]
struct Freed {
    at_ms: u64,
    blocks: u64,
    sequences: u32,
}

/// An instance, and what went there.
#[derive(Debug)]
pub(super) struct Instance<K> {
    report: Report<K>,
    sent: BTreeMap<RequestId, Sent>,
    freed: Vec<Freed>,
}

/// What an instance can start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) places: i64,
    pub(super) blocks: i64,
    /// Whether it will have computed its prompts soon.
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
        self.is_open() && i64::try_from(blocks).is_ok_and(|blocks| blocks <= self.blocks)
    }
}

impl<K: Copy> Instance<K> {
    pub(super) fn new(report: Report<K>) -> Self {
        Self { report, sent: BTreeMap::new(), freed: Vec::new() }
    }

    /// Takes a newer report.
    pub(super) fn learn(&mut self, report: Report<K>) {
        self.freed.retain(|freed| freed.at_ms + DISPATCH_LAG_MS > report.at_ms);
        self.report = report;
    }

    pub(super) fn send(&mut self, id: RequestId, sent: Sent) {
        self.sent.insert(id, sent);
    }

    pub(super) fn begin(&mut self, id: RequestId) {
        self.sent.entry(id).and_modify(|sent| sent.began = true);
    }

    /// A request that ended, or was never there.
    pub(super) fn end(&mut self, id: RequestId, now_ms: u64) -> Option<Sent> {
        let sent = self.sent.remove(&id)?;
        if self.is_reported(&sent) {
            let blocks = sent.ask.blocks(self.report.load.block_tokens);
            self.freed.push(Freed { at_ms: now_ms, blocks, sequences: sent.ask.sequences.max(1) });
        }
        Some(sent)
    }

    /// Takes a request out that the instance gave back: it is behind, and what it has free is in its next report.
    pub(super) fn withdraw(&mut self, id: RequestId) {
        self.sent.remove(&id);
    }

    fn is_reported(&self, sent: &Sent) -> bool {
        self.report.load.load.is_some() && sent.at_ms + DISPATCH_LAG_MS <= self.report.at_ms
    }

    /// Its load, with what the report does not include.
    pub(super) fn load(&self) -> InstanceLoad {
        let block_tokens = self.report.load.block_tokens;
        let mut unreported = Unreported::default();
        for sent in self.sent.values().filter(|sent| !self.is_reported(sent)) {
            unreported.requests = unreported.requests.saturating_add(sent.ask.sequences.max(1));
            unreported.answer_tokens += sent.expected;
            unreported.blocks = unreported.blocks.saturating_add(sent.ask.blocks(block_tokens));
            if !sent.began {
                unreported.prompt_tokens += sent.ask.prompt_tokens.saturating_sub(sent.cached);
            }
        }
        let load = &self.report.load;
        let freed_blocks = self.freed.iter().map(|freed| freed.blocks).fold(0, u64::saturating_add);
        let freed_places = self.freed.iter().map(|freed| freed.sequences).fold(0, u32::saturating_add);
        let blocks_free = u64::from(load.blocks_free).saturating_add(freed_blocks);
        InstanceLoad {
            blocks_free: u32::try_from(blocks_free).unwrap_or(u32::MAX).min(load.blocks_total),
            running: load.running.saturating_sub(freed_places),
            unreported,
            ..load.clone()
        }
    }

    /// What it can start at `now_ms`.
    pub(super) fn room(&self, policy: &LeastWork, now_ms: u64) -> Room {
        let load = self.load();
        let Some(reported) = &load.load else { return Room::UNKNOWN };
        let places = match reported.batch_max {
            0 => i64::MAX,
            most => i64::from(most) - i64::from(load.requests()),
        };
        let is_near_idle = self.ahead_us(policy, now_ms) <= crate::perf::as_f64(DISPATCH_AHEAD_MS) * 1_000.0;
        Room { places, blocks: load.room_blocks(), is_near_idle }
    }

    /// Prefill that it has left at `now_ms`, in microseconds: a queue that was reported, is worked off, and gets each request's prompt
    /// at the time of its dispatch.
    fn ahead_us(&self, policy: &LeastWork, now_ms: u64) -> f64 {
        let us = policy.prefill_us(&self.report.load);
        let mut at_ms = self.report.at_ms;
        let mut ahead = crate::perf::as_f64(self.report.load.prefill_tokens()) * us;
        let mut sent: Vec<&Sent> = self.sent.values().filter(|sent| !self.is_reported(sent) && !sent.began).collect();
        sent.sort_by_key(|sent| sent.at_ms);
        for sent in sent {
            ahead = worked_off(ahead, at_ms, sent.at_ms);
            at_ms = at_ms.max(sent.at_ms);
            ahead += crate::perf::as_f64(sent.ask.prompt_tokens.saturating_sub(sent.cached)) * us;
        }
        worked_off(ahead, at_ms, now_ms)
    }

    /// Whether it has nothing to do as far as is known.
    pub(super) fn is_idle(&self) -> bool {
        self.sent.is_empty() && self.load().requests() == 0
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
        let mut of = Instance::new(report(1_000, some(4)));
        let policy = LeastWork::default();
        // Two blocks of growth for each of the two running, and at most a sixteenth.
        assert_eq!(of.room(&policy, 1_000), Room { places: 2, blocks: 46, is_near_idle: true });
        of.send(RequestId(1), sent(1_000, 159));
        of.send(RequestId(2), sent(1_000, 15));
        assert_eq!(of.room(&policy, 1_000), Room { places: 0, blocks: 35, is_near_idle: true });
        assert!(!of.room(&policy, 1_000).is_open());
        of.learn(report(1_050, some(4)));
        assert_eq!(of.room(&policy, 1_050).blocks, 35, "the report may be from before");
        of.learn(report(1_100, some(4)));
        assert_eq!(of.room(&policy, 1_100).blocks, 46, "now it counts it");
        // What ends is free at once, and once.
        of.end(RequestId(1), 1_200).unwrap();
        assert_eq!(of.room(&policy, 1_200).blocks, 58);
        of.learn(report(1_250, some(4)));
        assert_eq!(of.room(&policy, 1_250).blocks, 58);
        of.learn(report(1_300, some(4)));
        assert_eq!(of.room(&policy, 1_300).blocks, 46);
        // What was never reported frees nothing.
        of.send(RequestId(3), sent(1_300, 15));
        of.end(RequestId(3), 1_301).unwrap();
        assert_eq!(of.room(&policy, 1_301).blocks, 46);
        assert!(of.end(RequestId(3), 1_302).is_none());
    }

    #[test]
    fn prompts_ahead_are_worked_off_and_those_that_have_begun_are_done() {
        let queued = Load { batch_max: 64, prefill_tokens: Some(900), ..Load::default() };
        let mut of = Instance::new(report(1_000, Some(queued)));
        let policy = LeastWork::default();
        let near = |of: &Instance<u32>, at| of.room(&policy, at).is_near_idle;
        assert!(!near(&of, 1_000) && !near(&of, 1_399) && near(&of, 1_400));
        of.send(RequestId(1), sent(1_400, 300));
        assert!(!near(&of, 1_400) && near(&of, 1_700));
        of.begin(RequestId(1));
        assert!(near(&of, 1_400));
    }

    #[test]
    fn an_instance_of_unknown_load_takes_everything() {
        let mut of = Instance::new(report(0, None));
        for n in 0..100 {
            of.send(RequestId(n), sent(n, 1_000_000));
        }
        assert_eq!(of.room(&LeastWork::default(), 100), Room::UNKNOWN);
        assert_eq!(of.load().unreported.requests, 100, "but they count for its rank");
    }
}
