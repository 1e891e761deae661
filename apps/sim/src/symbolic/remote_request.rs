//! Peers' work on the symbolic device: micro attention over lent slots, writes and reads.

use super::device::Symbolic;
use super::model::{KEY_BYTES, Key, LAYERS, ROW_BYTES, word};
use bytes::Bytes;
use lagoon_backend::AttnRows;
use lagoon_runner::{RemoteMerge, RemotePart, RemoteQuery, RemoteRead, RemoteTag, RemoteWrite, Report};
use lagoon_types::KvRun;
use lagoon_types::run::visible;

#[derive(Debug)]
pub(super) enum RemoteRequest {
    Query(RemoteQuery),
    Merge(RemoteMerge),
    Write(RemoteWrite),
    Read(RemoteRead),
}

/// Attention of one row: sum of weights, number of wrong keys, and number of keys seen.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Attended {
    pub(super) sum: u64,
    pub(super) wrong: u64,
    pub(super) count: u32,
}

impl Attended {
    pub(super) fn add(&mut self, key: Key, layer: u32, pos: u32) {
        self.sum = self.sum.wrapping_add(key.weight(layer, pos));
        self.wrong += u64::from(!key.is_of(layer, pos));
        self.count += 1;
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.sum = self.sum.wrapping_add(other.sum);
        self.wrong += other.wrong;
        self.count += other.count;
    }
}

impl Attended {
    /// A row of a creditor's partial.
    pub(super) fn of_part(part: &RemotePart, row: usize) -> Self {
        let count = &part.count[row * 4..row * 4 + 4];
        Self {
            sum: word(&part.out, row * ROW_BYTES),
            wrong: word(&part.out, row * ROW_BYTES + 8),
            count: u32::from_le_bytes([count[0], count[1], count[2], count[3]]),
        }
    }
}

/// The report of a partial's rows.
fn answer(tag: RemoteTag, rows: &[Attended]) -> Report {
    let (mut out, mut count) = (Vec::new(), Vec::new());
    for row in rows {
        out.extend_from_slice(&row.sum.to_le_bytes());
        out.extend_from_slice(&row.wrong.to_le_bytes());
        count.extend_from_slice(&row.count.to_le_bytes());
    }
    let lse = Bytes::from(vec![0; rows.len() * 4]);
    Report::RemotePartial { tag, out: out.into(), lse, count: count.into() }
}

/// Attention of the row at `row_pos` over runs whose keys `key` finds by slot.
pub(super) fn attend(
    runs: &[KvRun],
    row_pos: u32,
    window: Option<u32>,
    layer: u32,
    key: impl Fn(u32) -> Key,
) -> Attended {
    let mut attended = Attended::default();
    let seen = visible(row_pos, window);
    for run in runs {
        let own = run.positions();
        for pos in seen.start.max(own.start)..seen.end.min(own.end) {
            attended.add(key(run.base + (pos - run.first_pos)), layer, pos);
        }
    }
    attended
}

/// Does a piece of peers' work; returns its rows and keys.
pub(super) fn serve(device: &mut Symbolic, work: RemoteRequest, reports: &mut Vec<Report>) -> (u64, u64) {
    match work {
        RemoteRequest::Query(query) => serve_query(device, &query, reports),
        RemoteRequest::Merge(merge) => {
            let mut merged = vec![Attended::default(); merge.rows as usize];
            for part in &merge.parts {
                merged.iter_mut().enumerate().for_each(|(row, of)| of.merge(Attended::of_part(part, row)));
            }
            reports.push(answer(merge.tag, &merged));
            (u64::from(merge.rows), 0)
        }
        RemoteRequest::Write(RemoteWrite { tag, layer, pieces, kv }) => {
            let mut keys = kv.chunks_exact(KEY_BYTES);
            for (slot, tokens) in pieces {
                for slot in slot..slot + tokens {
                    let key = keys.next().expect("the instance validates remote requests' frames");
                    device.store[slot as usize][layer as usize] = Key::from_bytes(key);
                }
            }
            assert!(keys.next().is_none(), "the instance validates remote requests' frames");
            reports.push(Report::RemoteWritten { bytes: kv.len(), tag, failed: false });
            (0, (kv.len() / KEY_BYTES) as u64)
        }
        RemoteRequest::Read(RemoteRead { tag, layer, pieces }) => {
            let mut kv = Vec::new();
            for (slot, tokens) in pieces {
                let slots = &device.store[slot as usize..(slot + tokens) as usize];
                slots.iter().for_each(|s| s[layer as usize].to_bytes(&mut kv));
            }
            let keys = (kv.len() / KEY_BYTES) as u64;
            reports.push(Report::RemoteKv { tag, kv: kv.into() });
            (0, keys)
        }
    }
}

fn serve_query(device: &Symbolic, query: &RemoteQuery, reports: &mut Vec<Report>) -> (u64, u64) {
    assert!(query.layer < LAYERS, "the instance validates remote requests' frames");
    let rows: u32 = query.seqs.iter().map(|s| s.rows).sum();
    assert_eq!(query.queries.len(), rows as usize * ROW_BYTES, "the instance validates remote requests' frames");
    let (mut answered, mut keys) = (Vec::with_capacity(rows as usize), 0);
    for seq in &query.seqs {
        let &AttnRows { rows, pos0, run0, runs, .. } = seq;
        let runs = &query.runs[run0 as usize..(run0 + runs) as usize];
        for pos in pos0..pos0 + rows {
            let key = |slot: u32| device.store[slot as usize][query.layer as usize];
            let attended = attend(runs, pos, device.windows.pooled, query.layer, key);
            keys += u64::from(attended.count);
            answered.push(attended);
        }
    }
    reports.push(answer(query.tag, &answered));
    (u64::from(rows), keys)
}
