//! Rows of the request placement map that a heartbeat carries (Infinite-LLM v2 §6.2): those that changed since the last
//! acknowledged heartbeat, or all of them to a gManager that has none.
//!
//! Invariant: a row whose last value was sent in an unacknowledged heartbeat is sent again, changed or not. So any
//! later heartbeat that arrives brings the gManager up to date, whatever was lost or reordered before it.

use lagoon_protocol::{Heartbeat, HeartbeatAck, PlacementEntry};
use lagoon_types::limits;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Debtor and sequence.
type Key = (u32, u64);

#[derive(Clone, Copy, Debug)]
struct Sent {
    blocks: u32,
    sealed: u32,
    /// The last heartbeat that carried it; [`u64::MAX`] if the row has another value, and no heartbeat had room for it.
    seq: u64,
    /// The last heartbeat for which there was such a row.
    noted: u64,
}

/// The placement rows sent to the gManager.
#[derive(Debug)]
pub struct PlacementReport {
    rows: BTreeMap<Key, Sent>,
    /// Heartbeats up to here are acknowledged.
    acked: u64,
    /// `Some` until a full heartbeat is acknowledged: the number of the last one sent (0: none yet).
    full: Option<u64>,
}

impl Default for PlacementReport {
    fn default() -> Self {
        Self { rows: BTreeMap::new(), acked: 0, full: Some(0) }
    }
}

impl PlacementReport {
    /// Makes the next heartbeat full: the gManager has no rows.
    pub fn restart(&mut self) {
        *self = Self::default();
    }

    /// Puts the rows to send into a heartbeat. `rows`: all current rows, each once; a row of no blocks counts as removed.
    pub fn fill(&mut self, heartbeat: &mut Heartbeat, rows: impl Iterator<Item = PlacementEntry>) {
        let seq = heartbeat.seq;
        if self.full.is_some() {
            self.full = Some(seq);
            heartbeat.placements_full = true;
            self.rows.clear();
        }
        let acked = self.acked;
        let send = &mut heartbeat.placements;
        for row in rows.filter(|r| r.blocks > 0) {
            let new = Sent { blocks: row.blocks, sealed: row.blocks_sealed, seq, noted: seq };
            match self.rows.entry((row.debtor, row.seq)) {
                Entry::Occupied(mut old) => {
                    let old = old.get_mut();
                    old.noted = seq;
                    if (old.blocks, old.sealed) == (new.blocks, new.sealed) && old.seq <= acked {
                        continue;
                    }
                    if send.len() < limits::HEARTBEAT_ROWS_MAX {
                        *old = new;
                        send.push(row);
                    } else {
                        // The last value sent stands, and the next heartbeat carries the new one.
                        old.seq = u64::MAX;
                    }
                }
                Entry::Vacant(place) if send.len() < limits::HEARTBEAT_ROWS_MAX => {
                    place.insert(new);
                    send.push(row);
                }
                Entry::Vacant(_) => {}
            }
        }
        // The other rows were removed, or their removal was sent and is not acknowledged.
        self.rows.retain(|key, old| {
            if old.noted == seq {
                return true;
            }
            if old.blocks == 0 && old.seq <= acked {
                return false;
            }
            if send.len() < limits::HEARTBEAT_ROWS_MAX {
                *old = Sent { blocks: 0, sealed: 0, seq, ..*old };
                send.push(PlacementEntry { debtor: key.0, seq: key.1, blocks: 0, blocks_sealed: 0 });
            } else {
                old.seq = u64::MAX;
            }
            true
        });
    }

