//! The summary of an instance's prefix cache that heartbeats carry: what changed since the last acknowledged one, at most
//! once in [`limits::CACHE_SUMMARY_MS`].

use crate::cached::cache_summary;
use lagoon_kv::BlockPool;
use lagoon_protocol::{CacheSummary, Heartbeat, HeartbeatAck};
use lagoon_types::limits;

/// The summaries sent to the gManager.
#[derive(Debug, Default)]
pub struct CacheReport {
    /// The last one acknowledged; empty if none was.
    acked: CacheSummary,
    /// The last one sent, and the number of its heartbeat.
    sent: Option<(u64, CacheSummary)>,
    /// The pool's version at the last look.
    looked: Option<u64>,
    next_ms: u64,
}

fn summary(pool: &BlockPool) -> CacheSummary {
    // Blocks of address rows could not be leased.
    if pool.caches_runs() { cache_summary(pool) } else { CacheSummary::default() }
}

impl CacheReport {
    /// The gManager has no summary.
    pub fn restart(&mut self) {
        *self = Self::default();
    }

    /// Puts the summary into a heartbeat, if it changed and one is due.
    pub fn fill(&mut self, heartbeat: &mut Heartbeat, pool: &BlockPool, now_ms: u64) {
        let unchanged = self.looked == Some(pool.changes()) && self.sent.is_none();
        if unchanged || now_ms < self.next_ms {
            return;
        }
        let summary = summary(pool);
        self.looked = Some(pool.changes());
        if summary == self.acked {
            self.sent = None;
            return;
        }
        self.next_ms = now_ms + limits::CACHE_SUMMARY_MS;
        self.sent = Some((heartbeat.seq, summary.clone()));
        heartbeat.cached = Some(Box::new(summary));
    }

    /// Handles the gManager's acknowledgement.
    pub fn on_ack(&mut self, ack: &HeartbeatAck) {
        if ack.placements_wanted {
            return self.restart();
        }
        if let Some((_, summary)) = self.sent.take_if(|(seq, _)| *seq == ack.seq) {
            self.acked = summary;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_kv::{BlockHash, BlockState, Owner};
    use lagoon_types::SeqId;

    fn sent(report: &mut CacheReport, pool: &BlockPool, seq: u64, now_ms: u64) -> Option<usize> {
        let mut heartbeat = Heartbeat { seq, ..Heartbeat::default() };
        report.fill(&mut heartbeat, pool, now_ms);
        heartbeat.cached.map(|summary| summary.fingerprints.len() / 8)
    }

    fn cache(pool: &mut BlockPool, hash: u8) {
        let owner = Owner::Own(SeqId(1));
        let blocks = pool.allocate(owner, 1, None).unwrap();
        pool.mark(blocks[0], BlockState::Sealed);
        pool.set_hash(blocks[0], BlockHash([hash; 32]), 0);
        pool.free(owner, &blocks);
    }

    #[test]
    fn a_summary_is_sent_until_it_is_acknowledged_and_again_when_it_changed() {
        let (mut report, mut pool) = (CacheReport::default(), BlockPool::new(4));
        assert_eq!(sent(&mut report, &pool, 1, 0), None, "an empty cache is what a gManager assumes");
        cache(&mut pool, 7);
        assert_eq!(sent(&mut report, &pool, 2, 10), Some(1));
        assert_eq!(sent(&mut report, &pool, 3, 20), None, "not so soon again");
        assert_eq!(sent(&mut report, &pool, 4, 1_010), Some(1), "it is not acknowledged");
        report.on_ack(&HeartbeatAck { known: true, seq: 4, ..Default::default() });
        assert_eq!(sent(&mut report, &pool, 5, 2_010), None);
        cache(&mut pool, 9);
        assert_eq!(sent(&mut report, &pool, 6, 2_020), Some(2));
        report.on_ack(&HeartbeatAck { known: true, seq: 6, ..Default::default() });
        report.restart();
        assert_eq!(sent(&mut report, &pool, 7, 3_000), Some(2), "another gManager has none");
        pool.drop_all();
        report.on_ack(&HeartbeatAck { known: true, seq: 7, ..Default::default() });
        assert_eq!(sent(&mut report, &pool, 8, 4_000), Some(0));
    }
}