    /// Handles the gManager's acknowledgement, or its request for all rows.
    pub fn on_ack(&mut self, ack: &HeartbeatAck) {
        if ack.placements_wanted {
            // A full heartbeat may be in flight already.
            if self.full.is_none_or(|sent| sent <= ack.seq) {
                self.restart();
            }
            return;
        }
        match self.full {
            // The acknowledged heartbeat precedes the full one, whose rows it does not acknowledge.
            Some(sent) if sent == 0 || ack.seq < sent => {}
            _ => {
                self.full = None;
                self.acked = self.acked.max(ack.seq);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn row(seq: u64, blocks: u32) -> PlacementEntry {
        PlacementEntry { debtor: 1, seq, blocks, blocks_sealed: blocks / 2 }
    }

    /// The gManager's half, as simple as can be.
    #[derive(Default)]
    struct Map {
        rows: BTreeMap<u64, u32>,
        seq: u64,
        complete: bool,
    }

    impl Map {
        fn take(&mut self, h: &Heartbeat) -> HeartbeatAck {
            if h.seq > self.seq {
                self.seq = h.seq;
                if h.placements_full {
                    self.rows.clear();
                    self.complete = true;
                }
                if self.complete {
                    for r in &h.placements {
                        if r.blocks == 0 {
                            self.rows.remove(&r.seq)
                        } else {
                            self.rows.insert(r.seq, r.blocks)
                        };
                    }
                }
            }
            HeartbeatAck { known: true, seq: h.seq, placements_wanted: !self.complete, ..Default::default() }
        }
    }

    #[test]
    fn a_settled_row_is_not_sent_again() {
        let mut report = PlacementReport::default();
        let send = |report: &mut PlacementReport, seq, rows: &[PlacementEntry]| {
            let mut h = Heartbeat { seq, ..Heartbeat::default() };
            report.fill(&mut h, rows.iter().cloned());
            h
        };
        let first = send(&mut report, 1, &[row(1, 4), row(2, 4)]);
        assert!(first.placements_full && first.placements.len() == 2);
        report.on_ack(&HeartbeatAck { seq: 1, ..Default::default() });
        let second = send(&mut report, 2, &[row(1, 4), row(2, 5)]);
        assert_eq!((second.placements_full, &second.placements[..]), (false, &[row(2, 5)][..]));
        // Without an acknowledgement it is sent again, even when it has its old value.
        assert_eq!(send(&mut report, 3, &[row(1, 4), row(2, 4)]).placements, [row(2, 4)]);
        report.on_ack(&HeartbeatAck { seq: 3, ..Default::default() });
        assert_eq!(send(&mut report, 4, &[row(1, 4), row(2, 4)]).placements, []);
        assert_eq!(send(&mut report, 5, &[row(2, 4)]).placements, [row(1, 0)]);
        assert_eq!(send(&mut report, 6, &[row(2, 4)]).placements, [row(1, 0)]);
        report.on_ack(&HeartbeatAck { seq: 6, ..Default::default() });
        assert_eq!(send(&mut report, 7, &[row(2, 4)]).placements, []);
    }

    #[test]
    fn more_rows_than_a_frame_holds_follow() {
        let mut report = PlacementReport::default();
        let rows: Vec<_> = (0..limits::HEARTBEAT_ROWS_MAX as u64 + 10).map(|i| row(i, 2)).collect();
        let mut map = Map::default();
        for seq in 1..=3 {
            let mut h = Heartbeat { seq, ..Heartbeat::default() };
            report.fill(&mut h, rows.iter().cloned());
            assert!(h.placements.len() <= limits::HEARTBEAT_ROWS_MAX);
            report.on_ack(&map.take(&h));
        }
        assert_eq!(map.rows.len(), rows.len());
        // All go at once, more than a frame says.
        for seq in 4..=6 {
            let mut h = Heartbeat { seq, ..Heartbeat::default() };
            report.fill(&mut h, std::iter::empty());
            report.on_ack(&map.take(&h));
        }
        assert!(map.rows.is_empty());
    }

    proptest! {
        /// Heartbeats and answers are lost, delayed and reordered, and gManagers replaced; after a heartbeat that
        /// arrives and is answered, and one more, both sides have the same rows.
        #[test]
        fn rows_agree_at_rest(acts in proptest::collection::vec((0u8..9, 0u64..6, 0u32..4), 1..200)) {
            let (mut report, mut map, mut rows) = (PlacementReport::default(), Map::default(), BTreeMap::new());
            let (mut beats, mut acks): (VecDeque<Heartbeat>, VecDeque<HeartbeatAck>) = Default::default();
            let mut seq = 0;
            let mut beat = |report: &mut PlacementReport, rows: &BTreeMap<u64, u32>| {
                seq += 1;
                let mut h = Heartbeat { seq, ..Heartbeat::default() };
                report.fill(&mut h, rows.iter().map(|(s, b)| row(*s, *b)));
                h
            };
            let index = |at: u64| usize::try_from(at).unwrap();
            for (act, at, blocks) in acts {
                match act {
                    0..=2 => drop(if blocks == 0 { rows.remove(&at) } else { rows.insert(at, blocks) }),
                    3 | 4 => beats.push_back(beat(&mut report, &rows)),
                    5 => drop(beats.remove(index(at)).map(|h| acks.push_back(map.take(&h)))),
                    6 => drop(acks.remove(index(at)).map(|a| report.on_ack(&a))),
                    7 => drop(beats.remove(index(at))),
                    _ if at == 0 => {
                        // Another gManager: the instance registers with it, on a new connection.
                        map = Map::default();
                        report.restart();
                        (beats, acks) = Default::default();
                    }
                    _ => {}
                }
            }
            for _ in 0..2 {
                let ack = map.take(&beat(&mut report, &rows));
                report.on_ack(&ack);
            }
            prop_assert_eq!(map.rows, rows);
        }
    }
}
